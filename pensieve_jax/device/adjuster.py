"""Scores of a step from its logits: the programs of `decoding.device.adjust`, and the arrays that they keep.

Owns: the executables that adjust logits, the counts of ids on the device, and constant arrays for rows
without a mask or a bias. A step that adjusts nothing uses none of them and copies nothing.
Does not know: plans, requests, or which turn has which slot of the counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pensieve_jax.core.token_masks import every_id, num_words
from pensieve_jax.decoding import adjustments
from pensieve_jax.decoding.adjustments import Adjustment
from pensieve_jax.decoding.device import adjust
from pensieve_jax.decoding.device.adjust import Counts
from pensieve_jax.decoding.device.choose import logits_spec
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program


class Adjuster:
    """The adjustments of one runner's steps.

    Attributes:
      num_programs: number of `jobs`.
      num_bytes: bytes of its arrays on each device.
    """

    def __init__(
        self, vocab_size: int, mesh: Mesh, nums_rows: Iterable[int], *, max_num_samples: int, num_slots: int
    ) -> None:
        """Allocate nothing; `reset` does.

        Args:
          vocab_size: V.
          mesh: mesh with one axis, "tp".
          nums_rows: the numbers of rows S of the layouts.
          max_num_samples: length of the previous step's ids.
          num_slots: slots of the counts; 0 keeps no counts, so that no row can have penalties.
        """
        self._vocab_size, self._mesh, self._num_slots = vocab_size, mesh, num_slots
        self._nums_rows = tuple(dict.fromkeys(nums_rows))
        self._max_num_samples = max_num_samples
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._counts: Counts | None = None
        self._all_ids: dict[int, jax.Array] = {}
        self._no_bias: dict[int, jax.Array] = {}
        self._adjust: dict[tuple[int, bool], Any] = {}
        self._seed: Any = None
        self._new_counts: Any = None
        has_counts = num_slots > 0
        self.num_programs = (1 + has_counts) * len(self._nums_rows) + 2 * has_counts
        row_bytes = 4 * num_words(vocab_size) + adjustments.no_bias(1).nbytes
        self.num_bytes = adjust.counts_bytes(num_slots, vocab_size) + sum(self._nums_rows) * row_bytes

    def jobs(self) -> Iterator[CompilationJob]:
        """Yield all compilations; the executables are kept here."""
        for num_rows in self._nums_rows:
            for has_counts in (False, True)[: 1 + (self._num_slots > 0)]:
                yield CompilationJob(
                    f"adjustment of {num_rows} rows{', with counts' if has_counts else ''}",
                    self._program(num_rows, has_counts),
                    functools.partial(self._adjust.__setitem__, (num_rows, has_counts)),
                )
        if self._num_slots:
            words = self._abstract((2 + adjustments.NUM_SEED_IDS,), np.int32)
            program = Program(adjust.seed, (self._abstract_counts(), words), {})
            yield CompilationJob("counts of ids", program, functools.partial(setattr, self, "_seed"))
            statics = {"num_slots": self._num_slots, "vocab_size": self._vocab_size, "mesh": self._mesh}
            program = Program(adjust.new_counts, (), statics)
            yield CompilationJob("new counts", program, functools.partial(setattr, self, "_new_counts"))

    def reset(self) -> None:
        """Forget all counts, and allocate their memory again after a failed step.

        Raises:
          JaxRuntimeError: the device has no memory for them.
        """
        for old in self._counts or ():
            old.delete()
        self._counts = None
        if self._new_counts is not None:
            self._counts = self._new_counts()

    def scores(
        self,
        logits: jax.Array,
        prev_ids: jax.Array,
        adjustment: Adjustment | None,
        words: np.ndarray | None,
    ) -> jax.Array:
        """Start the adjustment of a step's logits; returns the logits themselves where nothing adjusts them.

        Args:
          logits: f32[S, V].
          prev_ids: ids that the previous step chose.
          adjustment: biases and penalties of the rows, or None.
          words: masks of the rows, as in `Runner.choose`, or None.
        """
        if adjustment is None and words is None:
            return logits
        num_rows = logits.shape[0]
        masks = self._every_id(num_rows) if words is None else self._put(words)
        bias = None if adjustment is None else adjustment.bias
        biases = self._unbiased(num_rows) if bias is None else self._put(bias)
        if adjustment is None or adjustment.counted is None:
            scores: jax.Array = self._adjust[num_rows, False](logits, masks, biases)
            return scores
        for seed in adjustment.seeds:
            self._counts = self._seed(self._counts, self._put(seed))
        counted = self._put(adjustment.counted)
        run = self._adjust[num_rows, True]
        scores, self._counts = run(logits, masks, biases, self._counts, counted, prev_ids)
        return scores

    def rehearsals(self, num_rows: int) -> Iterator[tuple[Adjustment | None, np.ndarray | None]]:
        """Yield arguments of `scores` that run each program for steps of `num_rows` rows once."""
        yield None, every_id(num_rows, self._vocab_size)
        yield Adjustment(bias=adjustments.no_bias(num_rows)), None
        if self._num_slots:
            seeds = adjustments.seeds(0, (), (), clears=True)
            yield Adjustment(counted=adjustments.not_counted(num_rows), seeds=seeds), None

    def _program(self, num_rows: int, has_counts: bool) -> Program:
        spec = logits_spec(self._vocab_size, self._mesh)
        sharding = NamedSharding(self._mesh, spec)
        logits: Any = jax.ShapeDtypeStruct((num_rows, self._vocab_size), np.float32, sharding=sharding)
        words = self._abstract((num_rows, num_words(self._vocab_size)), np.int32)
        bias = self._abstract(adjustments.no_bias(num_rows).shape, np.int32)
        statics = {"split_over": self._mesh if self._mesh.size > 1 and any(spec) else None}
        if not has_counts:
            return Program(adjust.adjust, (logits, words, bias), statics)
        counted = self._abstract(adjustments.not_counted(num_rows).shape, np.int32)
        prev_ids = self._abstract((self._max_num_samples,), np.int32)
        given = logits, words, bias, self._abstract_counts(), counted, prev_ids
        return Program(adjust.adjust_counted, given, statics)

    def _abstract_counts(self) -> Counts:
        shapes = adjust.counts_shape(self._num_slots, self._vocab_size)
        return Counts(*(self._abstract(one.shape, one.dtype) for one in shapes))

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)

    def _every_id(self, num_rows: int) -> jax.Array:
        if num_rows not in self._all_ids:
            self._all_ids[num_rows] = self._put(every_id(num_rows, self._vocab_size))
        return self._all_ids[num_rows]

    def _unbiased(self, num_rows: int) -> jax.Array:
        if num_rows not in self._no_bias:
            self._no_bias[num_rows] = self._put(adjustments.no_bias(num_rows))
        return self._no_bias[num_rows]

    def _put(self, values: np.ndarray) -> jax.Array:
        return jax.device_put(values, self._replicated)
