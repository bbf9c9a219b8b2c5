"""A runner whose steps compute as always, and whose ids come from a script.

Owns: the replacement of chosen ids, on the device for the next step and in what the host fetches.
Does not know: who wrote the script, or which rows have drafts.

So a model with random weights gives replies that are known beforehand, at the cost of a model that would
give them. A row finds its script by its seed, and the id by its position, as the sampler finds its noise.
Each step has one more small copy to the device, with and without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pensieve_jax.device.model_runner import ModelRunner, StepHandle
from pensieve_jax.scheduler import StepPlan, StepResult

type Scripts = dict[int, Mapping[int, int]]
"""By seed: the id at each position that a turn samples."""


class ScriptedRunner:
    """The wrapper of a runner; see `Runner`.

    Attributes:
      scripts: the ids of the turns in progress.
    """

    def __init__(self, inner: ModelRunner) -> None:
        """Start without scripts: a row without one keeps what the model chose."""
        self.scripts: Scripts = {}
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan) -> tuple[StepHandle, np.ndarray]:
        """Start the forward pass of a step, and look up its ids."""
        num_samples = int(plan.num_samples[0])
        forced = np.full(plan.layout.max_num_samples, -1, np.int32)
        low, high = plan.seed[:num_samples].astype(np.uint64).T
        seeds = low | high << np.uint64(32)
        positions = plan.sample_positions[:num_samples].tolist()
        for row, (seed, position) in enumerate(zip(seeds.tolist(), positions, strict=True)):
            forced[row] = self.scripts.get(seed, {}).get(position, -1)
        return self._inner.launch(plan), forced

    def choose(self, handle: tuple[StepHandle, np.ndarray], words: np.ndarray | None) -> None:
        """Start the choice of a step's ids, and give the next step those of the script."""
        inner, (step, forced) = self._inner, handle
        inner.choose(step, words)
        ids = np.zeros(inner._prev_ids.shape, np.int32)
        ids[: len(forced)] = np.maximum(forced, 0)
        inner._prev_ids = jax.device_put(ids, inner._prev_ids.sharding)

    def fetch(self, handle: tuple[StepHandle, np.ndarray]) -> StepResult:
        """Wait for a step; returns its result with the ids of the script."""
        step, forced = handle
        result = self._inner.fetch(step)
        return result._replace(token_ids=np.where(forced >= 0, forced, result.token_ids))
