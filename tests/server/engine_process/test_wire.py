"""The wire format: frames in pieces of any size, noise, values, and errors with their classes and texts."""

from __future__ import annotations

import random

import numpy as np
import pytest

import pensieve_jax
from pensieve_jax import InvalidRequestError, PensieveError, SamplingParams, UnknownConversationError
from pensieve_jax.core.errors import ConversationBusyError, UnknownRecordError
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables import changes
from pensieve_jax.server.engine_process import wire
from pensieve_jax.server.engine_process.messages import (
    Apply,
    Call,
    Cancel,
    EngineMessage,
    FrontMessage,
    Report,
    SentError,
    Submit,
    received_change,
    received_error,
    received_spec,
    sent_change,
    sent_error,
    sent_prompt,
    sent_spec,
    submission,
    submitted,
)
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError

SEEDS = range(3000)
DRAFT = changes.ResponseDraft(
    response_id="resp_1",
    owner="ada",
    request="{}",
    input_items="[]",
    output_item_id="msg_1",
    created_at_s=1.5,
    expires_at_s=2.5,
    conversation=changes.ConversationAppend(conversation_id="conv_1", expected_version=3, items="[]"),
    idempotency=changes.Idempotency(key="k", body_sha256="0", expires_at_s=3.0),
)


def round_trip(message: object) -> object:
    (found,) = FrameReader(FrontMessage.__value__).feed(bytes(FrameWriter().frame(message)))
    return found


def test_a_prompt_of_several_turns_is_sent_once() -> None:
    long, short = list(range(1000)), [1, 2]
    params = SamplingParams()
    specs = [TurnSpec(prompt, params) for prompt in (long, long, long, short, long, list(long))]
    turns = [sent_spec(number, spec) for number, spec in enumerate(specs)]
    turns += [sent_prompt(6, None, params, None), sent_prompt(7, None, params, None)]
    message = submission(turns)
    without_prompts = submission([sent_prompt(number, None, params, None) for number in range(len(turns))])
    num_bytes = len(FrameWriter().frame(message)) - len(FrameWriter().frame(without_prompts))
    num_prompt_bytes = len(FrameWriter().frame(long))
    assert num_bytes < 3.5 * num_prompt_bytes, (
        "the prompts alone: sent again behind the short one, and as a copy"
    )
    found = submitted(round_trip(message))
    assert [turn.prompt for turn in found] == [turn.prompt for turn in turns]
    assert [turn.number for turn in found] == list(range(8))
    assert found[0].prompt is found[1].prompt is found[2].prompt


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_decoded_whole_from_pieces_of_any_size(seed: int) -> None:
    rng = random.Random(seed)
    messages = [Cancel([rng.randrange(1 << 40)] * rng.randrange(2000)) for _ in range(20)]
    stream = b"".join(bytes(FrameWriter().frame(message)) for message in messages)
    reader, found, at = FrameReader(FrontMessage.__value__), [], 0
    while at < len(stream):
        size = rng.choice((1, 3, 8, 100, 10_000))
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == messages, f"seed {seed}"
    reader.finish()


def test_noise_raises_an_error_and_never_waits() -> None:
    """A frame with changed bytes is a message, an error, or, if its length grew, an incomplete frame."""
    turn = sent_spec(1, TurnSpec([1, 2, 3], SamplingParams(stop=("a",)), "a"))
    frames = [bytes(FrameWriter().frame(m)) for m in (Submit([turn]), Cancel([1]), Call(2, "end", ["a"]))]
    for seed in SEEDS:
        rng = random.Random(seed)
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        reader = FrameReader(FrontMessage.__value__)
        try:
            list(reader.feed(bytes(frame)))
            reader.finish()
        except WireError as error:
            assert str(error), f"seed {seed}"
    for seed in SEEDS:
        rng = random.Random(seed)
        noise = rng.randbytes(rng.randrange(8, 200))
        if noise[:4] != wire.MAGIC:
            with pytest.raises(WireError, match="begins with"):
                list(FrameReader(FrontMessage.__value__).feed(noise))


def test_frames_are_limited_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = bytes(FrameWriter().frame(Cancel([1] * 1000)))
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="at most 100"):
        FrameWriter().frame(Cancel([1] * 1000))
    with pytest.raises(WireError, match="at most 100"):
        list(FrameReader(FrontMessage.__value__).feed(frame))
    with pytest.raises(WireError, match="cannot be sent"):
        FrameWriter().frame(Call(1, "end", [object()]))


