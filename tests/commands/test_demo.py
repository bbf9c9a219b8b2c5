"""The demonstration passes, and fails when it should."""

from __future__ import annotations

import contextlib
import dataclasses
import io

import pytest

from pensieve_jax import CacheConfig, ConfigError, EngineConfig
from pensieve_jax.commands import demo_screen, demo_speed
from pensieve_jax.commands.demo_speed import Speed
from pensieve_jax.model_source import DEFAULT_MODEL
from tests.launching import load, optimized

demo = load("pensieve_jax.commands.demo_run")
_served: list[list] = []
_speeds: list[Speed] = []
_judged: dict[int, tuple] = {}  # by its identity, a turn and what the dense reference says of it
NEEDED = {
    "swapped_in_tokens": "swapped in",
    "recomputed_tokens": "recomputed",
    "num_suspensions": "suspended for lack of memory",
}


pytestmark = pytest.mark.long  # `.ci/check_wheel` runs all of it, from the wheel


@pytest.fixture
def served(launch, monkeypatch, compilation_cache):
    """Return what a whole run served, in a list of one; it runs once.

    It computes more than it compiles, so it compiles with optimization.
    """
    if not _served:
        serve, measure = demo.serve, demo_speed.measure
        monkeypatch.setattr(demo, "serve", lambda llm: _served.append(serve(llm)) or _served[-1])
        monkeypatch.setattr(demo_speed, "measure", lambda llm: _speeds.append(measure(llm)) or _speeds[-1])
        monkeypatch.setattr(demo, "replay", replay)
        flags = {"model": DEFAULT_MODEL, "compilation_cache_dir": compilation_cache}
        with optimized():
            assert launch("demo", shared_llm=False, **flags) == 0
        monkeypatch.undo()
    return _served


real_replay = demo.replay


def replay(model, turns):
    """Return `demo.replay`, limited to turns that it has not judged yet."""
    new = [turn for turn in turns if id(turn) not in _judged]
    if new:
        equal, margin = real_replay(model, new)
        _judged.update((id(turn), (turn, one, margin)) for turn, one in zip(new, equal, strict=True))
    _, equal, margins = zip(*(_judged[id(turn)] for turn in turns), strict=True)
    return list(equal), min(margins)


@pytest.fixture
def turns(served):
    """Return the turns that were served with a KV cache."""
    return served[0]


class Engines:
    """Stands in for engines, and starts none."""

    config = EngineConfig(cache=CacheConfig(gpu_pages=24))

    def __init__(self, llm):
        self._llm = llm

    def start(self, config):
        return contextlib.nullcontext(self._llm)


def relaunch(launch, llm, monkeypatch, turns, **flags):
    """Run the demonstration over turns that were served before."""
    monkeypatch.setattr(demo, "DemoEngines", lambda *_: Engines(llm))
    monkeypatch.setattr(demo, "serve", lambda _: turns)
    monkeypatch.setattr(demo, "replay", replay)
    monkeypatch.setattr(demo_speed, "measure", lambda _: Speed(928, 0.01, 500.0))
    return launch("demo", shared_llm=False, model=DEFAULT_MODEL, **flags)


def test_the_kv_cache_saves_work(turns):
    assert demo_screen.num_computed(turns) < 0.75 * demo_screen.num_from_scratch(turns)
    for turn in turns:
        usage = turn.output.usage
        sources = usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens
        assert sources + usage.prefilled_tokens == len(turn.history_ids) + len(turn.prompt_ids)


def test_a_long_conversation_is_measured_with_and_without_state(served):
    """Nothing is said of the times, which depend on what else runs."""
    kept, scratch = _speeds
    assert kept.history_tokens == scratch.history_tokens == 1024 - 96
    assert all(value > 0 for speed in _speeds for value in speed)


def test_timed_turns_find_their_history_and_leave_nothing(launch, llm):
    """With state they reuse nearly all of it; the timed first tokens end no turn."""
    before = llm.stats()
    speed = demo_speed.measure(llm)
    assert speed.history_tokens == llm.engine.limits.max_context_tokens - 96
    names = [f"user {number}" for number in range(demo_speed.NUM_USERS)]
    assert [len(llm.history(name).turns) for name in names] == [2] * len(names)
    after = llm.stats()
    assert after["num_turns_finished"] - before["num_turns_finished"] == 2 * len(names)
    for name in names:
        llm.end(name)


def test_the_output_fits_one_screen(turns, launch, llm, monkeypatch, capsys):
    """The screen has 80 by 24 characters, including the shell's next line."""
    capsys.readouterr()
    assert relaunch(launch, llm, monkeypatch, turns) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    legend = next(i for i, line in enumerate(lines) if "in host memory  " in line)
    assert lines[legend + 2].startswith("ada "), "symbols are explained before they are used"
    assert lines[legend + 14].startswith("Wall time ")
    for name, script in demo_screen.CONVERSATIONS.items():
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert script.fact in row


