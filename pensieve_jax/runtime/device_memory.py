"""What a device's memory holds: its limit, the weights of a model, and what a step takes.

Owns: the sums over the executables of a step, JAX's limit of the device, and refusals of models whose weights
do not fit.
Does not know: what the executables compute, or how many pages there are (`device.page_budget`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.runtime.errors import in_a_line, is_out_of_memory
from pensieve_jax.runtime.host_memory import available_bytes


def memory_limit_bytes(device: jax.Device) -> int | None:
    """What JAX may use of the device, or None where the device does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def bytes_per_device(array: jax.Array) -> int:
    """Bytes of one device's share of `array`."""
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize


def least_device(devices: Sequence[jax.Device]) -> jax.Device:
    """The one with the least memory for JAX, of those that say; else the first."""
    return min(devices, key=lambda device: memory_limit_bytes(device) or math.inf)


def check_weights_fit(model: str, weights_bytes: int, devices: Sequence[jax.Device]) -> None:
    """Refuse a model before it is loaded, where the devices' memory is known; a CPU's is the machine's.

    Args:
      model: its name.
      weights_bytes: of its parameters on each device.
      devices: that share it.

    Raises:
      ConfigError: names the model; its parameters alone take more.
    """
    device, num_devices = least_device(devices), len(devices)
    if device.platform == "cpu":
        limit_bytes, where = available_bytes(), "the machine has free"
        weights_bytes, shared = num_devices * weights_bytes, ""
        hint = "a smaller model, or dtype='bfloat16'"
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
def refusing_weights(model: str, weights_bytes: int, devices: Sequence[jax.Device]) -> Iterator[None]:
    """Refuse a model for which memory runs out while it is loaded: others may use the device.

    Args:
      model: its name.
      weights_bytes: as of `check_weights_fit`.
      devices: as of `check_weights_fit`.

    Raises:
      ConfigError: names the model. What else goes wrong is raised as it is.
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
        hint = "raise runner.tensor_parallel_size, or end what else uses the device"
        takes = f"its parameters take {weights_bytes:,} bytes of each device"
        raise ConfigError("model", model, limit, f"{takes}; {hint}; {in_a_line(error)}") from error


def step_memory(
    executables: Sequence[jax.stages.Compiled], resident_bytes: int, handed_bytes: int
) -> dict[str, int]:
    """Bytes per device of one step, whose executables run one after the other.

    Args:
      executables: in order, one that runs several groups of layers as often.
      resident_bytes: weights and pools, which are there anyway.
      handed_bytes: the hidden state that each but the first takes over from the one before.

    Returns:
      `argument_bytes`, `output_bytes` and `alias_bytes` summed over all, so that `alias_bytes` of at
      least the pools' says that all are updated in place; of the rest the most that one of them takes beside
      what is resident: `temp_bytes`, `new_output_bytes` (no pools), both and what was handed over as
      `step_bytes`, and `peak_bytes`, which is that and what is resident. Empty where XLA does not say.
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
