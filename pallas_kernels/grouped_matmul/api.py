"""Public call of the experts' MLPs: argument checks, choice of a back end, dispatch.

Owns: the limits of the kernel, and the error for unsupported arguments. Does not know: how it works.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from pallas_kernels.decode_matmul import device_limit
from pallas_kernels.grouped_matmul.groups import PIECE_ROWS, GroupSpec, group_rows, sum_choices
from pallas_kernels.grouped_matmul.tiles import NUM_PROGRAMS, SWIZZLED, Products, block_rows, default_products
from pallas_kernels.grouped_matmul.xla import xla_expert_mlp

BACKENDS = ("auto", "xla", "pallas_mosaic_gpu")


class ExpertArgumentError(ValueError):
    """An argument is not supported; the message says what is."""


def shape_limit(hidden_size: int, width: int, dtype: Any) -> str | None:
    """Return why the kernel does not support experts of these sizes; None if it does."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"pallas_mosaic_gpu multiplies bfloat16, not {jnp.dtype(dtype).name}"
    for name, size in (("hidden size", hidden_size), ("width on a device", width)):
        if size % SWIZZLED:
            return f"pallas_mosaic_gpu needs multiples of {SWIZZLED}: an expert's {name} is {size}"
    return None


def choose_backend(
    hidden_size: int, width: int, *, dtype: Any, device: jax.Device | AbstractDevice | None
) -> str:
    """Return the faster back end for experts [width, hidden_size] on `device`."""
    limit = shape_limit(hidden_size, width, dtype)
    return "pallas_mosaic_gpu" if limit is None and device_limit(device) is None else "xla"


def expert_mlp(
    x: Annotated[jax.Array, "f[num_tokens, hidden_size]"],
    experts: Annotated[jax.Array, "i32[num_tokens, num_chosen]"],
    weights: Annotated[jax.Array, "f32[num_tokens, num_chosen]"],
    gate_up: Annotated[jax.Array, "f[num_experts, 2, width, hidden_size]"],
    down: Annotated[jax.Array, "f[num_experts, hidden_size, width]"],
    num_counted: Annotated[jax.Array, "i32[]"] | None = None,
    *,
    backend: str = "auto",
    products: Products | None = None,
    interpret: bool = False,
    num_programs: int = NUM_PROGRAMS,
) -> Annotated[jax.Array, "f[num_tokens, hidden_size]"]:
    """Return the weighted sum of each token's experts, `down @ (silu(gate @ x) * (up @ x))`.

    A token's result depends on its own row, experts and weights alone, bit by bit, in every batch of this
    number of tokens. `xla` gives the same bits for every number.

    Args:
      x: rows of the tokens.
      experts: the experts of each token, all different, from 0 to num_experts - 1.
      weights: their factors; the sum runs in this order.
      gate_up: weights of the gate and of the up projection, as checkpoints have them: [out, in].
      down: weights of the down projection, [out, in].
      num_counted: tokens that count; later ones are padding. They read no weights and get zeros.
      backend: "auto" selects the kernel if it supports these arrays on the first device.
      products: tiles of the kernel; None means the default ones.
      interpret: run the kernel without a GPU, slowly; `backend` must name it.
      num_programs: programs of a launch.

    Raises:
      ExpertArgumentError: arrays do not match, or `backend` names the kernel and it does not support them.
    """
    if backend not in BACKENDS:
        raise ExpertArgumentError(f"backend is {backend!r}, but must be one of {BACKENDS}")
    if interpret and backend != "pallas_mosaic_gpu":
        raise ExpertArgumentError(f"backend is {backend!r}, but interpret needs 'pallas_mosaic_gpu'")
    num_experts, width = _sizes(x, experts, weights, gate_up, down)
    (num_tokens, hidden_size), num_chosen = x.shape, experts.shape[1]
    if backend == "auto":
        backend = choose_backend(hidden_size, width, dtype=x.dtype, device=jax.devices()[0])
    is_xla = backend == "xla"
    if not is_xla:
        products = _checked(x, products, num_tokens * num_chosen, num_experts, width)
    rows = PIECE_ROWS if products is None or is_xla else products.down.rows
    spec = GroupSpec(num_tokens, num_chosen, num_experts, rows)
    grouped = group_rows(spec, experts, num_counted)
    sorted_x = jnp.take(x, grouped.tokens, axis=0, mode="clip")
    if is_xla:
        results = xla_expert_mlp(spec, sorted_x, grouped.blocks, gate_up, down)
    else:
        assert products is not None
        # Imported late: it needs a part of JAX that only builds for NVIDIA GPUs contain.
        from pallas_kernels.grouped_matmul.pallas_mosaic_gpu import mosaic_grouped_matmul

        parts = gate_up.reshape(-1, hidden_size), down.reshape(-1, width)
        multiply = functools.partial(
            mosaic_grouped_matmul, spec, blocks=grouped.blocks, num_programs=num_programs, interpret=interpret
        )
        inner = multiply(sorted_x, parts[0], tile=products.gate_up, gated=True)
        results = multiply(inner, parts[1], tile=products.down, gated=False)
    return sum_choices(spec, results, grouped.places, weights)


def _sizes(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> tuple[int, int]:
    """Return the number of experts and their width; raise ExpertArgumentError if arrays do not match."""
    if x.ndim != 2 or gate_up.ndim != 4 or not x.size:
        limit = "must be [num_tokens, hidden_size] and [num_experts, 2, width, hidden_size], none of them 0"
        raise ExpertArgumentError(f"x and gate_up are {_named(x)} and {_named(gate_up)}, but {limit}")
    num_experts, width = gate_up.shape[0], gate_up.shape[2]
    wanted = {
        "gate_up": (gate_up, (num_experts, 2, width, x.shape[1]), x.dtype),
        "down": (down, (num_experts, x.shape[1], width), x.dtype),
        "experts": (experts, (x.shape[0], experts.shape[-1]), jnp.dtype("int32")),
        "weights": (weights, experts.shape, jnp.dtype("float32")),
    }
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            limit = f"must be {dtype.name}{list(shape)} for x {_named(x)}"
            raise ExpertArgumentError(f"{name} is {_named(array)}, but {limit}")
    if not 1 <= experts.shape[1] <= num_experts:
        raise ExpertArgumentError(
            f"experts is {_named(experts)}, but a token chooses 1 to {num_experts} experts"
        )
    return num_experts, width


def _checked(
    x: jax.Array, products: Products | None, num_pairs: int, num_experts: int, width: int
) -> Products:
    """Return the given or default tiles; raise ExpertArgumentError if the kernel does not support the
    arrays."""
    hidden_size = x.shape[1]
    if (limit := shape_limit(hidden_size, width, x.dtype)) is not None:
        raise ExpertArgumentError(f"x is {_named(x)}, but {limit}; use backend 'xla'")
    if products is None:
        products = default_products(block_rows(num_pairs, num_experts), hidden_size, width)
        assert products is not None
    gate_up, down = products
    fit = gate_up.fits(gated=True) and down.fits(gated=False) and gate_up.rows == down.rows
    if not (fit and gate_up.divides(hidden_size, width) and down.divides(width, hidden_size)):
        limit = (
            f"must divide experts [{width}, {hidden_size}], have blocks of the same rows, one or two "
            "warpgroups, and two stages or more, which fit in shared memory"
        )
        raise ExpertArgumentError(f"products is {products}, but {limit}")
    return products


def _named(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