def test_the_picture_has_a_mark_for_every_chunk(turns, monkeypatch):
    ada = [turn for turn in turns if turn.conversation_id == "ada"][-1]
    num_chunks = -(-(len(ada.history_ids) - 1) // 32)
    assert len(ada.tiers) == num_chunks
    ada = ada._replace(tiers=("gpu", "cpu", None))
    assert "ada   █▒·" in demo_screen.picture([ada])
    monkeypatch.setattr(demo_screen.sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert "ada   #+." in demo_screen.picture([ada])


def test_the_picture_shows_what_the_last_turn_found(turns):
    """A turn recomputes what was dropped before it, whatever other turns do meanwhile."""
    last = [turn for turn in turns if turn.turn == 6]
    assert {tier for turn in last for tier in turn.tiers} == {"gpu", "cpu", None}
    for turn in last:
        num_known = len(turn.history_ids) - 1
        dropped = sum(min(32, num_known - 32 * i) for i, tier in enumerate(turn.tiers) if tier is None)
        assert turn.output.usage.recomputed_tokens >= dropped, turn.conversation_id


def test_details_are_the_whole_transcript(turns, launch, llm, monkeypatch, capsys):
    assert relaunch(launch, llm, monkeypatch, turns, details=True) == 0
    out = capsys.readouterr().out
    assert all(turn.prompt in out for turn in turns)
    assert out.count("assistant> ") == 48 and "tokens of history: " in out


def test_it_passes(turns):
    """Six turns of eight conversations use all sources of history, and suspensions."""
    assert len(turns) == 48
    usages = [turn.output.usage for turn in turns]
    for name in NEEDED:
        assert any(getattr(usage, name) for usage in usages), name
    first = [turn.output.usage for turn in turns if turn.turn == 1]
    assert sum(usage.reused_gpu_tokens > 0 for usage in first) == 7, "the system prompt was not shared"
    for turn, usage in zip(turns, usages, strict=True):
        sources = usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens
        assert sources + usage.prefilled_tokens == len(turn.history_ids) + usage.prompt_tokens


def test_facts_are_recalled_from_either_tier_and_after_a_drop(turns):
    last = {turn.conversation_id: turn.output for turn in turns if turn.turn == 6}
    right = {name: script.fact in last[name].text for name, script in demo_screen.CONVERSATIONS.items()}
    assert sum(right.values()) >= 7
    for source in ("swapped_in_tokens", "recomputed_tokens"):
        assert any(right[name] and getattr(output.usage, source) for name, output in last.items())


def test_a_turn_reports_where_its_history_was(turns):
    usage = dataclasses.replace(
        turns[8].output.usage, reused_gpu_tokens=32, swapped_in_tokens=64, recomputed_tokens=0
    )
    turn = turns[8]._replace(history_ids=(1,) * 97, output=dataclasses.replace(turns[8].output, usage=usage))
    assert demo_screen.whereabouts(turn) == "97 tokens of history: 32 on the device, 64 swapped in"


def test_the_last_line_is_the_verdict(turns, launch, llm, monkeypatch, capsys):
    assert relaunch(launch, llm, monkeypatch, turns) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "48 of 48 turns equal"


def test_too_few_pages_name_the_flag(launch, llm, monkeypatch):
    monkeypatch.setattr(demo, "DemoEngines", lambda *_: Engines(llm))
    monkeypatch.setattr(demo, "serve", lambda llm: llm.generate([[9] * 5000]))
    with pytest.raises(
        ConfigError, match=r"--gpu_pages is 16, but must be more, since .* exceed the [\d,]+ tokens"
    ):
        launch("demo", shared_llm=False, model=DEFAULT_MODEL)


def test_one_changed_token_fails(turns, launch, llm, monkeypatch, capsys):
    output = turns[9].output
    token_ids = (*output.token_ids[:5], output.token_ids[5] ^ 1, *output.token_ids[6:])
    wrong = turns[9]._replace(output=dataclasses.replace(output, token_ids=token_ids))
    assert relaunch(launch, llm, monkeypatch, [*turns[:9], wrong, *turns[10:]], details=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("NO") for line in lines) == 1
    assert lines[-1] == "47 of 48 turns equal"
    assert lines[-2] == f"turn 2 of {wrong.conversation_id} differs from the dense reference"


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_event_fails_the_demonstration(turns, launch, llm, monkeypatch, capsys, name):
    def without(turn):
        usage = dataclasses.replace(turn.output.usage, **{name: 0})
        return turn._replace(output=dataclasses.replace(turn.output, usage=usage))

    few = [next(turn for turn in turns if getattr(turn.output.usage, one)) for one in NEEDED]
    assert relaunch(launch, llm, monkeypatch, few) == 0
    assert ": set other" not in capsys.readouterr().out
    assert relaunch(launch, llm, monkeypatch, [without(turn) for turn in few]) == 1
    assert f"no turn was {NEEDED[name]}: set other --gpu_pages or --cpu_pages" in capsys.readouterr().out
