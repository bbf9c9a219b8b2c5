"""Several engines on one model, one after the other, for comparing configurations.

Owns: loading and compiling once, and restarting on the same weights, pages and slots.
Does not know: what an engine is asked to do.
Called by `programs.compare_variants` and `serving.engine_server`.

Everything that a step's shape depends on belongs to the runner and stays: the model, `RunnerConfig`,
`SchedulerConfig`, `gpu_pages`, and the largest `cpu_pages`. Policies, priorities, `stateful`, a smaller
`cpu_pages` and the recompute costs, which not every policy needs, belong to the engine and may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import flags

from pensieve_jax import EngineConfig
from pensieve_jax.assembly import costs_of_parts
from pensieve_jax.commands.engine_flags import open_parts, shows_progress
from pensieve_jax.core.clock import Clock
from pensieve_jax.cost_choice import CostChoice, needs_costs
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.runner import Runner
from pensieve_jax.history import HistoryStore, SQLiteHistoryStore

FLAGS = flags.FLAGS


class EngineFactory:
    """One runner, and one engine on it at a time.

    Attributes:
      config: configuration of the runner, with `cpu_bytes` converted to pages.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model of the flags and compile; raises PensieveError or ModelError."""
        self._parts = open_parts(config)
        self.config = self._parts.config
        self._engine = self._parts.engine
        self._costs = {needs_costs(self.config): self._parts.costs}

    def costs_of(self, config: EngineConfig) -> CostChoice:
        """Return the costs by which an engine of this configuration evicts.

        The first configuration that needs costs may measure them, which closes the open engine.
        """
        needed = needs_costs(config)
        if needed not in self._costs:
            self.close()
            self._costs[needed] = costs_of_parts(self._parts, config, FLAGS.dtype, shows_progress())
        return self._costs[needed]

    def start(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        store: HistoryStore | None = None,
        wrap: Callable[[Runner], Runner] = lambda runner: runner,
    ) -> Engine:
        """Return an engine on empty pools; closes the previous engine.

        The engine has no conversations, or those of `store`, which is closed with it. `wrap` may put a
        wrapper between engine and runner.
        """
        self.close()
        runner = self._parts.runner
        runner.reset()
        transfers = runner.transfers
        assert isinstance(transfers, DeviceTransfers)
        transfers.retrieval_priority = config.cache.retrieval_priority
        self._engine = Engine(
            wrap(runner),
            config,
            self._parts.engine.limits,
            store or SQLiteHistoryStore(None, fingerprint="a benchmark"),
            cost_model=self.costs_of(config).model,
            clock=clock,
        )
        return self._engine

    def close(self) -> None:
        """Close the open engine; a second call does nothing."""
        self._engine.close()


def costs_document(costs: CostChoice) -> dict[str, Any]:
    """Return the description of eviction costs for a result document."""
    points = None if costs.points is None else [point._asdict() for point in costs.points]
    return {"kind": costs.kind, "source": costs.source, "reason": costs.reason, "points": points}
