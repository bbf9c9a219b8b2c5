"""A runner that computes nothing, for measuring what the host does.

Owns: answers of made-up ids, and the times at which it was called. Does not know: models beyond the shapes of
their heads.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from model_defs import ModelConfig
from pallas_kernels.ragged_paged_attention import TileSpec, build_tiles, tile_spec
from pensieve_jax import EngineConfig
from pensieve_jax.cache import ChunkCopy
from pensieve_jax.engine.runner import Progress
from pensieve_jax.engine.transfers import Ended, Transfers
from pensieve_jax.scheduler import (
    PlanLayout,
    StepPlan,
    StepResult,
    bucket_layout,
    bucket_rows,
    token_buckets,
)


class NullTransfers:
    """`Transfers` that move nothing: every copy is complete one step later."""

    def __init__(self) -> None:
        """Nothing in flight."""
        self._in_flight: list[int] = []

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        """Note the ids."""
        self._in_flight += (copy.copy_id for copy in copies)

    swap_in = swap_out

    def expedite(self, copy_ids: Collection[int]) -> None:
        """They are complete."""
        if copy_ids:
            self._in_flight = [copy_id for copy_id in self._in_flight if copy_id not in set(copy_ids)]

    def completed(self) -> Ended:
        """All that was started."""
        done, self._in_flight = self._in_flight, []
        return Ended(done)

    def wait(self) -> None:
        """Everything is complete already."""

    def reset(self) -> None:
        """Forget the ids."""
        self._in_flight = []

    def stats(self) -> dict[str, int | float]:
        """Nothing was moved."""
        return {}


class NullRunner:
    """A `Runner` without a device: made-up ids, and the times at which it was called.

    Attributes:
      layouts: as the real runner makes them for this model.
      transfers: complete at once.
      dispatch_s, dispatch_wall_s: when the last step was dispatched, in CPU time and by the wall clock.
      tiles_s: how long its tile list took.
      num_rows, num_tokens: of the last step.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, context_tokens: int, backend: str) -> None:
        """Layouts and tile specs for heads of this model."""
        self._specs: dict[int, TileSpec] = {}
        layouts: dict[int, PlanLayout] = {}
        for bucket in token_buckets(config.scheduler):
            spec = self._specs[bucket] = tile_spec(
                num_tokens=bucket,
                max_num_seqs=bucket_rows(config.scheduler, bucket),
                num_q_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                page_size=config.cache.chunk_tokens,
                dtype="bfloat16",
                backend=backend,
            )
            layouts[bucket] = bucket_layout(
                config, bucket, context_tokens=context_tokens, tiles_len=spec.tiles_len
            )
        self.layouts: Mapping[int, PlanLayout] = layouts
        self._transfers = NullTransfers()
        self.transfers: Transfers = self._transfers
        self.num_compilations = 0
        self.dispatch_s = self.dispatch_wall_s = self.tiles_s = 0.0
        self.num_rows = self.num_tokens = 0

    def warm_up(self, progress: Progress | None = None) -> None:
        """Nothing to compile."""

    def reset(self) -> None:
        """Nothing to lose but the ids of copies."""
        self._transfers.reset()

    def memory_analysis(self) -> dict[str, Any]:
        """Nothing is held."""
        return {}

    def fill_tiles(self, plan: StepPlan) -> None:
        """As the real runner does."""
        start_s = time.thread_time()
        spec = self._specs[plan.layout.num_tokens]
        build_tiles(spec, plan.cu_q_lens, plan.kv_lens, int(plan.num_rows[0]), out=plan.tiles)
        self.tiles_s = time.thread_time() - start_s

    def dispatch(self, plan: StepPlan) -> int:
        """Note the time."""
        self.dispatch_s, self.dispatch_wall_s = time.thread_time(), time.perf_counter()
        self.num_rows, self.num_tokens = int(plan.num_rows[0]), int(plan.cu_q_lens[-1])
        return plan.layout.max_num_samples

    def fetch(self, handle: int) -> StepResult:
        """Any ids do."""
        nothing = np.zeros((handle, 8), np.int32)
        return StepResult(nothing[:, 0] + 7, np.zeros(handle, np.float32), nothing, nothing.view(np.float32))
