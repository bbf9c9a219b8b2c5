"""Long JSON is the same as other JSON, and no call of the encoder gets much of it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pensieve_jax.server.http import long_json
from pensieve_jax.server.http.long_json import EncodedList, json_pieces
from pensieve_jax.server.http.replies import encode_json, long_json_reply


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 1_000])
def test_an_encoded_list_is_the_list(number):
    entries = [{"a": at, "b": [at, None]} for at in range(number)]
    for value in (
        lambda some: some,
        lambda some: {"x": [{"logprobs": some, "n": 1.5}, "é"], "y": {}, "z": []},
    ):
        expected = encode_json(value(entries))
        assert b"".join(json_pieces(value(EncodedList(iter(entries))))) == expected
        assert encode_json(value(EncodedList(entries))) == expected


def test_the_encoder_gets_few_entries_at_a_time(monkeypatch):
    lengths = []

    def encode(value):
        found = msgspec.json.encode(value)
        lengths.append(len(found))
        return found

    monkeypatch.setattr(long_json, "_encode", encode)
    entry = {str(token_id): -token_id / 8 for token_id in range(20)}
    pieces = json_pieces({"choices": [{"prompt_logprobs": EncodedList([entry] * 5_000)}]})
    assert max(lengths) < 65 * (len(msgspec.json.encode(entry)) + 1)
    assert len(b"".join(pieces)) > 1_000_000 and max(map(len, pieces)) < 200_000


def test_other_values_have_no_json():
    with pytest.raises(TypeError, match="has no JSON"):
        encode_json({"a": object()})


def test_a_long_response_yields_to_others_behind_each_piece():
    value = {"choices": EncodedList(["x" * 1_000] * 900)}
    sent, seen = [], []

    async def send(message):
        sent.append(message)

    async def never():
        await asyncio.Event().wait()

    async def count():
        while True:
            seen.append(len(sent))
            await asyncio.sleep(0)

    async def serve():
        other = asyncio.ensure_future(count())
        await long_json_reply(value).send(never, send)
        other.cancel()

    asyncio.run(serve())
    start, *parts = sent
    body = b"".join(part["body"] for part in parts)
    assert body == encode_json(value)
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(set(seen)) >= len(parts) - 1 > 5
