"""Which devices run which kind of kernel, and how several of them each run one on all of its arrays.

Owns: the compute capabilities that Triton's and Mosaic's kernels need, and those with much shared memory.
Does not know: any kernel, or what it serves besides.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

_TRITON_CAPABILITY = 8.0
_MOSAIC_CAPABILITY = 9.0
# A100, Hopper, B200 and B300: 163 to 227 KiB for a program. Others have 99, or are not known to have more.
_LARGE_SHARED_MEMORY = (8.0, 9.0, 10.0, 10.3)


def triton_device_limit(device: jax.Device) -> str | None:
    """Why `pallas_triton` and `jax_triton` do not run on `device`, but to interpret; None: they do."""
    capability = _compute_capability(device)
    if capability is None:
        return f"the Triton kernel needs an NVIDIA GPU, this device is {device.device_kind!r}"
    if capability < _TRITON_CAPABILITY:
        limit = f"the Triton kernel needs compute capability {_TRITON_CAPABILITY} or more"
        return f"{limit}, this GPU has {capability}"
    return None


def mosaic_device_limit(device: jax.Device) -> str | None:
    """Why `pallas_mosaic_gpu` does not run on `device` except in interpret mode; None: it does."""
    capability = _compute_capability(device)
    if capability == _MOSAIC_CAPABILITY:
        return None
    has = f"{device.device_kind!r} has {capability}"
    return f"pallas_mosaic_gpu needs an NVIDIA GPU of compute capability {_MOSAIC_CAPABILITY}, {has}"


def has_large_shared_memory(device: jax.Device) -> bool:
    """Whether a program on `device` may have the shared memory of a data centre's GPU, and not 99 KiB.

    Yes for what is no NVIDIA GPU: kernels are interpreted there, or lowered for a GPU of the kind that blocks
    were measured on.
    """
    capability = _compute_capability(device)
    return capability is None or capability in _LARGE_SHARED_MEMORY


def on_every_device[T](run: Callable[..., T], mesh: Mesh | AbstractMesh) -> Callable[..., T]:
    """`run` on whole arrays, each device of `mesh` on its own copy: the partitioner cannot split a kernel."""
    whole = PartitionSpec()
    # Kernels do not declare over which axes their outputs vary.
    sharded: Callable[..., T] = jax.shard_map(
        run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    return sharded


def _compute_capability(device: jax.Device) -> float | None:
    """Of an NVIDIA GPU; a ROCm device names an architecture such as "gfx942" there."""
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and isinstance(capability, str) and capability[:1].isdigit():
        return float(capability)
    return None
