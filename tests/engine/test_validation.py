"""Invalid input raises a typed error that names the field and the limit before anything is scheduled.

After each one, another running conversation is unchanged, and its result is equal.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest

from pensieve_jax.core.errors import (
    ContextLengthError,
    ConversationBusyError,
    InvalidRequestError,
    TokenizerMissingError,
)
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.validation import check_beginning
from pensieve_jax.history.server_tables.changes import Expire, QueueResponse, ResponseDraft
from pensieve_jax.text import byte_tokenizer
from tests.engine.fake_runner import VOCAB_SIZE
from tests.engine.harness import Harness, small_config

PLAIN = SamplingParams(ignore_eos=True)

BAD_TURNS = {
    "empty": (TurnSpec([], PLAIN, "new"), InvalidRequestError, "prompt .*at least one token"),
    "id too high": (
        TurnSpec([3, VOCAB_SIZE], PLAIN, "new"),
        InvalidRequestError,
        rf"prompt\[1\] is {VOCAB_SIZE}.*996",
    ),
    "id negative": (TurnSpec([-1], PLAIN, "new"), InvalidRequestError, r"prompt\[0\] is -1"),
    "id no integer": (TurnSpec([1.5], PLAIN, "new"), InvalidRequestError, r"prompt\[0\] is 1.5"),
    "id a bool": (TurnSpec([True], PLAIN, "new"), InvalidRequestError, r"prompt\[0\] is True"),
    "too long": (TurnSpec([1] * 160, PLAIN, "new"), ContextLengthError, "prompt .*at most 159 tokens"),
    "too long with its history": (
        TurnSpec([1] * 139, PLAIN, "a"),
        ContextLengthError,
        "after a history of 21",
    ),
    "busy": (TurnSpec([1], PLAIN, "running"), ConversationBusyError, "'running'"),
    "conversation id empty": (TurnSpec([1], PLAIN, ""), InvalidRequestError, "conversation_id is ''"),
    "conversation id a number": (TurnSpec([1], PLAIN, 7), InvalidRequestError, "conversation_id is 7"),
    "conversation id with NUL": (TurnSpec([1], PLAIN, "a\0b"), InvalidRequestError, "NUL"),
    "stop string without tokenizer": (
        TurnSpec([1], SamplingParams(stop=["x"]), "new"),
        TokenizerMissingError,
        "stop_token_ids",
    ),
    "logprobs": (
        TurnSpec([1], SamplingParams(logprobs=5), "new"),
        InvalidRequestError,
        "logprobs is 5.*at most 4",
    ),
    "stop id": (
        TurnSpec([1], SamplingParams(stop_token_ids=[2, VOCAB_SIZE]), "new"),
        InvalidRequestError,
        r"stop_token_ids\[1\]",
    ),
    "banned ids": (
        TurnSpec([1], SamplingParams(min_tokens=1, stop_token_ids=range(1, 20)), "new"),
        InvalidRequestError,
        "stop_token_ids.*at most 32",
    ),
}


@pytest.mark.parametrize("name", BAD_TURNS)
@pytest.mark.parametrize("company", ["alone", "with a good one"])
def test_an_invalid_turn_has_no_effect_on_others(name, company):
    spec, error, message = BAD_TURNS[name]
    harness = Harness(small_config(gpu_pages=10))
    harness.turn("a", 16, max_tokens=5)
    facts = harness.facts(harness.prompt(20, seed=1), None, max_tokens=12)
    running = harness.submit(facts, "running")
    harness.step(3)
    specs = [spec]
    if company != "alone":
        specs = [TurnSpec([1], PLAIN, "good"), spec]
        message = message.replace("prompt", r"prompts\[1\]").replace(
            "conversation_id is", r"conversation_ids\[1\] is"
        )
    before = harness.engine.stats()
    with pytest.raises(error, match=message):
        harness.engine.submit(specs)
    harness.engine.check_integrity()
    assert harness.engine.stats() == before, "a refused turn left something behind"
    assert harness.run(running)[0].token_ids == harness.expected(facts)
    harness.turn("a", 4, seed=2, max_tokens=3)
    assert {info.conversation_id for info in harness.engine.conversations.listing()} == {"a", "running"}
    harness.check_empty()


def of(*args, **fields):
    return lambda engine: engine.submit([TurnSpec(*args, **fields)])


def placed(**fields):
    return lambda engine: engine.submit([TurnSpec([1], PLAIN, node=TurnNode(turn_id=TURN_ID, **fields))])


TURN_ID = "0" * 32
DRAFT = ResponseDraft(
    response_id="r",
    owner="o",
    request="{}",
    input_items="[]",
    output_item_id="i",
    created_at_s=1.0,
    expires_at_s=2.0,
)
WRONG_TYPES = {
    "turns None": (lambda engine: engine.submit(None), "specs"),
    "a turn alone": (lambda engine: engine.submit(TurnSpec([1], PLAIN)), "specs"),
    "turns as an iterator": (lambda engine: engine.submit(iter([TurnSpec([1], PLAIN)])), "specs"),
    "turns None each": (lambda engine: engine.submit([None]), r"specs\[0\]"),
    "turns as text": (lambda engine: engine.submit("text"), r"specs\[0\]"),
    "prompt a number": (of(5, PLAIN), "prompt"),
    "prompt None": (of(None, PLAIN), "prompt"),
    "prompt an iterator": (of(iter([1]), PLAIN), "prompt"),
    "prompt a number of numpy's": (of(np.array(3), PLAIN), "prompt"),
    "prompt a set": (of({1, 2}, PLAIN), "prompt"),
    "messages an object": (of([1], PLAIN, "new", messages=5), "messages"),
    "messages of objects": (of([1], PLAIN, "new", messages=(object(),)), "messages"),
    "prefix of a list": (of([1], PLAIN, "new", prefix=SharedPrefix([1] * 40)), "prefix"),
    "prefix of an array": (of([1], PLAIN, "new", prefix=SharedPrefix(np.ones(40, int))), "prefix"),
    "prefix of nothing": (of([1], PLAIN, "new", prefix=SharedPrefix(None)), "prefix"),
    "prefix of lists": (of([1], PLAIN, "new", prefix=SharedPrefix(([1],) * 40)), "prefix"),
    "owner a list": (placed(owner=[]), "owner"),
    "owner None": (placed(owner=None), "owner"),
    "owner no UTF-8": (placed(owner="\ud800"), "owner"),
    "durable a string": (placed(durable="no"), "durable"),
    "chain a string": (placed(chain="x"), "chain"),
    "release of a list": (lambda engine: engine.release_prefix(SharedPrefix([1] * 40)), "prefix"),
    "release of lists": (lambda engine: engine.release_prefix(SharedPrefix(([1],) * 40)), "prefix"),
    "change None": (lambda engine: engine.apply(None), "change"),
    "change a class": (lambda engine: engine.apply(Expire), "change"),
    "draft None": (lambda engine: engine.apply(QueueResponse(draft=None, job=b"")), "draft"),
    "idempotency a string": (
        lambda engine: engine.apply(
            QueueResponse(draft=dataclasses.replace(DRAFT, idempotency="key"), job=b"")
        ),
        "idempotency",
    ),
    "append a string": (
        lambda engine: engine.apply(
            QueueResponse(draft=dataclasses.replace(DRAFT, conversation="c"), job=b"")
        ),
        "conversation",
    ),
    "push out of a list": (lambda engine: engine.push_out_turn([], TURN_ID), "owner"),
    "explain of a list": (lambda engine: engine.explain_turn([], TURN_ID), "owner"),
    "forget of a list": (lambda engine: engine.forget_turn_state([], TURN_ID), "owner"),
    "cancel None": (lambda engine: engine.cancel(None), "turn"),
    "cancel an output": (lambda engine: engine.cancel(engine.unfinished[0].output), "turn"),
    "cancel text": (lambda engine: engine.cancel("turn"), "turn"),
    "cancel a reply": (lambda engine: engine.cancel(engine.unfinished[0].reply), "turn"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_an_argument_of_a_wrong_type_has_no_effect_on_others(name):
    """It is refused, and not mistaken for an interrupt, after which every turn would be lost."""
    call, field = WRONG_TYPES[name]
    harness = Harness()
    shared = harness.engine.share_prefix(harness.prompt(40, seed=2))
    (first,) = harness.engine.submit([TurnSpec([1], PLAIN, "a", prefix=shared)])
    harness.run(first)
    facts = harness.facts(harness.prompt(20, seed=1), None, max_tokens=12)
    running = harness.submit(facts, "running")
    harness.step(3)
    with pytest.raises(InvalidRequestError, match=rf"^\S*{field}"):
        call(harness.engine)
    harness.engine.check_integrity()
    assert harness.run(running)[0].token_ids == harness.expected(facts)
    harness.check_empty()


def test_a_turn_of_another_engine_is_not_cancelled():
    harnesses = [Harness(), Harness()]
    facts, turns = [], []
    for harness in harnesses:
        facts.append(harness.facts(harness.prompt(20, seed=1), None, max_tokens=12))
        turns.append(harness.submit(facts[-1], "a"))
        harness.step(3)
    with pytest.raises(InvalidRequestError, match=r"turn is .* of this engine"):
        harnesses[0].engine.cancel(turns[1])
    for harness, one, turn in zip(harnesses, facts, turns, strict=True):
        harness.engine.check_integrity()
        assert harness.run(turn)[0].token_ids == harness.expected(one)
    harnesses[0].engine.cancel(turns[1])  # it is done: the call has no effect
    for harness in harnesses:
        harness.check_empty()


def test_parameters_do_not_change_after_their_creation():
    """They are checked once, but a caller's lists may change afterwards."""
    stop, ids = ["END"], [3]
    params = SamplingParams(stop=stop, stop_token_ids=ids, ignore_eos=True)
    stop[0], ids[0] = "", -1
    assert (params.stop, params.stop_token_ids) == (("END",), (3,))
    assert params == dataclasses.replace(params) and hash(params) == hash(dataclasses.replace(params))
    harness = Harness(tokenizer=byte_tokenizer())
    harness.run(*harness.engine.submit([TurnSpec([1, 2], params, "a")]))
    harness.check_empty()


