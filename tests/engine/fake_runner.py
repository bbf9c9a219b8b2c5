"""A runner without a model whose next token depends on every KV entry that a step reads through its pages.

Layer l stores, for each token, a hash of (position, token, sum of layer l-1's entries over all positions up
to it), read through the row's page list. One wrong, stale, swapped or missing entry in any layer therefore
changes the entries of all later positions and the next token. `dense_next_token` computes the same from a
plain list of tokens: the reference, which knows no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pensieve_jax.config import EngineConfig
from pensieve_jax.engine.runner import Progress
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult, token_buckets

VOCAB_SIZE = 256
NUM_LAYERS = 3
_POISON = np.uint64(0xDEADBEEFDEADBEEF)


def _mix(positions: np.ndarray, token_ids: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """u64[n]: an avalanche over the three, so that no two errors cancel by accident."""
    x = sums ^ (positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    x = x + token_ids.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(0x165667B19E3779F9)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(33))


def _next_token(final_sum: np.ndarray) -> np.ndarray:
    zeros = np.zeros_like(final_sum)
    return (_mix(zeros, zeros, final_sum) % np.uint64(VOCAB_SIZE)).astype(np.int32)


def dense_next_tokens(token_ids: Sequence[int]) -> np.ndarray:
    """i32[len]: the token that follows each prefix of `token_ids`, computed without pages."""
    tokens, positions = np.asarray(token_ids), np.arange(len(token_ids))
    sums = np.zeros(len(token_ids), np.uint64)
    for _ in range(NUM_LAYERS):
        sums = np.cumsum(_mix(positions, tokens, sums), dtype=np.uint64)
    return _next_token(sums)


class FakeRunner:
    """Computes a step when it is dispatched, as program order on a device would.

    Attributes:
      events: ("dispatch" | "fetch", step id), in order.
      computed: (conversation position interval) of every row: list of (start, end) by step.
    """

    def __init__(self, config: EngineConfig, max_context_tokens: int) -> None:
        self.page_size = config.cache.chunk_tokens
        self.num_pages = config.cache.gpu_pages + 1
        scheduler = config.scheduler
        max_num_rows = scheduler.max_num_rows or 2 * scheduler.max_num_running
        self.layouts = {
            bucket: PlanLayout(
                num_tokens=bucket,
                max_num_rows=min(bucket, max_num_rows),
                pages_per_row=-(-max_context_tokens // self.page_size),
                max_num_samples=min(bucket, scheduler.max_num_running),
                max_num_banned=config.runner.max_banned_ids,
                tiles_len=0,
            )
            for bucket in token_buckets(scheduler)
        }
        self.num_compilations = 0
        self.events: list[tuple[str, int]] = []
        self.computed: list[list[tuple[int, int]]] = []
        self.reset()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Nothing to prepare."""

    def fill_tiles(self, plan: StepPlan) -> None:
        """No kernel, no tiles."""

    def memory_analysis(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        num_slots = self.num_pages * self.page_size
        self.pools = [np.full(num_slots, _POISON, np.uint64) for _ in range(NUM_LAYERS)]
        self._prev_ids = np.zeros(0, np.int32)

    def dispatch(self, plan: StepPlan) -> Any:
        self._check(plan)
        self.events.append(("dispatch", plan.step_id))
        from_prev = plan.prev_samples >= 0
        token_ids = plan.token_ids.copy()
        token_ids[from_prev] = self._prev_ids[plan.prev_samples[from_prev]]
        num_rows = int(plan.num_rows[0])
        self.computed.append([])
        sums = np.zeros(plan.layout.num_tokens, np.uint64)
        for layer, pool in enumerate(self.pools):
            entries = _mix(plan.positions, token_ids, sums)
            valid = plan.write_slots < len(pool)
            pool[plan.write_slots[valid]] = entries[valid]
            for row in range(num_rows):
                start, end = plan.cu_q_lens[row], plan.cu_q_lens[row + 1]
                kv_len = int(plan.kv_lens[row])
                pages = plan.page_indices[row, : -(-kv_len // self.page_size)]
                kv = pool.reshape(self.num_pages, self.page_size)[pages].reshape(-1)[:kv_len]
                sums[start:end] = np.cumsum(kv, dtype=np.uint64)[kv_len - (end - start) :]
                if layer == 0:
                    self.computed[-1].append((kv_len - int(end - start), kv_len))
        ids = _next_token(sums[plan.sample_tokens])
        self._prev_ids = ids[: int(plan.num_samples[0])]
        return plan.step_id, self._prev_ids

    def fetch(self, handle: Any) -> StepResult:
        step_id, ids = handle
        self.events.append(("fetch", step_id))
        n = len(ids)
        return StepResult(ids, np.zeros(n, np.float32), np.zeros((n, 1), np.int32), np.zeros((n, 1), np.float32))

    def _check(self, plan: StepPlan) -> None:
        """What a device would silently get wrong."""
        padding = self.num_pages * self.page_size
        num_tokens = int(plan.cu_q_lens[-1])
        slots = plan.write_slots[:num_tokens]
        assert (plan.write_slots[num_tokens:] == padding).all(), "padding must be dropped"
        assert len(set(slots.tolist())) == num_tokens, "two tokens write one slot"
        assert ((slots >= self.page_size) & (slots < padding)).all(), "a write outside the pool or on page 0"
        assert (plan.prev_samples < len(self._prev_ids)).all(), "a token of a step that is not the previous"
        assert (plan.token_ids >= 0).all() and (plan.token_ids < VOCAB_SIZE).all()
        banned = plan.banned_ids
        assert ((banned >= -1) & (banned < VOCAB_SIZE)).all()
