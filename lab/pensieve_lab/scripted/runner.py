"""A runner that lets another one compute, and chooses the tokens by a script.

Owns: the ids behind each page, read back as the context of a row, and the narrowing of a choice to one id.
Does not know: texts, which `Writer` has.

The other runner computes every step, with its pages, masks and log-probabilities. Only one id is left to each
of its choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax import ConfigError
from pensieve_jax.core.token_masks import every_id
from pensieve_jax.engine.runner import Progress, Runner
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult
from pensieve_lab.scripted.writer import Writer


class ScriptedHandle(NamedTuple):
    """A step in flight: the other runner's handle, and the plan."""

    inner: Any
    plan: StepPlan


class Sizes(NamedTuple):
    """Sizes of a runner.

    Attributes:
      page_size: tokens of a page.
      num_pages: pages of its pools, the dummy page included.
      vocab_size: ids of the model.
    """

    page_size: int
    num_pages: int
    vocab_size: int


class ScriptedRunner:
    """Wrapper that forwards to `inner`.

    Attributes:
      layouts, transfers: the runner's.
    """

    def __init__(self, inner: Runner, writer: Writer, sizes: Sizes) -> None:
        """Wrap a runner with these sizes, whose host tier is off."""
        self.layouts: Mapping[int, PlanLayout] = inner.layouts
        self.transfers: Transfers = inner.transfers
        self._inner = inner
        self._writer = writer
        self._page_size = sizes.page_size
        self._vocab_size = sizes.vocab_size
        self._ids = np.zeros(sizes.num_pages * sizes.page_size, np.int32)
        self._prev_ids = np.zeros(0, np.int32)

    @property
    def num_compilations(self) -> int:
        return self._inner.num_compilations

    def fill_tiles(self, plan: StepPlan) -> None:
        self._inner.fill_tiles(plan)

    def warm_up(self, progress: Progress | None = None) -> None:
        self._inner.warm_up(progress)

    def memory_analysis(self) -> dict[str, Any]:
        return self._inner.memory_analysis()

    def reset(self) -> None:
        self._prev_ids = np.zeros(0, np.int32)
        self._inner.reset()

    def launch(self, plan: StepPlan) -> ScriptedHandle:
        return ScriptedHandle(self._inner.launch(plan), plan)

    def choose(self, handle: ScriptedHandle, words: np.ndarray | None) -> None:
        """Start the choice, with the script's id as the only one that is left to each row."""
        token_ids = self._script_ids(handle.plan, words)
        only = every_id(len(token_ids), self._vocab_size)
        rows = np.flatnonzero(token_ids >= 0)
        only[rows] = 0
        only.view(np.uint32)[rows, token_ids[rows] // 32] = np.uint32(1) << (token_ids[rows] % 32).astype(
            np.uint32
        )
        self._inner.choose(handle.inner, only)

    def fetch(self, handle: ScriptedHandle) -> StepResult:
        return self._inner.fetch(handle.inner)

    def _script_ids(self, plan: StepPlan, words: np.ndarray | None) -> np.ndarray:
        """Return i32[S]: the script's id of every sample, -1 for other rows."""
        num_tokens, num_rows = int(plan.cu_q_lens[-1]), int(plan.num_rows[0])
        token_ids = plan.token_ids[:num_tokens].copy()
        from_prev = plan.prev_samples[:num_tokens] >= 0
        token_ids[from_prev] = self._prev_ids[plan.prev_samples[:num_tokens][from_prev]]
        self._ids[plan.write_slots[:num_tokens]] = token_ids
        chosen = np.full(plan.layout.max_num_samples, -1, np.int32)
        for sample in range(int(plan.num_samples[0])):
            row = int(np.searchsorted(plan.cu_q_lens[1 : num_rows + 1], plan.sample_tokens[sample], "right"))
            allowed = _Allowed(plan.banned_ids[sample], None if words is None else words[sample])
            chosen[sample] = self._writer.next_id(self._context(plan, row), allowed)
        self._prev_ids = chosen
        return chosen

    def _context(self, plan: StepPlan, row: int) -> list[int]:
        """Return all ids up to the last token of a row."""
        num_pages = -(-int(plan.kv_lens[row]) // self._page_size)
        pages = plan.page_indices[row, :num_pages].astype(np.int64)
        slots = (pages[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)
        context: list[int] = self._ids[slots[: plan.kv_lens[row]]].tolist()
        return context


class _Allowed:
    """Which ids a row may choose."""

    def __init__(self, banned_ids: np.ndarray, words: np.ndarray | None) -> None:
        """Take i32[B] banned ids, and i32[ceil(V / 32)] words or None."""
        self._banned_ids = frozenset(banned_ids.tolist())
        self._words = words

    def __call__(self, token_id: int) -> bool:
        """Return whether the id may be chosen."""
        if token_id in self._banned_ids:
            return False
        return self._words is None or bool(int(self._words[token_id // 32]) >> (token_id % 32) & 1)


def check_without_host_tier(cpu_pages: int) -> None:
    """Raise ConfigError for a host tier, whose copies would leave the script's ids behind."""
    if cpu_pages:
        raise ConfigError("cache.cpu_pages", cpu_pages, "0 with a scripted model", "give --cpu_pages=0")
