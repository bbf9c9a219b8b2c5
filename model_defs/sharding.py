"""Device mesh and the partition of arrays on it: one axis, "tp", in the style of Megatron.

Owns the mesh, the check that a model is divisible by it, and the constraint helper of the layers.
Column-parallel weights are split by KV head group or by intermediate dimension, row-parallel ones by
the dimension that is summed over; all others are replicated. `tp = 1` is a mesh of one device,
not another code path. Knows nothing of checkpoints.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.errors import ShardingError

TENSOR_AXIS = "tp"
AnyMesh = Mesh | AbstractMesh

KV_PAGES_SPEC = PartitionSpec(None, None, TENSOR_AXIS, None)
"""Partition of a layer's `kv_pages[num_pages, page_size, 2 * num_kv_heads, head_dim]`: by KV head."""


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Create a one-dimensional mesh, axis "tp", over the first `tensor_parallel_size` of `devices`.

    `devices` defaults to `jax.devices()`. Raises ShardingError if there are too few of them.
    """
    available = list(jax.devices() if devices is None else devices)
    if not 1 <= tensor_parallel_size <= len(available):
        raise ShardingError(
            f"tensor_parallel_size={tensor_parallel_size} must be between 1 and the {len(available)} "
            f"available device(s); lower it or provide more devices"
        )
    chosen = np.asarray(available[:tensor_parallel_size])
    return Mesh(chosen, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def tensor_parallel_size(mesh: AnyMesh) -> int:
    """Return the size of the axis "tp"."""
    return int(mesh.shape[TENSOR_AXIS])


def check_divides(config: ModelConfig, mesh: AnyMesh) -> None:
    """Raise ShardingError unless heads, KV heads and widths of MLPs are divisible by the mesh size."""
    tp = tensor_parallel_size(mesh)
    sizes = {name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "intermediate_size")}
    if config.experts is not None:
        sizes["experts.width"] = config.experts.width
    for field, size in sizes.items():
        if size % tp:
            found = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ShardingError(
                f"{field}={size} is not divisible by tp={tp} (the model has {found}); choose a "
                f"tensor_parallel_size that divides all of these"
            )


def vocabulary_axis(vocab_size: int, mesh: AnyMesh) -> str | None:
    """Return the axis that a vocabulary dimension is split over: "tp" if it divides evenly, else None."""
    return None if vocab_size % tensor_parallel_size(mesh) else TENSOR_AXIS


def constrain(x: jax.Array, mesh: AnyMesh, *axes: str | None) -> jax.Array:
    """Constrain dimension i of `x` to the mesh axis `axes[i]`; missing axes are replicated."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))
