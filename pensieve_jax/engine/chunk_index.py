"""Which conversation in memory begins as a context does, found by its tokens, a chunk at a time.

Owns: a hash of every full chunk of the conversations that were entered, chained from the first one, and
salted by their owner: what one owner sent is never found for another.
Does not know: state, turns or trees.

A hash has 64 bits, so a match is only a candidate: tokens are compared before anybody begins with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

_HASH_BYTES = 8


class Indexed(Protocol):
    """What can be found.

    Attributes:
      owner: whose it is.
      hashes: of its full chunks, as far as they were entered; kept here.
    """

    owner: str
    hashes: list[int]

    @property
    def known_tokens(self) -> Sequence[int]:
        """All tokens that do not change any more."""
        ...


class ChunkIndex[C: Indexed]:
    """Conversations by the chunks that they begin with."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._found: dict[int, C | dict[C, None]] = {}  # mostly one has a chunk

    def __len__(self) -> int:
        """Different chunks that are known."""
        return len(self._found)

    def enter(self, conversation: C) -> None:
        """A conversation is new, or longer than it was."""
        hashes, size = conversation.hashes, self._chunk_tokens
        before = hashes[-1] if hashes else _salt(conversation.owner)
        for found in _chain(before, conversation.known_tokens[len(hashes) * size :], size):
            hashes.append(found)
            self._add(found, conversation)

    def share(self, conversation: C, source: C, num_chunks: int) -> None:
        """A conversation begins with the first chunks of another one, as far as these were entered."""
        conversation.hashes = source.hashes[:num_chunks]
        for found in conversation.hashes:
            self._add(found, conversation)

    def leave(self, conversation: C) -> None:
        """A conversation is not in memory any more."""
        for known in conversation.hashes:
            who = self._found[known]
            if who is conversation:
                del self._found[known]
            else:
                assert isinstance(who, dict)
                del who[conversation]
                if not who:
                    del self._found[known]
        conversation.hashes = []

    def longest(self, owner: str, tokens: Sequence[int]) -> tuple[C, int] | None:
        """Who begins with most of the full chunks of `tokens`, and how many tokens these are."""
        best, num_tokens = None, 0
        for known in _chain(_salt(owner), tokens, self._chunk_tokens):
            who = self._found.get(known)
            if who is None:
                break
            num_tokens += self._chunk_tokens
            best = (next(iter(who)) if isinstance(who, dict) else who), num_tokens
        if best is not None and (
            best[0].owner != owner or best[0].known_tokens[: best[1]] != tokens[: best[1]]
        ):
            return None  # two chunks of one hash: nothing is lost but time
        return best

    def _add(self, known: int, conversation: C) -> None:
        who = self._found.setdefault(known, conversation)
        if isinstance(who, dict):
            who[conversation] = None
        elif who is not conversation:
            self._found[known] = {who: None, conversation: None}


def _salt(owner: str) -> int:
    return int.from_bytes(blake2b(owner.encode(), digest_size=_HASH_BYTES).digest())


def _chain(before: int, tokens: Sequence[int], size: int) -> Iterator[int]:
    """The hashes of chunks of `size` tokens that follow one of this hash."""
    data = array("i", tokens)
    raw, num_bytes = data.tobytes(), size * data.itemsize
    for start in range(0, len(raw) - num_bytes + 1, num_bytes):
        before = _chained(before, raw[start : start + num_bytes])
        yield before


def _chained(before: int, chunk: bytes) -> int:
    data = before.to_bytes(_HASH_BYTES) + chunk
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES).digest())
