"""The pieces of a reply: one for each event of its stream that has text.

Owns: where a reply is divided into pieces, and which log-probabilities belong to each.
Does not know: events, or where the tokens of a reply come from.
Called by `ResponseRun` and `events`.

A piece is the text that one token completes. Numbers of events count pieces, so a client that comes back
finds the numbers that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.detokenizer import IncrementalDetokenizer


class Piece(NamedTuple):
    """A piece of a reply.

    Attributes:
      text: its text, never empty.
      logprobs: log-probabilities of the tokens since the piece before; empty if they were not requested.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReplyPieces:
    """The tokens of one reply, as they arrive, converted to its pieces."""

    def __init__(self, tokenizer: Tokenizer, ending_ids: Sequence[int]) -> None:
        """Start without tokens; `ending_ids` are end-of-sequence ids, which are not part of the text."""
        self._ending_ids = ending_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._waiting: list[TokenLogprob] = []  # of tokens without text so far

    def split(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> Iterator[Piece]:
        """Yield the pieces that the next tokens complete; `logprobs` has one entry for each, if any."""
        for index, token_id in enumerate(token_ids):
            if logprobs is not None:
                self._waiting.append(logprobs[index])
            text = "" if token_id in self._ending_ids else self._detokenizer.push(token_id)
            if text:
                yield self._piece(text)

    def rest(self) -> Iterator[Piece]:
        """Yield the piece that the end of the reply completes, if there is one."""
        text = self._detokenizer.flush()
        if text:
            yield self._piece(text)

    def _piece(self, text: str) -> Piece:
        piece = Piece(text, tuple(self._waiting))
        self._waiting.clear()
        return piece
