"""Norms over each head of queries and keys, before the rotation, which several families have.

Owns: the norm, and the gated layer with it. Does not know: families.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from model_defs.config import LayerKind
from model_defs.gated_decoder import GatedLayer
from model_defs.layers import Build, declare
from model_defs.tensor_recipes import Recipe, vector


class HeadNorm(nnx.Module):
    """Root-mean-square norm of each head, with one scale f[head_dim] for all heads."""

    def __init__(self, build: Build) -> None:
        """Declare the scale, which is replicated on every device."""
        self.eps = build.config.norm_eps
        self.scale = declare(build, (build.config.head_dim,), ones=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norm [T, heads, head_dim] in float32; the result has the dtype of `x`."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...].astype(jnp.float32)
        return normed.astype(x.dtype)


class HeadNormLayer(GatedLayer):
    """Gated decoder layer that norms each head of queries and keys."""

    def __init__(self, build: Build, kind: LayerKind) -> None:
        """Declare the layer's arrays."""
        bias = build.config.attention_bias
        super().__init__(build, kind, qkv_bias=bias, out_bias=bias)
        self.q_norm, self.k_norm = HeadNorm(build), HeadNorm(build)

    def project(self, normed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().project(normed)
        return self.q_norm(q), self.k_norm(k), v


def head_norm_recipes(head_dim: int) -> dict[str, Recipe]:
    """Return the recipes of both scales."""
    return {f"{name}.scale": vector(f"self_attn.{name}.weight", head_dim) for name in ("q_norm", "k_norm")}
