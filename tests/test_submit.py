"""Turns that a caller steps, and who owns a turn when Ctrl-C comes between its acceptance and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pensieve_jax import (
    LLM,
    ConversationBusyError,
    InvalidRequestError,
    PensieveError,
    SamplingParams,
    Stream,
)
from tests.engine.test_interrupts import Interrupt
from tests.fake_llm import fake_llm

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True, seed=0)
HI = [{"role": "user", "content": "hi"}]
FRONT = (
    "pensieve_jax/llm.py",
    "pensieve_jax/stream.py",
    "pensieve_jax/prompts.py",
    "pensieve_jax/engine/engine.py",
)


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


def test_it_says_what_generate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    prompts = ["text", HI]
    turns = llm.submit(prompts, PARAMS)
    step_all(llm)
    assert [turn.result().token_ids for turn in turns] == [
        output.token_ids for output in llm.generate(prompts, PARAMS)
    ]


def test_others_who_step_take_submitted_turns_along(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    (turn,) = llm.submit(["a"], PARAMS, conversation_ids=["a"])
    llm.generate(["b"], SamplingParams(max_tokens=9, ignore_eos=True))
    assert turn.done and not llm.unfinished and llm.history("a").turns


def test_a_cancelled_turn_was_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    one, other = llm.submit(["a", "b"], PARAMS, conversation_ids=["a", "b"])
    llm.step()
    with pytest.raises(ConversationBusyError):
        llm.submit(["more"], PARAMS, conversation_ids=["a"])
    llm.cancel(one)
    assert one.result().finish_reason == "cancelled" and llm.unfinished == (other,)
    step_all(llm)
    assert [info.conversation_id for info in llm.conversations()] == ["b"]


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
def test_one_bad_turn_and_none_is_queued(
    monkeypatch: pytest.MonkeyPatch, prompts: list[Any], options: dict[str, Any], words: str
) -> None:
    llm, _ = fake_llm(monkeypatch)
    with pytest.raises(InvalidRequestError, match=words):
        llm.submit(prompts, **options)
    assert llm.unfinished == ()


# Ctrl-C at every line of the front end and of the engine's loop


def read_a_stream(llm: LLM, streams: list[Stream]) -> None:
    streams.append(llm.stream("x", SHORT, conversation_id="a"))
    list(streams[0])


def close_a_stream(llm: LLM, streams: list[Stream]) -> None:
    streams.append(llm.stream([5, 6], SHORT, conversation_id="a"))
    next(streams[0])
    streams[0].close()


CALLS: dict[str, Callable[[LLM, list[Stream]], object]] = {
    "generate": lambda llm, _: llm.generate(["x", "y"], SHORT, conversation_ids=["a", "b"]),
    "a stream to its end": read_a_stream,
    "a stream that is closed": close_a_stream,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_no_conversation_busy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    llm, _ = fake_llm(monkeypatch)
    streams: list[Stream] = []  # held until the interrupt has come: a destructor cannot raise one
    with Interrupt(None, FRONT) as lines:
        CALLS[name](llm, streams)
    assert lines.num_lines > 40
    for at in range(1, lines.num_lines + 1):
        streams.clear()
        llm, harness = fake_llm(monkeypatch)
        try:
            with Interrupt(at, FRONT):
                CALLS[name](llm, streams)
            pytest.fail(f"no interrupt at line {at}")
        except KeyboardInterrupt:
            streams.clear()
        # Before anybody steps: a turn that was left alone would end some time.
        llm.generate(["z"], SHORT, conversation_ids=["a"])
        assert not llm.unfinished, f"line {at}"
        harness.engine.check_integrity()


def test_an_interrupted_submission_is_cancelled_or_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(llm: LLM) -> None:
        llm.submit(["x", "y"], SHORT, conversation_ids=["a", "b"])

    llm, _ = fake_llm(monkeypatch)
    with Interrupt(None, FRONT) as lines:
        submit(llm)
    num_found = 0
    for at in range(1, lines.num_lines + 1):
        llm, _ = fake_llm(monkeypatch)
        with pytest.raises(KeyboardInterrupt), Interrupt(at, FRONT):
            submit(llm)
        num_found += len(llm.unfinished)
        for turn in llm.unfinished:
            llm.cancel(turn)
        llm.generate(["z", "z"], SHORT, conversation_ids=["a", "b"])
    assert num_found <= 2 * 2, "only at the lines that hand the turns over"
