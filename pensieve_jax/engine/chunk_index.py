"""An index of conversations in memory by their full chunks, to find the longest common beginning.

Owns: a chained hash of every full chunk of the entered conversations. The chain is salted with the owner, so
that one owner's tokens are never found for another owner.
Does not know: KV caches, turns or trees.
Called by `BranchTable`.

A hash has 64 bits, so a match is only a candidate; `longest` compares the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

_HASH_BYTES = 8


class Indexed(Protocol):
    """The interface of an indexed conversation.

    Attributes:
      owner: owner of the conversation.
      hashes: hashes of its entered full chunks; only `ChunkIndex` changes them.
    """

    owner: str
    hashes: list[int]

    @property
    def known_tokens(self) -> Sequence[int]:
        """All tokens that cannot change any more."""
        ...


class ChunkIndex[C: Indexed]:
    """The conversations in memory by the chained hashes of their chunks."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._by_hash: dict[int, C | dict[C, None]] = {}  # a set only if several conversations share a chunk

    def __len__(self) -> int:
        """Return the number of distinct chunks."""
        return len(self._by_hash)

    def enter(self, conversation: C) -> None:
        """Index the full chunks of a conversation that is new or has grown."""
        hashes, size = conversation.hashes, self._chunk_tokens
        before = hashes[-1] if hashes else _salt(conversation.owner)
        for chunk_hash in _chain(before, conversation.known_tokens[len(hashes) * size :], size):
            hashes.append(chunk_hash)
            self._add(chunk_hash, conversation)

    def share(self, conversation: C, source: C, num_chunks: int) -> None:
        """Index a conversation that shares another's first chunks, as far as those were entered."""
        conversation.hashes = source.hashes[:num_chunks]
        for chunk_hash in conversation.hashes:
            self._add(chunk_hash, conversation)

    def leave(self, conversation: C) -> None:
        """Remove a conversation that leaves memory."""
        self.cut(conversation, 0)

    def cut(self, conversation: C, num_chunks: int) -> None:
        """Index only the first `num_chunks` chunks of a conversation, until it is entered again."""
        for chunk_hash in conversation.hashes[num_chunks:]:
            owners = self._by_hash[chunk_hash]
            if owners is conversation:
                del self._by_hash[chunk_hash]
            else:
                assert isinstance(owners, dict)
                del owners[conversation]
                if not owners:
                    del self._by_hash[chunk_hash]
        del conversation.hashes[num_chunks:]

    def longest(self, owner: str, tokens: Sequence[int]) -> tuple[C, int] | None:
        """Return the conversation with the most leading full chunks of `tokens`, and their token count."""
        best, num_tokens = None, 0
        for chunk_hash in _chain(_salt(owner), tokens, self._chunk_tokens):
            owners = self._by_hash.get(chunk_hash)
            if owners is None:
                break
            num_tokens += self._chunk_tokens
            best = (next(iter(owners)) if isinstance(owners, dict) else owners), num_tokens
        if best is not None and (
            best[0].owner != owner or best[0].known_tokens[: best[1]] != tokens[: best[1]]
        ):
            return None  # a hash collision: the only cost is that nothing is shared
        return best

    def _add(self, chunk_hash: int, conversation: C) -> None:
        owners = self._by_hash.setdefault(chunk_hash, conversation)
        if isinstance(owners, dict):
            owners[conversation] = None
        elif owners is not conversation:
            self._by_hash[chunk_hash] = {owners: None, conversation: None}


def _salt(owner: str) -> int:
    return int.from_bytes(blake2b(owner.encode(), digest_size=_HASH_BYTES).digest())


def _chain(before: int, tokens: Sequence[int], size: int) -> Iterator[int]:
    """Yield the chained hashes of the full chunks of `tokens`, starting from hash `before`."""
    data = array("i", tokens)
    raw, num_bytes = data.tobytes(), size * data.itemsize
    for start in range(0, len(raw) - num_bytes + 1, num_bytes):
        before = _chained(before, raw[start : start + num_bytes])
        yield before


def _chained(before: int, chunk: bytes) -> int:
    data = before.to_bytes(_HASH_BYTES) + chunk
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES).digest())
