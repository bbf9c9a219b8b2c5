"""Layers of cells: tables, projections, and the step of an LSTM.

Owns: their arrays, declared before any value exists, their precision, and their recipes from torch tensors.
Does not know: models, graphs, or the source of values.

In float32, matmuls request HIGHEST precision, because GPUs default to TF32. In narrower types the inputs of a
matmul have the kernel's dtype, and everything else is float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import SingleDeviceSharding

from model_defs.tensor_recipes import Recipe, matrix, vector


def declare(
    shape: tuple[int, ...], dtype: str, scale: float, *, constant: bool = False
) -> nnx.Param[jax.Array]:
    """Declare a parameter without a value. Random values are normal of deviation `scale`, or all `scale`."""
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    abstract: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    return nnx.Param(abstract, scale=scale, constant=constant)


def project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Multiply [B, in] by [in, out]; return f32[B, out]."""
    precision = lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else lax.Precision.DEFAULT
    y = jnp.dot(x.astype(kernel.dtype), kernel, precision=precision, preferred_element_type=jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


class RecurrentEmbedding(nnx.Module):
    """Embedding table [vocab_size, width] of tokens."""

    def __init__(self, vocab_size: int, width: int, dtype: str, *, scale: float = 1.0) -> None:
        """Declare the table; `scale` is the deviation of random values."""
        self.weight = declare((vocab_size, width), dtype, scale)

    def __call__(self, token: jax.Array) -> jax.Array:
        """Map i32[B] to rows [B, width]. Padding may have ids outside the table; which give any row."""
        return jnp.take(self.weight[...], token, axis=0, mode="clip")


class RecurrentLinear(nnx.Module):
    """Projection with weight [in, out], the transpose of torch's, and bias [out]."""

    def __init__(self, in_size: int, out_size: int, dtype: str, *, bias: bool = True) -> None:
        self.weight = declare((in_size, out_size), dtype, in_size**-0.5)
        self.bias = declare((out_size,), dtype, in_size**-0.5) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, in] to f32[B, out]."""
        return project(x, self.weight[...], None if self.bias is None else self.bias[...])


def lstm_step(
    gates: RecurrentLinear, x: jax.Array, h: jax.Array, c: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run an LSTM step: a matmul of [B, in + hidden] by [in + hidden, 4 hidden] (thesis, section 2.2.2).

    Args:
      gates: gates in torch's order (input, forget, cell, output), with torch's two biases summed.
      x: [B, in].
      h: [B, hidden].
      c: f32[B, hidden].

    Returns: the next h and c.
    """
    i, f, g, o = jnp.split(gates(jnp.concatenate([x, h], axis=1)), 4, axis=1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(h.dtype), c


def linear_recipes(ours: str, theirs: str, in_size: int, out_size: int) -> dict[str, Recipe]:
    """Return the recipes of a `RecurrentLinear` with bias, from torch's `nn.Linear`."""
    return {
        f"{ours}.weight": matrix(f"{theirs}.weight", in_size, out_size),
        f"{ours}.bias": vector(f"{theirs}.bias", out_size),
    }


def lstm_recipes(ours: str, theirs: str, in_size: int, hidden_size: int) -> dict[str, Recipe]:
    """Return the recipes of LSTM gates, from one layer and direction of torch's `nn.LSTM`."""
    gates = 4 * hidden_size
    weights = (f"{theirs}.weight_ih_l0", f"{theirs}.weight_hh_l0")
    biases = (f"{theirs}.bias_ih_l0", f"{theirs}.bias_hh_l0")
    return {
        f"{ours}.weight": Recipe(weights, ((gates, in_size), (gates, hidden_size)), _side_by_side),
        f"{ours}.bias": Recipe(biases, ((gates,), (gates,)), jnp.add),
    }


def _side_by_side(*weights: jax.Array) -> jax.Array:
    """Concatenate weights [out, in] along their inputs, and transpose to [in, out]."""
    return jnp.concatenate(weights, axis=1).T


def best(scores: jax.Array) -> jax.Array:
    """Return i32[B], the index of the first maximum in each row of f[B, n]."""
    return jnp.argmax(scores, axis=1).astype(jnp.int32)
