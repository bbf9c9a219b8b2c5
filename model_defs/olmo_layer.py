"""Layer of OLMo 2 and 3: norms behind both blocks, and norms over all heads of queries and of keys.

Owns the layer, and the names of its tensors. A block reads the stream itself, and its normed output is added.
Queries and keys are normed before they are divided into heads, so one sum of squares runs over all heads. In
tensor parallelism the compiler adds these sums over devices, two numbers for each token. Knows no family.
"""

import jax
from flax import nnx

from model_defs.all_reduce import Summand
from model_defs.attention import Attention
from model_defs.config import LayerKind, ModelConfig
from model_defs.gated_checkpoints import gated_weight_map
from model_defs.gated_decoder import GatedBlocks
from model_defs.layers import Build, RMSNorm, declare, root_mean_square_normed
from model_defs.rope import Rotation
from model_defs.sharding import TENSOR_AXIS
from model_defs.tensor_recipes import Recipe, WeightMap

_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


class AllHeadsNorm(nnx.Module):
    """Root-mean-square norm over all heads of a token together, with a scale f[heads, head_dim]."""

    def __init__(self, build: Build, num_heads: int) -> None:
        """Declare the scale, which is split by heads, as queries and keys are."""
        self.eps = build.config.norm_eps
        self.scale = declare(build, (num_heads, build.config.head_dim), (TENSOR_AXIS,), ones=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norm [T, heads, head_dim] in float32; the result has the dtype of `x`."""
        return root_mean_square_normed(x, self.scale[...], self.eps, axes=(1, 2))


class OlmoLayer(GatedBlocks):
    """Gated decoder layer that adds the normed outputs of attention and MLP to the stream."""

    def __init__(self, build: Build, kind: LayerKind) -> None:
        """Declare the layer's arrays."""
        config = build.config
        super().__init__(build, kind, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        self.q_norm = AllHeadsNorm(build, config.num_heads)
        self.k_norm = AllHeadsNorm(build, config.num_kv_heads)
        self.attention_out_norm = RMSNorm(build)
        self.mlp_out_norm = RMSNorm(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: Summand | None,
        rotation: Rotation | None,
        attention: Attention,
    ) -> tuple[jax.Array, None]:
        """Run the layer on the stream f32[T, hidden_size]; no term is pending before or after it."""
        assert y is None
        x = x + self.attention_out_norm.of_sum(self.attend(layer_index, x, rotation, attention))
        return x + self.mlp_out_norm.of_sum(self.mlp(x)), None

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


def olmo_weight_map(config: ModelConfig) -> WeightMap:
    """Return the recipes of all parameters of a `GatedDecoder` with these layers."""
    outer, layer = gated_weight_map(config, _NORMS)
    return WeightMap(
        outer,
        layer
        | {
            "q_norm.scale": _scale("self_attn.q_norm.weight", config.num_heads, config.head_dim),
            "k_norm.scale": _scale("self_attn.k_norm.weight", config.num_kv_heads, config.head_dim),
        },
    )


def _scale(name: str, num_heads: int, head_dim: int) -> Recipe:
    """Return the recipe of a scale f[num_heads, head_dim]; its tensor is a vector over all heads."""
    return Recipe((name,), ((num_heads * head_dim,),), lambda scale: scale.reshape(num_heads, head_dim), 0)
