"""Decoder of Gemma 2 and 3: scaled embeddings, norms with a scale of one plus the weight, gates by GELU.

Owns these parts, and the options and the names of tensors that both versions share. The factor of embeddings
is rounded to the dtype that the model runs in, as the published models were trained. One is added to a norm's
weight in float32, and the scale stays float32: in bfloat16 the sum would lose bits of the weight. Knows no
family.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_defs.config import LayerKind, ModelConfig
from model_defs.errors import UnsupportedModelError
from model_defs.gated_checkpoints import gated_weight_map
from model_defs.gated_decoder import GatedDecoder
from model_defs.hf_options import boolean, choice, number
from model_defs.layers import Build, WideScaleRMSNorm
from model_defs.tensor_recipes import Recipe, WeightMap

_NORMS = {
    "input_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_ACTIVATION = "gelu_pytorch_tanh"


class GemmaDecoder(GatedDecoder):
    """Gated decoder that multiplies embeddings by the square root of the hidden size."""

    def __init__(self, build: Build, make_layer: Callable[[LayerKind], nnx.Module]) -> None:
        """Declare every array; see `GatedDecoder`."""
        super().__init__(build, make_layer, norm=WideScaleRMSNorm)
        self.embed_scale = float(np.asarray(build.config.hidden_size**0.5).astype(build.dtype))

    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return super().embed_tokens(token_ids, positions) * self.embed_scale


def one_plus(name: str, size: int) -> Recipe:
    """Return the recipe of a scale f32[size], which is one plus the tensor."""
    return Recipe((name,), ((size,),), _one_plus)


def _one_plus(weight: jax.Array) -> jax.Array:
    return 1.0 + weight.astype(jnp.float32)


def gemma_weight_map(config: ModelConfig) -> WeightMap:
    """Return the recipes of all parameters of a `GemmaDecoder` with `SandwichLayer`s."""
    return gated_weight_map(config, _NORMS, one_plus)


def gemma_fields(values: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that both versions have, for heads of `head_dim`.

    Raises UnsupportedModelError for another activation, or attention to later tokens.
    """
    if boolean(values, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            "use_bidirectional_attention=true is not supported: cached keys would have to see later tokens"
        )
    divisor = number(values, "query_pre_attn_scalar", 256)
    return {
        "activation": choice(values, "hidden_activation", _ACTIVATION, {_ACTIVATION: "geglu_tanh"}),
        "attention_bias": boolean(values, "attention_bias", False),
        "attention_scale": None if divisor == head_dim else divisor**-0.5,
    }


def cap(values: dict[str, Any], name: str, default: float | None) -> float | None:
    """Read a softcap, for which null means no cap."""
    return None if values.get(name, default) is None else number(values, name, default)


def written_gemma(config: ModelConfig) -> dict[str, Any]:
    """Return the options that `gemma_fields` reads, and the names of the activation for other readers."""
    scale = config.attention_scale
    return {
        "attention_bias": config.attention_bias,
        "hidden_act": _ACTIVATION,
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
    }