def test_a_message_in_parts_is_read_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 50)
    writer, long = FrameWriter(), Cancel(list(range(1000, 1100)))
    assert len(writer.parts(Cancel([1]))) == 1
    parts = writer.parts(long)
    assert len(parts) > 5 and all(len(part) <= 50 + wire.HEADER_BYTES for part in parts)
    data = b"".join(bytes(part) + bytes(writer.frame(Cancel([n]))) for n, part in enumerate(parts))
    data += b"".join(map(bytes, writer.parts(long)))
    wanted = [*(Cancel([n]) for n in range(len(parts) - 1)), long, Cancel([len(parts) - 1]), long]
    for size in (len(data), 1, 7):
        reader = FrameReader(FrontMessage.__value__)
        found = [one for at in range(0, len(data), size) for one in reader.feed(data[at : at + size])]
        assert found == wanted
        reader.finish()
    reader = FrameReader(FrontMessage.__value__)
    assert not list(reader.feed(bytes(parts[0])))
    with pytest.raises(WireError, match="middle of a message"):
        reader.finish()
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="at most 100"):
        writer.parts(long)
    with pytest.raises(WireError, match="at most 100"):
        list(FrameReader(FrontMessage.__value__).feed(b"".join(map(bytes, parts))))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError, match="not contain a valid message"):
        list(FrameReader(EngineMessage.__value__).feed(bytes(FrameWriter().frame(Cancel([1])))))
    with pytest.raises(WireError, match="not contain a valid message"):
        round_trip(Report())


def test_a_specification_is_sent_complete() -> None:
    parent = new_turn_id()
    node = TurnNode(
        turn_id=new_turn_id(parent),
        parent_id=parent,
        owner="ada",
        durable=False,
        chain=b"\0\xff",
        attachment=DRAFT,
    )
    params = SamplingParams(max_tokens=7, temperature=0.5, stop=("x",), stop_token_ids=(3,), seed=2**62)
    message = {"role": "user", "content": "hé", "more": [1, {"x": None}]}
    prefix = SharedPrefix((1, 2), (message,))
    spec = TurnSpec(np.array([4, 5], np.int32), params, None, (message,), prefix, node, keep=3)
    sent = round_trip(Submit([sent_spec(9, spec)]))
    found = received_spec(sent.turns[0])
    assert list(found.prompt_token_ids) == [4, 5] and found.node == node and found.messages == (message,)
    assert (found.prefix.token_ids, found.prefix.messages) == ((1, 2), (message,))
    assert found.params == params and found.keep == 3


def test_what_cannot_be_sent_is_refused_by_the_sender() -> None:
    node = TurnNode(turn_id=new_turn_id(), attachment={"any": "thing"})
    with pytest.raises(InvalidRequestError, match=r"node\.attachment"):
        sent_spec(1, TurnSpec([1], SamplingParams(), node=node))
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        sent_prompt(1, "x", None, None)
    with pytest.raises(InvalidRequestError, match="change"):
        sent_change(1, DRAFT)


def test_every_change_of_a_history_can_be_sent() -> None:
    values = {
        **{"str": "x", "float": 1.5, "int": 3, "bytes": b"\0", "str | None": None},
        **{"ResponseDraft": DRAFT, "Idempotency | None": DRAFT.idempotency},
        **{"StorageQuota | None": changes.StorageQuota(bytes=5, responses=7), "float | None": 2.5},
        "tuple[tuple[str, str], ...]": (("ann", "conv_1"), ("bob", "conv_2")),
    }
    for kind in changes.HistoryChange.__value__.__args__:
        change = kind(**{name: values[hint] for name, hint in kind.__annotations__.items()})
        assert received_change(round_trip(sent_change(1, change))) == change
    with pytest.raises(InvalidRequestError, match="change"):
        received_change(Apply(1, "Nothing", sent_change(1, change).change))
    with pytest.raises(InvalidRequestError, match="complete"):
        received_change(Apply(1, "DeleteItem", sent_change(1, changes.Expire(now_s=1.0)).change))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("prompt", list(range(100_000)), "short", "cut it"),
        InvalidRequestError("seed", 2**80, "smaller"),
        InvalidRequestError("x", np.float32(1), "plain"),
        UnknownConversationError("a"),
        ConversationBusyError("a", "wait"),
        UnknownRecordError("response", "resp_1"),
        pensieve_jax.TokenizerMissingError(),
        pensieve_jax.EngineDiedError("died"),
        pensieve_jax.UnsupportedModelError("Nothing"),
        WireError("noise"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_decoded_as_they_were_encoded(error: Exception) -> None:
    import msgspec

    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(sent_error(error)), type=SentError)
    found = received_error(sent)
    assert type(found) is type(error) and str(found) == str(error)
    assert vars(found).keys() == vars(error).keys()
    plain = {name: value for name, value in vars(error).items() if name != "value"}
    assert {name: getattr(found, name) for name in plain} == plain


def test_an_unknown_error_class_keeps_its_text() -> None:
    for module, name in (("os", "system"), ("pensieve_jax.core.errors", "reprlib"), ("no.such", "Error")):
        found = received_error(SentError(module, name, ("what went wrong",), {}))
        assert type(found) is PensieveError and str(found) == "what went wrong"
