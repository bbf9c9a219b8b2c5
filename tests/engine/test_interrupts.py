"""Ctrl-C at any line of the engine, the scheduler and the cache: nothing is lost but the turns that ran."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import PensieveError, StepFailedError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.validation import TurnSpec
from tests.engine.fake_transfers import Delays
from tests.engine.harness import Harness, small_config
from tests.engine.test_failures import two_running_turns

LAYERS = tuple(f"pensieve_jax/{layer}/" for layer in ("engine", "scheduler", "cache"))
NUM_POINTS = 120
TWO_TIERS = small_config(gpu_pages=8, cpu_pages=6, swap_out_fraction=0.5)
DELAYS = Delays(seed=1, laziness=0.5)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in some layers; counts lines where n is None."""

    def __init__(self, at: int | None, layers: tuple[str, ...] = LAYERS) -> None:
        self.num_lines = 0
        self._at = at
        self._layers = layers

    def __enter__(self) -> Interrupt:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if any(layer in frame.f_code.co_filename for layer in self._layers) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._on_line


def act(harness: Harness, turns: list) -> None:
    """A bit of everything that changes state, under memory pressure."""
    harness.submit(harness.facts(harness.prompt(70, seed=8), "c", max_tokens=4), "c")
    for _ in range(3):
        harness.engine.step()
    harness.engine.cancel(turns[0])
    harness.engine.abandon(harness.submit(harness.facts(harness.prompt(9, seed=9)), None))
    for _ in range(12):
        harness.engine.step()
    harness.engine.truncate("b", 30)
    harness.engine.end("a")
    prefix = harness.engine.share_prefix(harness.prompt(20, seed=10))
    spec = TurnSpec(harness.prompt(5, seed=11), SamplingParams(max_tokens=2, ignore_eos=True), prefix=prefix)
    (turn,) = harness.engine.submit([spec])
    harness.engine.step()
    harness.engine.release_prefix(prefix)
    harness.engine.cancel(turn)


@pytest.mark.parametrize("config", [small_config(), TWO_TIERS], ids=["one tier", "two tiers"])
def test_an_interrupt_at_any_line_leaves_a_usable_engine(config: EngineConfig) -> None:
    harness = Harness(config, delays=DELAYS)
    turns, _ = two_running_turns(harness)
    with Interrupt(None) as lines:
        act(harness, turns)
    assert lines.num_lines > 1000
    stride = max(lines.num_lines // NUM_POINTS, 1)
    for at in range(1, lines.num_lines, stride):
        harness = Harness(config, delays=DELAYS)
        turns, _ = two_running_turns(harness)
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            act(harness, turns)
        harness.drain()
        assert all(turn.done for turn in turns), f"line {at}"
        for turn in turns:
            assert turn.error is None or isinstance(turn.error, StepFailedError), f"line {at}"
        for seed, name in enumerate("abcd", 20):
            harness.turn(name, 12, seed=seed, max_tokens=5)
        harness.check_empty()


def test_a_second_thread_is_refused_while_a_call_is_under_way() -> None:
    """As a thread would see it: another one's identity stands where the call wrote it."""
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(5), "a", max_tokens=4), "a")
    harness.engine._guard._thread = -1
    with pytest.raises(PensieveError, match="Another thread"):
        harness.engine.step()
    harness.engine._guard._thread = None
    harness.run(turn)
