"""Several engines on one model, one after the other: what comparing configurations takes.

Owns: loading and compiling once, and beginning anew on the same weights, pages and slots.
Does not know: what an engine is asked to do. Called by: compare_variants, and `serving.engine_server`.

Whatever a step's shape depends on (the model, `RunnerConfig`, `SchedulerConfig`, `gpu_pages`, the most
`cpu_pages`) is that of the runner and stays; policies, priorities, `stateful` and fewer `cpu_pages` are the
engine's own and may differ between engines.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax import EngineConfig
from pensieve_jax.commands.engine_flags import open_parts
from pensieve_jax.core.clock import Clock
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.runner import Runner
from pensieve_jax.history import HistoryStore, SQLiteHistoryStore


class EngineFactory:
    """One runner, and one engine on it at a time.

    Attributes:
      config: what the runner was made for, with `cpu_bytes` turned into pages.
      costs: the costs of recomputing that its engines evict by.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model of the flags and compile; raises PensieveError or ModelError."""
        self._parts = open_parts(config)
        self.config, self.costs = self._parts.config, self._parts.costs
        self._engine = self._parts.engine

    def start(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        store: HistoryStore | None = None,
        wrap: Callable[[Runner], Runner] = lambda runner: runner,
    ) -> Engine:
        """An engine on empty pools; the one before is closed.

        It has no conversations, or those of `store`, which is closed with it. `wrap` may put something
        between engine and runner.
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
            cost_model=self.costs.model,
            clock=clock,
        )
        return self._engine

    def close(self) -> None:
        """Close the engine that is open; a second call does nothing."""
        self._engine.close()