def test_the_same_id_twice_in_a_call_is_busy():
    harness = Harness()
    with pytest.raises(ConversationBusyError, match="'a'"):
        harness.engine.submit([TurnSpec([1], PLAIN, "a"), TurnSpec([2], PLAIN, "a")])
    assert not harness.engine.has_unfinished
    # allowed for one-off requests
    harness.engine.submit([TurnSpec([1], PLAIN, None), TurnSpec([2], PLAIN, None)])
    harness.drain()


def test_the_longest_turn_that_fits_is_served():
    """One sequence uses the whole pool: the context is all of its tokens."""
    harness = Harness(small_config(gpu_pages=4))
    output = harness.turn("a", 63, max_tokens=9)
    assert len(output.token_ids) == 1 and output.finish_reason == "length"
    with pytest.raises(ContextLengthError, match="truncate the conversation"):
        harness.submit(harness.facts([1]), "a")
    harness.check_empty()


LIMITS = ModelLimits(
    vocab_size=100, max_context_tokens=50, eos_token_ids=(2,), max_logprobs=4, max_banned_ids=3
)


@pytest.mark.parametrize(("num_tokens", "is_refused"), [(1, False), (48, False), (49, True)])
def test_a_shared_prefix_leaves_room_for_a_prompt_and_a_reply(num_tokens, is_refused):
    with pytest.raises(ContextLengthError, match="at most 48") if is_refused else nullcontext():
        check_beginning([3] * num_tokens, LIMITS)
