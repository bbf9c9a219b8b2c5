"""The parts that cells are made of: tables, projections, and the steps of an LSTM.

Owns: their arrays, declared before any value exists, their precision, and the torch tensors that make them.
Does not know: models, graphs, or where values come from.

float32 means float32: matmuls then ask for HIGHEST precision, because GPUs default to TF32. Below it inputs
of a matmul have the kernel's dtype, and everything else is float32.
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
    """A parameter without a value yet; a random one is normal with this deviation, or everywhere `scale`."""
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    abstract: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    return nnx.Param(abstract, scale=scale, constant=constant)


def project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """[B, in] with [in, out] -> f32[B, out]."""
    precision = lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else lax.Precision.DEFAULT
    y = jnp.dot(x.astype(kernel.dtype), kernel, precision=precision, preferred_element_type=jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


class RecurrentEmbedding(nnx.Module):
    """A table [vocab_size, width] of tokens."""

    def __init__(self, vocab_size: int, width: int, dtype: str, *, scale: float = 1.0) -> None:
        """Declare it; `scale` is of random values."""
        self.weight = declare((vocab_size, width), dtype, scale)

    def __call__(self, token: jax.Array) -> jax.Array:
        """Rows of i32[B] -> [B, width]; an id outside the table, as padding may hold, gets some row."""
        return jnp.take(self.weight[...], token, axis=0, mode="clip")


class RecurrentLinear(nnx.Module):
    """A projection; weight [in, out], which is torch's transposed, and bias [out]."""

    def __init__(self, in_size: int, out_size: int, dtype: str, *, bias: bool = True) -> None:
        self.weight = declare((in_size, out_size), dtype, in_size**-0.5)
        self.bias = declare((out_size,), dtype, in_size**-0.5) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, in] -> f32[B, out]."""
        return project(x, self.weight[...], None if self.bias is None else self.bias[...])


def lstm_step(
    gates: RecurrentLinear, x: jax.Array, h: jax.Array, c: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A step of an LSTM: one matmul of [B, in + hidden] with [in + hidden, 4 hidden] (thesis, section 2.2.2).

    Args:
      gates: in torch's order, input, forget, cell, output; its two biases are one.
      x: [B, in].
      h: [B, hidden].
      c: f32[B, hidden].

    Returns: the next h and c.
    """
    i, f, g, o = jnp.split(gates(jnp.concatenate([x, h], axis=1)), 4, axis=1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(h.dtype), c


def linear_recipes(ours: str, theirs: str, in_size: int, out_size: int) -> dict[str, Recipe]:
    """Of a `RecurrentLinear` with a bias, made of a torch one."""
    return {
        f"{ours}.weight": matrix(f"{theirs}.weight", in_size, out_size),
        f"{ours}.bias": vector(f"{theirs}.bias", out_size),
    }


def lstm_recipes(ours: str, theirs: str, in_size: int, hidden_size: int) -> dict[str, Recipe]:
    """Of the gates of an LSTM, made of one layer of torch's, in one direction."""
    gates = 4 * hidden_size
    weights = (f"{theirs}.weight_ih_l0", f"{theirs}.weight_hh_l0")
    biases = (f"{theirs}.bias_ih_l0", f"{theirs}.bias_hh_l0")
    return {
        f"{ours}.weight": Recipe(weights, ((gates, in_size), (gates, hidden_size)), _side_by_side),
        f"{ours}.bias": Recipe(biases, ((gates,), (gates,)), jnp.add),
    }


def _side_by_side(*weights: jax.Array) -> jax.Array:
    """[out, in] of several inputs -> [all of them, out]."""
    return jnp.concatenate(weights, axis=1).T


def best(scores: jax.Array) -> jax.Array:
    """The place of the highest of f[B, n], i32[B]; of several the first."""
    return jnp.argmax(scores, axis=1).astype(jnp.int32)
