"""Launches: the commands that the scheduler gives to the runner, in program order.

Owns: the launch types, and the packing of a step's inputs into integers.
Does not know: how a launch is executed, or why.

The runner reads only numbers and arrays. The engine reads `samples`, which maps each query to the index of
its token in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.sampling_rows import SAMPLING_WORDS, SamplerMode, sampling_words, truncates
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring import Relayout
from pensieve_jax.rebatching.ring_shapes import RingShape

HEADER = ("place", "num_new", "row", "unused")
"""Words of a step: place of its first column, number of new columns, and the row that fills all of them."""
COUNTS = ("position", "num_columns", "sample_position")
"""Words of a row: position of its first new token, its columns up to the last of the step, and position of
the sampled token. A free row has 1 column. `SAMPLING_WORDS` and the banned ids follow these words."""
_GREEDY_ROW = sampling_words(SamplingParams(temperature=0.0), seed=0)


class WordsLayout(NamedTuple):
    """Layout of a step's integers: the header, then for each field one word per row.

    Attributes:
      width: rows of the largest batch.
      num_banned: most banned ids of a row.
    """

    width: int
    num_banned: int

    @property
    def num_fields(self) -> int:
        """Number of words per row."""
        return len(COUNTS) + len(SAMPLING_WORDS) + self.num_banned

    @property
    def size(self) -> int:
        """Words of a step, its header included."""
        return len(HEADER) + self.num_fields * self.width


class PackedStep:
    """Builder of a step's words.

    Attributes:
      words: i32[layout.size].
    """

    def __init__(self, layout: WordsLayout, place: int = 0, num_new: int = 1, row: int = 0) -> None:
        """Start with free rows only."""
        self._num_counts = len(COUNTS)
        self.words = np.zeros(layout.size, np.int32)
        self.words[: len(HEADER)] = place, num_new, row, 0
        self._fields = self.words[len(HEADER) :].reshape(layout.num_fields, layout.width)
        self._fields[COUNTS.index("num_columns")] = 1
        self._fields[self._num_counts : self._num_counts + len(SAMPLING_WORDS)] = _GREEDY_ROW[:, None]
        self._fields[self._num_counts + len(SAMPLING_WORDS) :] = -1
        self._needs = [False, False, False]

    def add(self, row: int, query: Query, position: int, num_columns: int, sample_position: int) -> None:
        """Assign a row to a query and sample its next token."""
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
    def sampler_mode(self) -> SamplerMode:
        """Sampler mode that covers all rows."""
        return SamplerMode(*self._needs)


Samples = tuple[tuple[Query, int], ...]


@dataclass(frozen=True)
class Prefill:
    """Command: compute the KV cache of prompts, each into a row of its own, and sample.

    Attributes:
      serials: serials of the queries, which identify their rows.
      length: length of the rows.
      num_rows: prompts of the program; rows after the last query are padding.
      token_ids: i32[num_rows * length].
      words: words of the step; `position` is the last token's.
      sampler_mode: sampler mode.
      samples: each query with the index of its token in the result.
      num_tokens: tokens of the prompts, without padding.
    """

    serials: tuple[int, ...]
    length: int
    num_rows: int
    token_ids: np.ndarray
    words: np.ndarray
    sampler_mode: SamplerMode
    samples: Samples
    num_tokens: int


@dataclass(frozen=True)
class Insert:
    """Command: copy a row into the ring so that it ends before the cursor (vector embedding).

    Attributes:
      serial: serial of the row's query.
      row: row of the ring.
      place: place of the row's first column in the ring.
      num_tokens: tokens of the row.
      last_id: next input token of the row; -1 means the token that its last program sampled.
    """

    serial: int
    row: int
    place: int
    num_tokens: int
    last_id: int


@dataclass(frozen=True)
class Shape:
    """Command: run a step in which one row takes a whole prompt, and the others one token (vector shaping).

    Attributes:
      serial: serial of the query that joins.
      token_ids: i32[length], its tokens and padding.
      words: words of the step.
      sampler_mode: sampler mode.
      samples: each query with the index of its token in the result.
      num_tokens: tokens of the prompt, without padding.
    """

    serial: int
    token_ids: np.ndarray
    words: np.ndarray
    sampler_mode: SamplerMode
    samples: Samples
    num_tokens: int


@dataclass(frozen=True)
class Decode:
    """Command: run a step in which every row takes one token. Fields are those of `Shape`."""

    words: np.ndarray
    sampler_mode: SamplerMode
    samples: Samples


@dataclass(frozen=True)
class Suspend:
    """Command: copy a row out of the ring into a parked row.

    Attributes:
      serial: serial of the row's query.
      row: row of the ring.
      places: i32[length]: places of its tokens, the oldest first; padding is 0.
      num_tokens: tokens of the row.
    """

    serial: int
    row: int
    places: np.ndarray
    num_tokens: int


@dataclass(frozen=True)
class Park:
    """Command: copy a row to host memory, then free its device memory; with `waits`, block until then."""

    serial: int
    waits: bool


@dataclass(frozen=True)
class Return:
    """Command: copy a row back from host memory."""

    serial: int


@dataclass(frozen=True)
class FreeRow:
    """Command: free a parked row, in device or host memory."""

    serial: int


@dataclass(frozen=True)
class Resize:
    """Command: change the shape of the ring. Without a relayout the new ring is empty."""

    shape: RingShape
    relayout: Relayout | None


Launch = Prefill | Insert | Shape | Decode | Suspend | Park | Return | FreeRow | Resize
