"""The memory by which devices add up their partial sums themselves, where they do.

Owns: when the memory is made anew. Does not know: kernels, steps or pools.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from model_defs.config import ModelConfig
from model_defs.device_sums import SumSpec
from pallas_kernels.all_reduce import ExchangeMemory
from pallas_kernels.ragged_paged_attention import BackendChoice
from pensieve_jax.runtime.errors import step_failed


class Exchange:
    """Of the devices of one mesh.

    Attributes:
      sums: what programs are made with; None: the compiler adds up, and nothing else here does anything.
    """

    def __init__(self, choice: BackendChoice | None, model: ModelConfig, dtype: Any, mesh: Mesh) -> None:
        """Make the memory, if there is a choice, and it is not the compiler."""
        self._memory: ExchangeMemory | None = None
        self.sums: SumSpec | None = None
        if choice is None or choice.name == "xla":
            return
        self._memory = ExchangeMemory(mesh, model.hidden_size, dtype)
        self.sums = SumSpec(choice.name, self._memory.capacity)
        self._is_alone = True

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The table, for the layers, and the words, for the sampler; or nothing."""
        return () if self._memory is None else (self._memory.table, self._memory.words)

    def begin(self) -> None:
        """Let devices wait for each other, now that all have loaded all programs."""
        self._is_alone = False
        self.renew()

    def renew(self) -> None:
        """New memory: a step that failed may have left devices at different places.

        Raises:
          StepFailedError: a device has none for it.
        """
        if self._memory is None:
            return
        try:
            self._memory.renew(alone=self._is_alone)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("new memory for exchanges could not be made", error) from error
