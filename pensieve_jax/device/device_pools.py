"""The pools of every layer, by group: the one mutable place for KV state on the device.

Owns: which arrays are the pools now. Steps and page copies take a group's pools, donate them, and put the
updated ones back; whoever runs next takes those, so program order is the order of calls.
Does not know: what is in a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.runtime.errors import step_failed


class DevicePools:
    """Pools by group of layers.

    Attributes:
      groups: the pools of every group's layers, as the last dispatched program leaves them.
    """

    def __init__(self, storage: KVStorage) -> None:
        """Hold nothing before the first `reset`."""
        self._storage = storage
        self.groups: list[list[jax.Array]] = []

    def reset(self) -> None:
        """New, empty pools; the arrays that were pools until now are deleted, whoever still refers to them.

        Raises:
          StepFailedError: the device has no memory for them.
        """
        # First, since two sets may not fit. To forget them would not do: the traceback of what is being
        # handled, a failed step or Ctrl-C, has frames that refer to them. Those that were donated are deleted
        # already, and memory that work in flight uses is freed when that has ended.
        try:
            for pool in self.by_layer:
                pool.delete()
            self.groups = []
            self.replace(self._storage.new_pools())  # before they are waited for: an interrupt may come
            jax.block_until_ready(self.groups)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("new pools could not be made on the device", error) from error

    def replace(self, pools: Sequence[jax.Array]) -> None:
        """Take `pools`, one per layer, instead."""
        self.groups = [[pools[layer] for layer in layers] for layers in self._storage.groups]

    @property
    def by_layer(self) -> list[jax.Array]:
        """The pools, one per layer."""
        return [pool for group in self.groups for pool in group]
