"""A runner that computes nothing, for measuring the host's work.

Owns: made-up ids, and the times at which it was called. Does not know: models, except the shapes of their
heads.
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
        self._in_flight: list[int] = []

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        """Record the ids of the copies."""
        self._in_flight += (copy.copy_id for copy in copies)

    swap_in = swap_out

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Complete these copies now."""
        if copy_ids:
            self._in_flight = [copy_id for copy_id in self._in_flight if copy_id not in set(copy_ids)]

    def completed(self) -> Ended:
        """Return all copies since the last call as complete."""
        done, self._in_flight = self._in_flight, []
        return Ended(done)

    def wait(self) -> None:
        """Return at once: every copy is complete already."""

    def reset(self) -> None:
        """Forget the copies in flight."""
        self._in_flight = []

    def stats(self) -> dict[str, int | float]:
        """Return no counters, because nothing moves."""
        return {}


class NullRunner:
    """`Runner` without a device, which makes up ids and records when it was called.

    Attributes:
      layouts: layouts that the real runner makes for this model.
      transfers: transfers that complete at once.
      launch_s, launch_wall_s: time of the last launch, as CPU time and by the wall clock.
      tiles_s: CPU time of its tile lists.
      num_rows, num_tokens: size of the last step.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, context_tokens: int, backend: str) -> None:
        """Make layouts and tile specs for the heads and windows of this model."""
        self._specs: dict[int, list[TileSpec]] = {}
        layouts: dict[int, PlanLayout] = {}
        for bucket in token_buckets(config.scheduler):
            specs = self._specs[bucket] = [
                tile_spec(
                    num_tokens=bucket,
                    max_num_seqs=bucket_rows(config.scheduler, bucket),
                    num_q_heads=model.num_heads,
                    num_kv_heads=model.num_kv_heads,
                    head_dim=model.head_dim,
                    page_size=config.cache.chunk_tokens,
                    dtype="bfloat16",
                    backend=backend,
                    window=window,
                )
                for window in model.windows
            ]
            layouts[bucket] = bucket_layout(
                config,
                bucket,
                context_tokens=context_tokens,
                tiles_lens=tuple(spec.tiles_len for spec in specs),
            )
        self.layouts: Mapping[int, PlanLayout] = layouts
        self._transfers = NullTransfers()
        self.transfers: Transfers = self._transfers
        self.num_compilations = 0
        self.launch_s = self.launch_wall_s = self.tiles_s = 0.0
        self.num_rows = self.num_tokens = 0

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: there is nothing to compile."""

    def reset(self) -> None:
        """Forget the ids of copies."""
        self._transfers.reset()

    def memory_analysis(self) -> dict[str, Any]:
        """Return nothing, because no memory is used."""
        return {}

    def fill_tiles(self, plan: StepPlan) -> None:
        """Build the tile lists as the real runner does, and time it."""
        start_s = time.thread_time()
        for spec, tiles in zip(self._specs[plan.layout.num_tokens], plan.tiles, strict=True):
            build_tiles(spec, plan.cu_q_lens, plan.kv_lens, int(plan.num_rows[0]), out=tiles)
        self.tiles_s = time.thread_time() - start_s

    def launch(self, plan: StepPlan) -> int:
        """Record the time and size of the step."""
        self.launch_s, self.launch_wall_s = time.thread_time(), time.perf_counter()
        self.num_rows, self.num_tokens = int(plan.num_rows[0]), int(plan.cu_q_lens[-1])
        return plan.layout.max_num_samples

    def choose(self, handle: int, words: np.ndarray | None) -> None:
        """Do nothing: the ids are made up."""

    def fetch(self, handle: int) -> StepResult:
        """Return made-up ids and log probabilities."""
        nothing = np.zeros((handle, 8), np.int32)
        return StepResult(nothing[:, 0] + 7, np.zeros(handle, np.float32), nothing, nothing.view(np.float32))
