"""The demonstration passes, and fails when it should."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from tests.scripts.conftest import load

demo = load("demo")
_served: list[list] = []


@pytest.fixture
def turns(launch, monkeypatch):
    """What a whole run served; it is run once."""
    if not _served:
        serve = demo.serve
        monkeypatch.setattr(demo, "serve", lambda llm: _served.append(serve(llm)) or _served[-1])
        assert launch("demo", shared_llm=False) == 0
        monkeypatch.undo()
    return _served[0]


def relaunch(launch, llm, monkeypatch, turns):
    """The demonstration over turns that were served before."""
    monkeypatch.setattr(demo, "LLM", lambda *_, **__: contextlib.nullcontext(llm))
    monkeypatch.setattr(demo, "serve", lambda _: turns)
    return launch("demo", shared_llm=False)


def test_it_passes(turns, capsys):
    """At least four turns of six conversations, and enough of them recompute."""
    assert len(turns) == 24
    returning = [turn.output.usage for turn in turns if turn.turn > 1]
    assert sum(usage.recomputed_tokens > 0 for usage in returning) >= len(returning) / 2


def test_the_last_line(turns, launch, llm, monkeypatch, capsys):
    assert relaunch(launch, llm, monkeypatch, turns) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "24 of 24 turns equal"


def test_one_changed_token_fails(turns, launch, llm, monkeypatch, capsys):
    output = turns[9].output
    token_ids = (*output.token_ids[:5], output.token_ids[5] ^ 1, *output.token_ids[6:])
    wrong = turns[9]._replace(output=dataclasses.replace(output, token_ids=token_ids))
    assert relaunch(launch, llm, monkeypatch, [*turns[:9], wrong, *turns[10:]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "23 of 24 turns equal"
    assert lines[-2] == f"turn 2 of {wrong.conversation_id} differs from the dense reference"


def test_too_little_recomputing_fails(turns, launch, llm, monkeypatch, capsys):
    def reusing(turn):
        usage = dataclasses.replace(turn.output.usage, recomputed_tokens=0)
        return turn._replace(output=dataclasses.replace(turn.output, usage=usage))

    assert relaunch(launch, llm, monkeypatch, [reusing(turn) for turn in turns]) == 1
    assert "0 of 18 returning turns recomputed something (less than 50%)" in capsys.readouterr().out
