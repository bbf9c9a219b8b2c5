"""A device's memory: its limit, the weights of a model, and what a step takes.

Owns: the memory arithmetic over the executables of a step, JAX's limit for the device, and the refusal of
models whose weights do not fit. Raising the limit must happen before JAX has a client for GPUs.
Does not know: what the executables compute, or how many pages there are (`device.page_budget`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Final

import jax
import numpy as np

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.runtime.asynchronous_launches import has_clients
from pensieve_jax.runtime.errors import in_a_line, is_out_of_memory
from pensieve_jax.runtime.host_memory import available_bytes

VARIABLE: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""A variable of jaxlib: the share of a GPU's memory that JAX takes at its first use."""
_NEW_VARIABLE = "XLA_CLIENT_MEM_FRACTION"  # jaxlib 0.11 reads both names, and refuses both at a time
_JAX_SHARE = 0.75  # of jaxlib 0.11.2 if no variable is set
_WANTED_SHARE = "0.94"  # the rest is for the driver, kernels, and buffers of communication between devices


def allow_device_memory() -> None:
    """Let JAX take 94% of each GPU's memory, unless the user has set a share or JAX has been used already.

    Raises ConfigError for a share that is not a number.
    """
    if _given_share() is None and not has_clients():
        os.environ[VARIABLE] = _WANTED_SHARE


def jax_share() -> float:
    """Return the share of a GPU's memory that `memory_limit_bytes` is; raises as `allow_device_memory`."""
    return _given_share() or _JAX_SHARE


def _given_share() -> float | None:
    for name in (_NEW_VARIABLE, VARIABLE):
        if text := os.environ.get(name):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share < math.inf:
                hint = "such as 0.9, or unset it"
                raise ConfigError(name, text, "a number above 0", hint)
            return share
    return None


def memory_limit_bytes(device: jax.Device) -> int | None:
    """Return the bytes that JAX may use of the device, or None if the device does not report it."""
    return (device.memory_stats() or {}).get("bytes_limit")


def bytes_per_device(array: jax.Array) -> int:
    """Return the bytes of one device's share of `array`."""
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize


def least_device(devices: Sequence[jax.Device]) -> jax.Device:
    """Return the device with the least memory for JAX among those that report it, else the first."""
    return min(devices, key=lambda device: memory_limit_bytes(device) or math.inf)


def check_weights_fit(model: str, weights_bytes: int, devices: Sequence[jax.Device]) -> None:
    """Refuse a model before it is loaded, if the devices' memory is known. A CPU uses the machine's memory.

    Args:
      model: name of the model.
      weights_bytes: bytes of its parameters on each device.
      devices: the devices that share it.

    Raises:
      ConfigError: the model's parameters alone exceed the memory.
    """
    device, num_devices = least_device(devices), len(devices)
    if device.platform == "cpu":
        limit_bytes, where = available_bytes(), "the machine has free"
        weights_bytes, shared = num_devices * weights_bytes, ""
        hint = "choose a smaller model, or dtype='bfloat16'"
    else:
        limit_bytes, where = memory_limit_bytes(device), f"JAX may use of {device.device_kind}"
        shared = f" of each of {num_devices} devices" if num_devices > 1 else ""
        hint = "raise runner.tensor_parallel_size"
        if limit_bytes:
            hint += f" to {-(-weights_bytes * num_devices // limit_bytes)} or more"
    if limit_bytes is not None and weights_bytes > limit_bytes:
        limit = f"one whose parameters take at most the {limit_bytes:,} bytes that {where}"
        raise ConfigError(
            "model", model, limit, f"its parameters take {weights_bytes:,} bytes{shared}; {hint}"
        )


@contextlib.contextmanager
def weights_out_of_memory_as_config_error(
    model: str, weights_bytes: int, devices: Sequence[jax.Device]
) -> Iterator[None]:
    """Refuse a model if memory runs out while it is loaded; other processes may use the device.

    Args:
      model: name of the model.
      weights_bytes: as in `check_weights_fit`.
      devices: as in `check_weights_fit`.

    Raises:
      ConfigError: memory ran out. Other errors pass unchanged.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        device = least_device(devices)
        limit_bytes = memory_limit_bytes(device)
        has = "" if limit_bytes is None else f" of {limit_bytes:,} bytes that JAX may use"
        limit = f"one that can be loaded into the memory of {device.device_kind}{has}"
        hint = "raise runner.tensor_parallel_size, or stop other processes that use the device"
        takes = f"its parameters take {weights_bytes:,} bytes of each device"
        raise ConfigError("model", model, limit, f"{takes}; {hint}; {in_a_line(error)}") from error


def step_memory(
    executables: Sequence[jax.stages.Compiled], resident_bytes: int, handed_bytes: int
) -> dict[str, int]:
    """Return the bytes per device of one step, whose executables run one after the other.

    Args:
      executables: in order; one that runs several groups of layers appears once per group.
      resident_bytes: bytes of weights and pools, which are always allocated.
      handed_bytes: bytes of the hidden state that each executable but the first takes from the previous one.

    Returns:
      Sums over all executables: `argument_bytes`, `output_bytes` and `alias_bytes`. If `alias_bytes` is at
      least the pools' size, all pools are updated in place. Maxima over the executables, beside resident
      memory: `temp_bytes`, `new_output_bytes` (without pools), and `step_bytes`, which is both and the hidden
      state. `peak_bytes` is `step_bytes` and resident memory. Empty if XLA does not report memory.
    """
    stats = [
        each for each in (executable.memory_analysis() for executable in executables) if each is not None
    ]
    if len(stats) < len(executables):
        return {}
    new = [each.output_size_in_bytes - each.alias_size_in_bytes for each in stats]
    step_bytes = max(
        each.temp_size_in_bytes + new_bytes + (handed_bytes if i else 0)
        for i, (each, new_bytes) in enumerate(zip(stats, new, strict=True))
    )
    return {
        "argument_bytes": sum(each.argument_size_in_bytes for each in stats),
        "output_bytes": sum(each.output_size_in_bytes for each in stats),
        "alias_bytes": sum(each.alias_size_in_bytes for each in stats),
        "new_output_bytes": max(new),
        "temp_bytes": max(each.temp_size_in_bytes for each in stats),
        "step_bytes": step_bytes,
        "peak_bytes": resident_bytes + step_bytes,
    }
