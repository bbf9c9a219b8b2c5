"""The pieces of a reply: one for each event of its stream that has text.

Owns: where a reply is divided into pieces, and which log-probabilities belong to each.
Does not know: events, or where a reply comes from.
Called by `ResponseRun` and `events`.

A piece is the text that one token completes. Numbers of events count pieces, so a client that comes back
finds the numbers that it knows. What the reply shows is decided where it is sampled: its text lacks a stop
string, and the token that ended it. Here the tokens only say where that text is divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.detokenizer import IncrementalDetokenizer

MAX_BATCH: Final = 64
"""Pieces of a finished reply that a stream makes at once; making 64 takes some milliseconds."""


class TextPiece(NamedTuple):
    """A piece of a reply.

    Attributes:
      text: its text, never empty.
      logprobs: log-probabilities of the tokens since the piece before; empty if they were not requested.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReplyPieces:
    """The deltas of one reply, as they arrive, divided into its pieces."""

    def __init__(self, tokenizer: Tokenizer | None, shown: Sequence[str] = ()) -> None:
        """Start without tokens. Without a tokenizer, each delta with text is a piece.

        `shown` are the control tokens that the text shows.
        """
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, (), shown)
        self._unread: list[int] = []  # tokens that came one at a time, so that their text was known
        self._waiting: list[TokenLogprob] = []  # of tokens without text so far

    def split(self, delta: AsyncDelta) -> Iterator[TextPiece]:
        """Yield the pieces of the next delta; their texts, joined, are its text."""
        text, start = delta.text, 0
        if len(delta.token_ids) > 1 and self._detokenizer is not None:
            for token_id in self._unread:
                self._detokenizer.push(token_id)
            self._unread.clear()
            for index, token_id in enumerate(delta.token_ids):
                if delta.logprobs is not None:
                    self._waiting.append(delta.logprobs[index])
                pushed = self._detokenizer.push(token_id)
                shown = pushed if text.startswith(pushed, start) else _common(pushed, text, start)
                if shown:
                    start += len(shown)
                    yield self._piece(shown)
        else:
            self._unread += delta.token_ids
            self._waiting += delta.logprobs or ()
        if start < len(text):  # one token's text, or the rest of a reply that ends within a character
            yield self._piece(text[start:])

    def _piece(self, text: str) -> TextPiece:
        piece = TextPiece(text, tuple(self._waiting))
        self._waiting.clear()
        return piece


def _common(pushed: str, text: str, start: int) -> str:
    """Return the beginning of `pushed` with which `text` continues at `start`."""
    pairs = zip(pushed, text[start : start + len(pushed)], strict=False)
    return "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
