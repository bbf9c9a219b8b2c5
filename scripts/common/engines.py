"""Several engines on one model, one after the other: what comparing configurations takes.

Owns: loading and compiling once, and beginning anew on the same weights, pages and slots.
Does not know: what an engine is asked to do. Called by: compare_variants.

Whatever a step's shape depends on (the model, `RunnerConfig`, `SchedulerConfig`, `gpu_pages`, the most
`cpu_pages`) is that of the runner and stays; policies, priorities, `stateful` and fewer `cpu_pages` are the
engine's own and may differ between engines.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Self

from absl import flags

from common.engine_flags import shows_progress
from pensieve_jax import EngineConfig
from pensieve_jax.assembly import Assembled, assemble
from pensieve_jax.engine.device_transfers import DeviceTransfers
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.model_runner import ModelRunner
from pensieve_jax.history import SQLiteHistoryStore

FLAGS = flags.FLAGS


class EngineFactory:
    """One runner, and one engine on it at a time.

    Attributes:
      config: what the runner was made for, with `cpu_bytes` turned into pages.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model of the flags and compile; raises PensieveError or ModelError."""
        self._parts: Assembled | None = assemble(
            FLAGS.model,
            dtype=FLAGS.dtype,
            history=None,
            synchronous="normal",
            config=config,
            progress=shows_progress(),
        )
        engine = self._parts.engine
        cpu_pages = int(engine.stats()["num_cpu_pages"])
        cache = dataclasses.replace(config.cache, cpu_pages=cpu_pages, cpu_bytes=None)
        self.config = dataclasses.replace(config, cache=cache)
        self._cost_model = engine._cost_model
        self._limits = engine.limits
        self._engine: Engine | None = engine

    @property
    def runner(self) -> ModelRunner:
        """What all engines run on."""
        assert self._parts is not None, "the factory is closed"
        return self._parts.runner

    def start(self, config: EngineConfig) -> Engine:
        """An engine without conversations; the one before is closed."""
        self._end()
        runner = self.runner
        runner.reset()
        transfers = runner.transfers
        assert isinstance(transfers, DeviceTransfers)
        transfers.retrieval_priority = config.cache.retrieval_priority
        self._engine = Engine(
            runner,
            config,
            self._limits,
            SQLiteHistoryStore(None, fingerprint="a benchmark"),
            cost_model=self._cost_model,
        )
        return self._engine

    def close(self) -> None:
        """Let go of everything, so that another factory finds the memory free."""
        self._end()
        self._parts = None

    def __enter__(self) -> Self:
        """The factory itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
