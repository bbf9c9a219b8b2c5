"""The demonstration passes, and fails when it should."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from pensieve_jax.assembly import DEFAULT_MODEL
from tests.launching import load, optimized

demo = load("demo")
_served: list[list] = []
NEEDED = {
    "swapped_in_tokens": "swapped something in",
    "recomputed_tokens": "recomputed something",
    "num_suspensions": "were suspended",
}


@pytest.fixture
def turns(launch, monkeypatch):
    """What a whole run served; it is run once. It computes more than it compiles, and so compiles well."""
    if not _served:
        serve = demo.serve
        monkeypatch.setattr(demo, "serve", lambda llm: _served.append(serve(llm)) or _served[-1])
        with optimized():
            assert launch("demo", shared_llm=False, model=DEFAULT_MODEL) == 0
        monkeypatch.undo()
    return _served[0]


def relaunch(launch, llm, monkeypatch, turns):
    """The demonstration over turns that were served before."""
    monkeypatch.setattr(demo, "LLM", lambda *_, **__: contextlib.nullcontext(llm))
    monkeypatch.setattr(demo, "serve", lambda _: turns)
    return launch("demo", shared_llm=False, model=DEFAULT_MODEL)


def test_it_passes(turns):
    """Six turns of eight conversations; all sources of history occur, and so do suspensions."""
    assert len(turns) == 48
    usages = [turn.output.usage for turn in turns]
    for name in NEEDED:
        assert any(getattr(usage, name) for usage in usages), name
    first = [turn.output.usage for turn in turns if turn.turn == 1]
    assert sum(usage.reused_gpu_tokens > 0 for usage in first) == 7, "the system prompt was not shared"
    for turn, usage in zip(turns, usages, strict=True):
        sources = usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens
        assert sources + usage.prefilled_tokens == len(turn.history_ids) + usage.prompt_tokens


def test_what_was_told_comes_back_out_of_either_tier_and_out_of_none(turns):
    last = {turn.conversation_id: turn.output for turn in turns if turn.turn == 6}
    right = {name: script.told in last[name].text for name, script in demo.CONVERSATIONS.items()}
    assert sum(right.values()) >= 7
    for source in ("swapped_in_tokens", "recomputed_tokens"):
        assert any(right[name] and getattr(output.usage, source) for name, output in last.items())


def test_a_turn_says_where_its_history_was(turns):
    usage = dataclasses.replace(
        turns[8].output.usage, reused_gpu_tokens=32, swapped_in_tokens=64, recomputed_tokens=0
    )
    turn = turns[8]._replace(history_ids=(1,) * 97, output=dataclasses.replace(turns[8].output, usage=usage))
    assert demo.whereabouts(turn) == "97 tokens of history: 32 on the device, 64 swapped in"


def test_the_last_line(turns, launch, llm, monkeypatch, capsys):
    assert relaunch(launch, llm, monkeypatch, turns) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "48 of 48 turns equal"


def test_one_changed_token_fails(turns, launch, llm, monkeypatch, capsys):
    output = turns[9].output
    token_ids = (*output.token_ids[:5], output.token_ids[5] ^ 1, *output.token_ids[6:])
    wrong = turns[9]._replace(output=dataclasses.replace(output, token_ids=token_ids))
    assert relaunch(launch, llm, monkeypatch, [*turns[:9], wrong, *turns[10:]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("NO") for line in lines) == 1
    assert lines[-1] == "47 of 48 turns equal"
    assert lines[-2] == f"turn 2 of {wrong.conversation_id} differs from the dense reference"


@pytest.mark.parametrize("name", NEEDED)
def test_what_never_happened_fails(turns, launch, llm, monkeypatch, capsys, name):
    def without(turn):
        usage = dataclasses.replace(turn.output.usage, **{name: 0})
        return turn._replace(output=dataclasses.replace(turn.output, usage=usage))

    few = [next(turn for turn in turns if getattr(turn.output.usage, one)) for one in NEEDED]
    assert relaunch(launch, llm, monkeypatch, few) == 0
    assert ": give other" not in capsys.readouterr().out
    assert relaunch(launch, llm, monkeypatch, [without(turn) for turn in few]) == 1
    assert f"none {NEEDED[name]}: give other --gpu_pages or --cpu_pages" in capsys.readouterr().out
