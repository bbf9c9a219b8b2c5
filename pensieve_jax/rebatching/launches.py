"""What a scheduler tells a runner to do, in program order.

Owns: these values, and the packing of what programs read of queries into integers.
Does not know: how something is done, or why.

A runner reads numbers and arrays only; `samples` says for the engine whose token is at which place of a
result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.sampling_rows import SAMPLING_WORDS, SamplerMode, sampling_words, truncates
from pensieve_jax.rebatching.lattice import RingShape
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring import Relayout

HEADER = ("place", "num_new", "row", "unused")
"""Of a step: where its first column lies, how many columns it adds, and the row that fills all of them."""
COUNTS = ("position", "num_columns", "sample_position")
"""Of a row: the position of its first new token, its columns up to the last of the step, and the position of
the token that is sampled. A row that nobody holds has 1 column."""
# Of a row, behind its counts: `SAMPLING_WORDS`; ids that must not be sampled follow.
_GREEDY_ROW = sampling_words(SamplingParams(temperature=0.0), seed=0)


class WordsLayout(NamedTuple):
    """How a step's integers lie: the header, then for each field one of every row.

    Attributes:
      width: rows; the largest batch.
      num_banned: ids that a row may be kept from sampling.
    """

    width: int
    num_banned: int

    @property
    def num_fields(self) -> int:
        """Words that one row takes."""
        return len(COUNTS) + len(SAMPLING_WORDS) + self.num_banned

    @property
    def size(self) -> int:
        """Words that a step takes, its header included."""
        return len(HEADER) + self.num_fields * self.width


class PackedStep:
    """The words of a step while they are written.

    Attributes:
      words: i32[layout.size].
    """

    def __init__(self, layout: WordsLayout, place: int = 0, num_new: int = 1, row: int = 0) -> None:
        """All rows are nobody's."""
        self._num_counts = len(COUNTS)
        self.words = np.zeros(layout.size, np.int32)
        self.words[: len(HEADER)] = place, num_new, row, 0
        self._fields = self.words[len(HEADER) :].reshape(layout.num_fields, layout.width)
        self._fields[COUNTS.index("num_columns")] = 1
        self._fields[self._num_counts : self._num_counts + len(SAMPLING_WORDS)] = _GREEDY_ROW[:, None]
        self._fields[self._num_counts + len(SAMPLING_WORDS) :] = -1
        self._needs = [False, False, False]

    def add(self, row: int, query: Query, position: int, num_columns: int, sample_position: int) -> None:
        """Let a row be a query's, whose next token is then sampled."""
        fields, params = self._fields, query.params
        fields[: self._num_counts, row] = position, num_columns, sample_position
        end = self._num_counts + len(SAMPLING_WORDS)
        fields[self._num_counts : end, row] = query.sampling_words
        if query.num_sampled < params.min_tokens:
            fields[end : end + len(query.ending_ids), row] = query.ending_ids
        self._needs[0] |= params.temperature > 0
        self._needs[1] |= truncates(params)
        self._needs[2] |= bool(params.logprobs)

    @property
    def needs(self) -> SamplerMode:
        """Sampler mode that serves all rows together."""
        return SamplerMode(*self._needs)


Samples = tuple[tuple[Query, int], ...]


@dataclass(frozen=True)
class Prefill:
    """Compute the KV state of prompts, each into a row of its own, and sample.

    Attributes:
      serials: of the queries; their rows are known by these.
      length: of the rows.
      num_rows: prompts that the program takes; those behind the last are padding.
      token_ids: i32[num_rows * length].
      words: `position` is the last token's.
      needs: of the sampler.
      samples: whose token is where in the result.
      num_tokens: of the prompts, without padding.
    """

    serials: tuple[int, ...]
    length: int
    num_rows: int
    token_ids: np.ndarray
    words: np.ndarray
    needs: SamplerMode
    samples: Samples
    num_tokens: int


@dataclass(frozen=True)
class Insert:
    """Vector embedding: put a row into the ring, so that it ends before the cursor.

    Attributes:
      serial: whose row.
      row: of the ring.
      place: where the row begins in the ring.
      num_tokens: of the row.
      last_id: the token that it goes on with; -1: what its last program sampled.
    """

    serial: int
    row: int
    place: int
    num_tokens: int
    last_id: int


@dataclass(frozen=True)
class Shape:
    """Vector shaping: a step in which one row takes a whole prompt, and the others a token each.

    Attributes:
      serial: of the query that joins.
      token_ids: i32[length], its tokens and padding.
      words: of the step.
      needs: of the sampler.
      samples: whose token is where in the result.
      num_tokens: of the prompt, without padding.
    """

    serial: int
    token_ids: np.ndarray
    words: np.ndarray
    needs: SamplerMode
    samples: Samples
    num_tokens: int


@dataclass(frozen=True)
class Decode:
    """A step in which every row takes one token; fields as of `Shape`."""

    words: np.ndarray
    needs: SamplerMode
    samples: Samples


@dataclass(frozen=True)
class Suspend:
    """Take a row out of the ring into a row of its own.

    Attributes:
      serial: whose.
      row: of the ring.
      places: i32[length]: where its tokens lie, the oldest first; padding is 0.
      num_tokens: that it has.
    """

    serial: int
    row: int
    places: np.ndarray
    num_tokens: int


@dataclass(frozen=True)
class Park:
    """Copy a row to host memory; its device memory is free once that is done, or at once with `waits`."""

    serial: int
    waits: bool


@dataclass(frozen=True)
class Return:
    """Copy a row back from host memory."""

    serial: int


@dataclass(frozen=True)
class FreeRow:
    """Forget a row, wherever it is."""

    serial: int


@dataclass(frozen=True)
class Resize:
    """Give the ring another shape; without a relayout it is empty."""

    shape: RingShape
    relayout: Relayout | None


Launch = Prefill | Insert | Shape | Decode | Suspend | Park | Return | FreeRow | Resize
