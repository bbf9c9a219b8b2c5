"""Pieces of replies: the same however the deltas are merged, and together the text of the reply."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.openai.responses.pieces import ReplyPieces, TextPiece
from pensieve_jax.text.loading import byte_tokenizer
from pensieve_jax.text.reply_tokens import ReplyTokens
from tests.seeds import enough, new_seed

EOS = 257
CHARACTERS = ("a", "b ", "\u00e9", "\U0001f600", "\u4e2d")


def reply_of(draw: random.Random) -> list[AsyncDelta]:
    """Return the deltas of a random reply, one for each token; some characters lack bytes."""
    token_ids: list[int] = []
    for _ in range(draw.randint(1, 12)):
        encoded = draw.choice(CHARACTERS).encode()
        token_ids += encoded[: draw.choice((len(encoded), len(encoded), 1))]
        if draw.random() < 0.1:
            token_ids.append(draw.choice((256, 258, 261)))  # control tokens have no text
    if draw.random() < 0.5:
        token_ids.append(EOS)
    params = SamplingParams(max_tokens=len(token_ids))
    reply = ReplyTokens(params, (EOS,), len(token_ids), byte_tokenizer())
    deltas = []
    for token_id in token_ids:
        num_pieces, none = len(reply.pieces), np.empty(0)
        reason = reply.accept(token_id, 0.0, none, none)
        text = "".join(reply.pieces[num_pieces:])
        deltas.append(AsyncDelta(text, (token_id,), (TokenLogprob(token_id, -draw.random(), {}),)))
        if reason is not None:
            break
    return deltas


def merged(deltas: list[AsyncDelta]) -> AsyncDelta:
    logprobs = tuple(one for delta in deltas for one in delta.logprobs or ())
    ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    return AsyncDelta("".join(delta.text for delta in deltas), ids, logprobs)


def pieces_of(deltas: list[AsyncDelta]) -> list[TextPiece]:
    pieces = ReplyPieces(byte_tokenizer())
    return [piece for delta in deltas for piece in pieces.split(delta)]


def test_pieces_do_not_depend_on_how_deltas_are_merged():
    draw = random.Random(new_seed())
    for _ in range(enough(300, 30_000)):
        deltas = reply_of(draw)
        expected = pieces_of(deltas)
        assert "".join(piece.text for piece in expected) == merged(deltas).text
        cuts = sorted(draw.sample(range(1, len(deltas)), draw.randint(0, len(deltas) - 1)))
        groups = [deltas[start:end] for start, end in zip([0, *cuts], [*cuts, len(deltas)], strict=True)]
        assert pieces_of([merged(group) for group in groups]) == expected
        assert pieces_of([merged(deltas)]) == expected


@pytest.mark.parametrize("shown", ["", "s", "see", "se\ufffd", "see you"])
def test_the_text_decides_what_is_shown(shown):
    """The tokens say more, less or something else: a stop string, its beginning, or an end in a character."""
    delta = AsyncDelta(shown, tuple(b"see"))
    assert "".join(piece.text for piece in pieces_of([delta])) == shown


def test_without_a_tokenizer_each_delta_is_a_piece():
    pieces = ReplyPieces(None)
    deltas = [AsyncDelta("ab", (1, 2)), AsyncDelta("", (3,)), AsyncDelta("c", (4,))]
    assert [piece.text for delta in deltas for piece in pieces.split(delta)] == ["ab", "c"]
