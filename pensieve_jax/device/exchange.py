"""The memory by which devices add up their partial sums themselves, where that is asked for.

Owns: whether it is, the refusal of devices that cannot, and when the memory is made anew.
Does not know: kernels, steps or pools.
Called by: `model_runner`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from model_defs.config import ModelConfig
from model_defs.device_sums import SumSpec
from pallas_kernels.all_reduce import MAX_DEVICES, ExchangeMemory, device_limit
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device.runtime_errors import step_failed

_FIELD = "runner.all_reduce"


class Exchange:
    """Of the devices of one mesh.

    Attributes:
      sums: what programs are made with; None: the compiler adds up, and nothing else here does anything.
    """

    def __init__(self, backend: str, model: ModelConfig, dtype: Any, mesh: Mesh) -> None:
        """Make the memory, if there is more than one device and `backend` is not "xla".

        Raises:
          ConfigError: it does not run on these devices.
        """
        self._memory: ExchangeMemory | None = None
        self.sums: SumSpec | None = None
        num_devices = mesh.devices.size
        if backend == "xla" or num_devices == 1:
            return
        limit = device_limit(mesh.devices.flat[0])
        if limit is None and num_devices > MAX_DEVICES:
            limit = f"it serves at most {MAX_DEVICES} devices"
        if limit is not None:
            raise ConfigError(_FIELD, backend, "'xla' here", limit)
        self._memory = ExchangeMemory(mesh, model.hidden_size, dtype)
        self.sums = SumSpec(backend, self._memory.capacity)
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
