"""Possible shapes of a ring: a length, and the number of rows of this length that fit into the budget.

Owns: the lengths, and the rows of each, so that growing the length and shrinking the batch are one walk
along a list (Baton, section 4.3, batch size scaling).
Does not know: which query holds a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching.config import PAGE_TOKENS, RebatchingConfig

_SHORTEST, _SHORTEST_OF_FEW = 512, 64
_FEW = 2048


class RingShape(NamedTuple):
    """Rows and columns of a ring."""

    batch: int
    length: int


class RingShapes:
    """All shapes within a budget, the shortest first.

    Attributes:
      shapes: possible shapes, by rising length and non-increasing batch.
      unused_lengths: requested lengths for which the budget cannot hold a row and a spare one.
      token_bytes: bytes of one column of one row, over all layers, on one device.
      kv_bytes: the budget.
    """

    def __init__(self, config: RebatchingConfig, token_bytes: int, max_tokens: int) -> None:
        """Compute the shapes.

        Args:
          config: the budget, the batch, and the lengths if they are set.
          token_bytes: KV cache bytes of one token on one device, over all layers.
          max_tokens: the model's limit on prompt and reply.

        Raises:
          ConfigError: not even one row of the shortest length fits beside the spare row, or
            `max_context_tokens` exceeds what the model, the lengths or the budget allow.
        """
        self.token_bytes, self.kv_bytes = token_bytes, config.kv_bytes
        wanted = max_tokens if config.max_context_tokens is None else config.max_context_tokens
        if wanted > max_tokens:
            raise ConfigError("max_context_tokens", wanted, f"at most the model's {max_tokens} positions")
        lengths = config.lengths or tuple(_default_lengths(wanted))
        batches = [min(config.max_batch, self._num_rows(length) - 1) for length in lengths]
        self.shapes = [RingShape(*pair) for pair in zip(batches, lengths, strict=True) if pair[0] > 0]
        self.unused_lengths = lengths[len(self.shapes) :]
        if not self.shapes:
            least = 2 * lengths[0] * token_bytes
            limit = f"at least {least:,}, two rows of {lengths[0]} tokens of {token_bytes:,} bytes each"
            raise ConfigError("kv_bytes", config.kv_bytes, limit)
        self._lengths = [shape.length for shape in self.shapes]
        self._most = wanted
        if config.max_context_tokens is not None and wanted > self._lengths[-1] + 1:
            which = "lengths" if lengths[-1] < wanted - 1 else "kv_bytes"
            value = config.lengths if which == "lengths" else config.kv_bytes
            needed = lengths[bisect_left(lengths, wanted - 1)] if which == "kv_bytes" else wanted - 1
            limit = (
                f"such that a row of {wanted - 1} tokens is possible"
                if which == "lengths"
                else f"at least {2 * needed * token_bytes:,}, two rows of {needed} tokens"
            )
            raise ConfigError(which, value, limit, f"max_context_tokens is {wanted}")

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of one query, prompt and reply. The last token needs no column."""
        return min(self._lengths[-1] + 1, self._most)

    def shape_for(self, num_columns: int) -> RingShape | None:
        """Return the shortest shape with at least `num_columns`; None if every shape is shorter."""
        index = bisect_left(self._lengths, num_columns)
        return self.shapes[index] if index < len(self.shapes) else None

    def length_for(self, num_tokens: int) -> int:
        """Return the length of a row for `num_tokens`, which must fit into the longest."""
        return self._lengths[bisect_left(self._lengths, num_tokens)]

    def room_bytes(self, shape: RingShape) -> int:
        """Return the bytes that the budget leaves for parked rows beside a ring of this shape."""
        return self.kv_bytes - self.row_bytes(shape.batch * shape.length)

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of `num_columns` columns of one row."""
        return num_columns * self.token_bytes

    def _num_rows(self, length: int) -> int:
        return self.kv_bytes // (length * self.token_bytes)


def _default_lengths(max_tokens: int) -> Iterator[int]:
    """Yield 1 and 1.5 times the powers of two until `max_tokens` fit; the last is no longer than needed."""
    length = _SHORTEST_OF_FEW if max_tokens <= _FEW else _SHORTEST
    longest = -(-max(max_tokens - 1, 1) // PAGE_TOKENS) * PAGE_TOKENS
    while length < longest:
        yield length
        if length + length // 2 < longest:
            yield length + length // 2
        length *= 2
    yield longest


def lengths_up_to(shapes: Sequence[RingShape], length: int) -> list[int]:
    """Return the lengths of `shapes` that fit into a ring of `length`."""
    return [shape.length for shape in shapes if shape.length <= length]
