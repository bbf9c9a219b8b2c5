"""Device requirements of the kernels, and the wrapper that runs a kernel on every device of a mesh.

Owns: the compute capabilities that Triton and Mosaic kernels need, and those with large shared memory.
Does not know: any kernel, or its other limits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

_TRITON_CAPABILITY = 8.0
_MOSAIC_CAPABILITY = 9.0
# A100, Hopper, B200 and B300 have 163 to 227 KiB for a program. Others have 99 KiB, or are not known to have
# more.
_LARGE_SHARED_MEMORY = (8.0, 9.0, 10.0, 10.3)


def triton_device_limit(device: jax.Device) -> str | None:
    """Return why `pallas_triton` and `jax_triton` need interpret mode on `device`; None if they run."""
    capability = _compute_capability(device)
    if capability is None:
        return f"the Triton kernel needs an NVIDIA GPU, this device is {device.device_kind!r}"
    if capability < _TRITON_CAPABILITY:
        limit = f"the Triton kernel needs compute capability {_TRITON_CAPABILITY} or more"
        return f"{limit}, this GPU has {capability}"
    return None


def mosaic_device_limit(device: jax.Device) -> str | None:
    """Return why `pallas_mosaic_gpu` needs interpret mode on `device`; None if it runs."""
    capability = _compute_capability(device)
    if capability == _MOSAIC_CAPABILITY:
        return None
    has = f"{device.device_kind!r} has {capability}"
    return f"pallas_mosaic_gpu needs an NVIDIA GPU of compute capability {_MOSAIC_CAPABILITY}, {has}"


def has_large_shared_memory(device: jax.Device) -> bool:
    """Return whether a program on `device` may use the shared memory of a data centre GPU, not only 99 KiB.

    True for devices other than NVIDIA GPUs: there kernels are interpreted, or lowered for the kind of GPU on
    which blocks were measured.
    """
    capability = _compute_capability(device)
    return capability is None or capability in _LARGE_SHARED_MEMORY


def on_every_device[T](run: Callable[..., T], mesh: Mesh | AbstractMesh) -> Callable[..., T]:
    """Make each device of `mesh` call `run` with whole arrays: the partitioner cannot split a kernel."""
    whole = PartitionSpec()
    # Kernels do not declare the axes over which their outputs vary.
    sharded: Callable[..., T] = jax.shard_map(
        run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    return sharded


def _compute_capability(device: jax.Device) -> float | None:
    """Return the compute capability of an NVIDIA GPU. A ROCm device has a name such as "gfx942" there."""
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and isinstance(capability, str) and capability[:1].isdigit():
        return float(capability)
    return None
