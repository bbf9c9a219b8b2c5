"""The memory through which devices add up their partial sums, where the compiler does not.

Owns: when this memory is allocated again. Does not know: kernels, steps or pools.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from model_defs.all_reduce import SumSpec
from model_defs.config import ModelConfig
from pallas_kernels.all_reduce import ExchangeMemory
from pallas_kernels.ragged_paged_attention import BackendChoice
from pensieve_jax.runtime.errors import step_failed


class Exchange:
    """Exchange memory of the devices of one mesh.

    Attributes:
      sums: the sum specification that programs are compiled with. If None, the compiler adds up, and this
        object does nothing.
    """

    def __init__(self, choice: BackendChoice | None, model: ModelConfig, dtype: Any, mesh: Mesh) -> None:
        """Allocate the memory if `choice` is a kernel of this project, not XLA."""
        self._memory: ExchangeMemory | None = None
        self.sums: SumSpec | None = None
        if choice is None or choice.name == "xla":
            return
        self._memory = ExchangeMemory(mesh, model.hidden_size, dtype)
        self.sums = SumSpec(choice.name, self._memory.capacity)
        self._is_alone = True

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The table (for the layers) and the words (for the sampler), or ()."""
        return () if self._memory is None else (self._memory.table, self._memory.words)

    def begin(self) -> None:
        """Let devices wait for each other from now on: all of them have loaded all programs."""
        self._is_alone = False
        self.renew()

    def renew(self) -> None:
        """Allocate new memory; after a failed step, the devices' counters in the old one may differ.

        Raises:
          StepFailedError: a device has no memory for it.
        """
        if self._memory is None:
            return
        try:
            self._memory.renew(alone=self._is_alone)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("new memory for exchanges could not be allocated", error) from error
