"""Windows of an engine's steps during which chunks move, and equal windows without movement.

Owns: a crowd of conversations that decode all the time, one that returns repeatedly, donors whose chunks are
pushed out, and timing a number of steps. Does not know: targets, or how figures are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pensieve_jax import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn

_NUM_SETTLING_STEPS = 4
_IN_FLIGHT = ("copying out", "leaving", "copying in")
RETURNER = "returner"


@dataclass(frozen=True)
class Return:
    """Turn of a conversation that came back; the turn was cancelled afterwards.

    Attributes:
      window_s: time from its submission over the steps of the window.
      num_steps: calls of `step` until its first token.
      first_token_s: time until its first token.
      swapped_in_tokens, recomputed_tokens: tokens of its history.
    """

    window_s: float
    num_steps: int
    first_token_s: float
    swapped_in_tokens: int
    recomputed_tokens: int


class Stage:
    """Engine with conversations of seeded random ids."""

    def __init__(self, engine: Engine, vocab_size: int, *, chunk_tokens: int, prompt_tokens: int) -> None:
        self.engine = engine
        self._random = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._prompt_tokens = prompt_tokens
        self._crowd: list[Turn] = []
        self._donors: dict[str, int] = {}  # chunks left of each

    # Set-up

    def make_history(self, name: str, num_tokens: int) -> None:
        """Make a conversation whose `num_tokens` tokens are all in the KV cache."""
        self._run([TurnSpec(self._ids(num_tokens), SamplingParams(max_tokens=1, ignore_eos=True), name)])
        self.engine.truncate(name, num_tokens)

    def make_donors(self, num_donors: int, num_chunks: int) -> None:
        """Make idle conversations with `num_chunks` chunks each, to be pushed out."""
        for i in range(num_donors):
            self.make_history(f"donor-{i}", num_chunks * self._chunk_tokens)
            self._donors[f"donor-{i}"] = num_chunks

    def start_crowd(self, num_turns: int, context_tokens: int, max_tokens: int) -> None:
        """Start `num_turns` conversations that decode until `end_crowd`."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        specs = [TurnSpec(self._ids(context_tokens), params, f"crowd-{i}") for i in range(num_turns)]
        self._crowd = self.engine.submit(specs)
        while not all(turn.token_ids for turn in self._crowd):
            self.engine.step()

    def crowd_tokens(self) -> list[int]:
        """Return the tokens that each turn of the crowd has decoded."""
        return [len(turn.token_ids) for turn in self._crowd]

    def end_crowd(self) -> None:
        """Cancel the crowd's turns."""
        for turn in self._crowd:
            assert not turn.done, "a reply of the crowd has ended"
            self.engine.cancel(turn)
        self._crowd = []
        while self.engine.has_unfinished:
            self.engine.step()

    # Events within windows

    def push_out(self, num_chunks: int) -> None:
        """Send `num_chunks` of the donors' chunks to the host with the next step."""
        while num_chunks:
            name = next(iter(self._donors))
            count = min(num_chunks, self._donors[name])
            assert self.engine.push_out(name, count) == count
            self._donors[name] -= count
            if not self._donors[name]:
                del self._donors[name]
            num_chunks -= count

    def settle(self) -> None:
        """Step until no copy is in flight and steps follow each other as usual."""
        for _ in range(_NUM_SETTLING_STEPS):
            self.engine.step()
        while any(self.engine.census()[state] for state in _IN_FLIGHT):
            self.engine.step()

    def window(self, num_steps: int, before_step: Callable[[int], None]) -> float:
        """Return the seconds of `num_steps` steps; `before_step` is called with the number of each."""
        self.settle()
        start_s = time.perf_counter()
        for number in range(num_steps):
            before_step(number)
            self.engine.step()
        return time.perf_counter() - start_s

    def away(self, *, pieces: int = 4) -> None:
        """Send the returning conversation to the host, its chunks at different times."""
        num_chunks = self.engine.conversations.num_tokens(RETURNER) // self._chunk_tokens
        for _ in range(pieces):
            self.engine.push_out(RETURNER, -(-num_chunks // pieces))
            self.settle()

    def comes_back(self, num_steps: int, *, begin: Callable[[], None] | None = None) -> Return:
        """Submit a turn of the returning conversation, do the steps of a window, and cancel the turn."""
        self.settle()
        start_s = time.perf_counter()
        if begin is not None:
            begin()
        turn = self.submit_return()
        num_done, first = 0, None
        while num_done < num_steps or first is None:
            self.engine.step()
            num_done += 1
            if first is None and turn.token_ids:
                first = (num_done, time.perf_counter() - start_s)
        window_s = time.perf_counter() - start_s
        return self._take_back(turn, window_s, *first)

    def comes_back_to_a_full_batch(self, num_blocking_tokens: int) -> Return:
        """Let a turn return behind one that has the last place; the clock starts when that one has ended."""
        self.settle()
        params = SamplingParams(max_tokens=num_blocking_tokens, ignore_eos=True)
        (blocker,) = self.engine.submit([TurnSpec([3], params, None)])
        self.engine.step()
        turn = self.submit_return()
        while not blocker.done:
            self.engine.step()
        start_s, num_steps = time.perf_counter(), 0
        while not turn.token_ids:
            self.engine.step()
            num_steps += 1
        seconds = time.perf_counter() - start_s
        return self._take_back(turn, seconds, num_steps, seconds)

    def submit_return(self) -> Turn:
        """Submit a turn of the returning conversation that runs until it is cancelled."""
        params = SamplingParams(max_tokens=10**6, ignore_eos=True)
        (turn,) = self.engine.submit([TurnSpec(self._ids(self._prompt_tokens), params, RETURNER)])
        return turn

    def _take_back(self, turn: Turn, window_s: float, num_steps: int, first_token_s: float) -> Return:
        usage = turn.request.usage(len(turn.token_ids))
        self.engine.cancel(turn)
        return Return(window_s, num_steps, first_token_s, usage.swapped_in_tokens, usage.recomputed_tokens)

    def _ids(self, count: int) -> list[int]:
        found: list[int] = self._random.integers(3, self._vocab_size, count).tolist()
        return found

    def _run(self, specs: Sequence[TurnSpec]) -> None:
        turns = self.engine.submit(specs)
        while not all(turn.done for turn in turns):
            self.engine.step()
        for turn in turns:
            if turn.error is not None:
                raise turn.error
