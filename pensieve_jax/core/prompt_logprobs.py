"""Log-probabilities of a prompt's tokens, as columns of numbers.

Owns: the columns, and the entries that are made of them when they are read.
Does not know: how they are computed, or what a response says of them.

A long prompt has hundreds of thousands of numbers. As columns they cross processes in microseconds; as Python
objects they would hold the interpreter for much longer than a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, overload

import numpy as np

_NUM_AT_ONCE: Final = 256  # entries made together


class PromptLogprob(NamedTuple):
    """Log-probabilities of one prompt token, given the tokens before it.

    Attributes:
      token_id: id of the token.
      logprob: its log-probability under the model's distribution, without temperature, cuts or bans.
      rank: its place among all ids by log-probability, from 1; the lower id comes first on ties.
      top: log-probabilities of the k most likely ids, most likely first; empty for k = 0.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Sequence[PromptLogprob | None]):
    """The entries of a prompt's tokens in order, of type `PromptLogprob`.

    The first token of a conversation has the entry None, since nothing predicts it. Entries are made when
    they are read. The columns are bytes, so that messages hold them as they are.

    Attributes:
      num_scored: number N of tokens with log-probabilities.
      num_top: number K of likely ids of each.
      has_first: whether a token without log-probabilities comes before them.
      token_ids, logprobs, ranks: i32[N], f32[N], i32[N].
      top_ids, top_logprobs: i32[N, K], f32[N, K].
    """

    num_scored: int
    num_top: int
    has_first: bool
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def of(cls, entries: Iterable[PromptLogprob | None]) -> Self:
        """Return the columns of entries; only the first one may be None."""
        given = list(entries)
        scored = [one for one in given if one is not None]
        shape = len(scored), len(scored[0].top) if scored else 0
        return cls.joined(
            [
                PromptColumns(
                    np.array([one.token_id for one in scored], np.int32),
                    np.array([one.logprob for one in scored], np.float32),
                    np.array([one.rank for one in scored], np.int32),
                    np.array([[*one.top] for one in scored], np.int32).reshape(shape),
                    np.array([[*one.top.values()] for one in scored], np.float32).reshape(shape),
                )
            ],
            has_first=len(scored) < len(given),
        )

    @classmethod
    def joined(cls, parts: Sequence[PromptColumns], *, has_first: bool) -> Self:
        """Return the entries of parts of a prompt, in order."""
        columns = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)] if parts else _NONE
        num_scored, num_top = columns[3].shape
        token_ids, logprobs, ranks, top_ids, top_logprobs = (column.tobytes() for column in columns)
        return cls(num_scored, num_top, has_first, token_ids, logprobs, ranks, top_ids, top_logprobs)

    def __len__(self) -> int:
        return self.num_scored + self.has_first

    @overload
    def __getitem__(self, index: int) -> PromptLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptLogprob | None]: ...
    def __getitem__(self, index: int | slice) -> PromptLogprob | Sequence[PromptLogprob | None] | None:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index] - self.has_first
        return None if at < 0 else next(self._entries(at, at + 1))

    def __iter__(self) -> Iterator[PromptLogprob | None]:
        if self.has_first:
            yield None
        for begin in range(0, self.num_scored, _NUM_AT_ONCE):
            yield from self._entries(begin, min(begin + _NUM_AT_ONCE, self.num_scored))

    def _entries(self, begin: int, end: int) -> Iterator[PromptLogprob]:
        rows, k = slice(begin, end), self.num_top
        top_ids = np.frombuffer(self.top_ids, np.int32).reshape(self.num_scored, k)[rows]
        top_logprobs = np.frombuffer(self.top_logprobs, np.float32).reshape(self.num_scored, k)[rows]
        for token_id, logprob, rank, ids, values in zip(
            np.frombuffer(self.token_ids, np.int32)[rows].tolist(),
            np.frombuffer(self.logprobs, np.float32)[rows].tolist(),
            np.frombuffer(self.ranks, np.int32)[rows].tolist(),
            top_ids.tolist(),
            top_logprobs.tolist(),
            strict=True,
        ):
            yield PromptLogprob(token_id, logprob, rank, dict(zip(ids, values, strict=True)))


class PromptColumns(NamedTuple):
    """The columns of a part of a prompt; see `PromptLogprobs`."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


_NONE: Final = PromptColumns(
    np.zeros(0, np.int32),
    np.zeros(0, np.float32),
    np.zeros(0, np.int32),
    np.zeros((0, 0), np.int32),
    np.zeros((0, 0), np.float32),
)
