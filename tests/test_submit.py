"""Turns that a caller steps and references: a turn without references is cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve_jax import (
    LLM,
    ConversationBusyError,
    InvalidRequestError,
    PensieveError,
    SamplingParams,
)
from tests.fake_llm import fake_llm

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
HI = [{"role": "user", "content": "hi"}]


def step_all(llm: LLM) -> list[Any]:
    ended = []
    while llm.unfinished:
        ended += llm.step()
    return ended


def test_turns_are_queued_and_run_as_the_caller_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, harness = fake_llm(monkeypatch)
    turns = llm.submit(["text", [5, 6, 7], HI], PARAMS, conversation_ids=["a", "b", "c"])
    assert llm.unfinished == tuple(turns) and not harness.runner.rows, "nothing has run"
    with pytest.raises(PensieveError, match="has not ended"):
        turns[0].result()
    deltas: list[int] = []
    ended: list[Any] = []
    while len(ended) < 3:
        ended += llm.step()
        delta = turns[0].take_delta()
        deltas += delta.token_ids if delta else ()
    assert set(ended) == set(turns) and all(turn.done for turn in turns)
    assert tuple(deltas) == turns[0].result().token_ids == llm.history("a").turns[0].output_token_ids
    assert llm.history("c").turns[0].messages == tuple(HI)
    assert [turn.result().conversation_id for turn in turns] == ["a", "b", "c"]


def test_its_result_equals_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    prompts = ["text", HI]
    turns = llm.submit(prompts, PARAMS)
    step_all(llm)
    assert [turn.result().token_ids for turn in turns] == [
        output.token_ids for output in llm.generate(prompts, PARAMS)
    ]


def test_other_callers_steps_also_run_submitted_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    (turn,) = llm.submit(["a"], PARAMS, conversation_ids=["a"])
    llm.generate(["b"], SamplingParams(max_tokens=9, ignore_eos=True))
    assert turn.done and not llm.unfinished and llm.history("a").turns


def test_a_cancelled_turn_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    one, other = llm.submit(["a", "b"], PARAMS, conversation_ids=["a", "b"])
    llm.step()
    with pytest.raises(ConversationBusyError):
        llm.submit(["more"], PARAMS, conversation_ids=["a"])
    llm.cancel(one)
    assert one.result().finish_reason == "cancelled" and llm.unfinished == (other,)
    step_all(llm)
    assert [info.conversation_id for info in llm.conversations()] == ["b"]


def test_an_unreferenced_turn_is_cancelled_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, harness = fake_llm(monkeypatch)
    llm.generate(["a"], PARAMS, conversation_ids=["a"])
    held, dropped = llm.submit(["b", "a"], PARAMS, conversation_ids=["b", "a"])
    llm.step()
    del dropped
    assert llm.unfinished == (held,) and llm.stats()["num_turns_cancelled"] == 1
    again = llm.submit(["more"], PARAMS, conversation_ids=["a"])
    step_all(llm)
    assert held.done and again[0].done and len(llm.history("a").turns) == 2
    harness.engine.check_integrity()


def test_a_turn_that_ended_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    turns = llm.submit(["a"], PARAMS, conversation_ids=["a"])
    step_all(llm)
    del turns
    assert len(llm.history("a").turns) == 1 and not llm.stats()["num_turns_cancelled"]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (["a", ""], {}, r"prompts\[1\]"),
        (["a", [10**6]], {}, r"prompts\[1\]\[0\]"),
        (["a", [{"role": "user"}]], {}, r"prompts\[1\]\[0\]\.content"),
        (["a", 5], {}, r"prompts\[1\]"),
        (["a", [3, HI[0]]], {}, r"prompts\[1\]\[1\]"),
        (["a", "b"], {"conversation_ids": ["x"]}, "conversation_ids"),
        (["a", "b"], {"sampling_params": [PARAMS, None]}, r"sampling_params\[1\]"),
        (["a", "b"], {"prefix": "text"}, "share_prefix"),
    ],
)
def test_if_one_turn_is_invalid_none_is_queued(
    monkeypatch: pytest.MonkeyPatch, prompts: list[Any], options: dict[str, Any], words: str
) -> None:
    llm, _ = fake_llm(monkeypatch)
    with pytest.raises(InvalidRequestError, match=words):
        llm.submit(prompts, **options)
    assert llm.unfinished == ()
