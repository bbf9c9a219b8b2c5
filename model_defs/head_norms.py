"""Norms over each head of queries and keys, before the rotation, which several families have.

Owns: the gated layer with them, and their recipes. Does not know: families.
"""

import jax

from model_defs.config import LayerKind
from model_defs.gated_decoder import GatedLayer
from model_defs.layers import Build, HeadNorm
from model_defs.tensor_recipes import Recipe, vector


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
