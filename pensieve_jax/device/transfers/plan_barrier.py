"""A mark in the device's program after everything that was sent to the device before.

Owns: the tiny computation that is the mark. Does not know: what is sent before it, or what waits for it.

Copies of chunks share the copy engine with a step's plan. The engine alternates between its streams, in
slices of some 2 ms. A plan that must wait for slices of chunk copies is late, and so is its step. But a copy
waits for all computation dispatched before it, and the mark waits for the plan. So a copy that is started
after the mark cannot delay the plan.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program


class PlanBarrier:
    """A mark in the device's program after everything that was sent to the device before."""

    def __init__(self, sharding: NamedSharding) -> None:
        """Prepare a mark for the devices of `sharding`; compile nothing yet."""
        self._replicated = NamedSharding(sharding.mesh, PartitionSpec())
        self._mark: jax.stages.Compiled | None = None

    def job(self) -> CompilationJob:
        """Return the compilation that must end before the first mark."""
        one = jax.ShapeDtypeStruct((1,), np.int32, sharding=self._replicated)
        return CompilationJob("mark", Program(_mark, (one,), {}), self._keep)

    def dispatch(self) -> None:
        """Dispatch the mark; raise jax.errors.JaxRuntimeError if the device refuses."""
        assert self._mark is not None
        # Data from ordinary host memory arrives in the order in which it is sent.
        self._mark(jax.device_put(np.zeros(1, np.int32), self._replicated))

    def _keep(self, compiled: jax.stages.Compiled) -> None:
        self._mark = compiled


@jax.jit
def _mark(sent: jax.Array) -> jax.Array:
    return sent + 1
