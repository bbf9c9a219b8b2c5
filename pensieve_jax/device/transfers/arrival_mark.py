"""A mark in the device's program behind everything that was sent to the device before.

Owns: the tiny computation that is the mark. Does not know: what is sent before it, or who waits.

Copies of chunks share the copy engine with a step's plan, and the engine takes turns between its streams,
some 2 ms each: a plan that has to wait until such copies have had their turn is late, and its step with it.
But a copy waits for computation that was dispatched before it; so one that is started behind the mark, which
waits for the plan, cannot hold the plan up.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program


class ArrivalMark:
    """Places a mark in the device's program behind everything that was sent to the device before."""

    def __init__(self, sharding: NamedSharding) -> None:
        """For the devices of `sharding`; compiles nothing yet."""
        self._replicated = NamedSharding(sharding.mesh, PartitionSpec())
        self._mark: jax.stages.Compiled | None = None

    def job(self) -> CompilationJob:
        """What is to be compiled before the first mark."""
        one = jax.ShapeDtypeStruct((1,), np.int32, sharding=self._replicated)
        return CompilationJob("mark", Program(_mark, (one,), {}), self._keep)

    def place(self) -> None:
        """Dispatch the mark; raises jax.errors.JaxRuntimeError where the device refuses."""
        assert self._mark is not None
        # What comes from the host's ordinary memory arrives in the order in which it is sent.
        self._mark(jax.device_put(np.zeros(1, np.int32), self._replicated))

    def _keep(self, compiled: jax.stages.Compiled) -> None:
        self._mark = compiled


@jax.jit
def _mark(sent: jax.Array) -> jax.Array:
    return sent + 1
