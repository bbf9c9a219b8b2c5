"""OPT: learned positions (offset 2), layer norm before or after each block, biases, ReLU MLP.

Supports the published variants: pre-norm (all but 350m), post-norm with an embedding table narrower than
the hidden size (350m), and models without biases or without affine norms. Owns the parsing and writing of
config.json, the weight map and the presets. OPT's tokenizers have no chat template.
"""

import functools
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.hf_options import boolean, choice, common_fields, integer, number
from model_defs.learned_positions import LearnedPositionDecoder
from model_defs.tensor_recipes import WeightMap, attention_recipes, matrix, table, token_recipes, vector
from model_defs.tiny_preset import tiny_preset

_POSITION_OFFSET = 2  # OPT's checkpoints reserve rows 0 and 1 of the table for padding
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_WRITTEN_ACTIVATIONS = {"gelu_tanh": "gelu_new"}  # names in config.json that differ from ours


def _published(num_layers: int, hidden_size: int, num_heads: int) -> ModelConfig:
    """Return the config of a published pre-norm OPT."""
    return ModelConfig(
        architecture="opt",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=4 * hidden_size,
        vocab_size=50272,
        max_position_embeddings=2048,
        bos_token_id=2,
        eos_token_ids=(2,),
        tie_word_embeddings=True,
        dtype="float16",
        activation="relu",
        attention_bias=True,
        mlp_bias=True,
    )


_PRESETS = {
    "opt-125m": _published(12, 768, 12),
    "opt-13b": _published(40, 5120, 40),
    "opt-66b": _published(64, 9216, 72),
    "opt-tiny": tiny_preset(
        "opt",
        num_kv_heads=4,
        tie_word_embeddings=True,
        activation="relu",
        attention_bias=True,
        mlp_bias=True,
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    common = common_fields(values, generation, bos=2, eos=2, max_positions=2048)
    hidden_size, num_heads = common["hidden_size"], common["num_heads"]
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}"
        )
    pre_norm = boolean(values, "do_layer_norm_before", True)
    bias = boolean(values, "enable_bias", True)
    width = integer(values, "word_embed_proj_dim", hidden_size)
    return ModelConfig(
        architecture="opt",
        **common,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=integer(values, "ffn_dim"),
        tie_word_embeddings=boolean(values, "tie_word_embeddings", True),
        activation=choice(values, "activation_function", "relu", _ACTIVATIONS),
        attention_bias=bias,
        mlp_bias=bias,
        word_embed_dim=0 if width == hidden_size else width,
        pre_norm=pre_norm,
        final_norm=pre_norm and not boolean(values, "_remove_final_layer_norm", False),
        norm_affine=boolean(values, "layer_norm_elementwise_affine", True),
        initializer_range=number(values, "init_std", 0.02),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "ffn_dim": config.intermediate_size,
        "word_embed_proj_dim": config.embed_width,
        "activation_function": _WRITTEN_ACTIVATIONS.get(config.activation, config.activation),
        "do_layer_norm_before": config.pre_norm,
        "_remove_final_layer_norm": config.pre_norm and not config.final_norm,
        "enable_bias": config.attention_bias,
        "layer_norm_elementwise_affine": config.norm_affine,
    }


def _weight_map(config: ModelConfig) -> WeightMap:
    hidden, wide, width = config.hidden_size, config.intermediate_size, config.embed_width
    num_positions = config.max_position_embeddings + _POSITION_OFFSET
    outer = {
        "position_table": table("embed_positions.weight", num_positions, hidden),
        "project_in.kernel": matrix("project_in.weight", width, hidden),
        "project_out.kernel": matrix("project_out.weight", hidden, width),
        "final_norm.scale": vector("final_layer_norm.weight", hidden),
        "final_norm.bias": vector("final_layer_norm.bias", hidden),
    }
    layer = {
        "attention_norm.scale": vector("self_attn_layer_norm.weight", hidden),
        "attention_norm.bias": vector("self_attn_layer_norm.bias", hidden),
        "mlp_norm.scale": vector("final_layer_norm.weight", hidden),
        "mlp_norm.bias": vector("final_layer_norm.bias", hidden),
        "fc1.kernel": matrix("fc1.weight", hidden, wide, 0),
        "fc1.bias": vector("fc1.bias", wide),
        "fc2.kernel": matrix("fc2.weight", wide, hidden, 1),
        "fc2.bias": vector("fc2.bias", hidden),
    }
    return WeightMap(token_recipes(config) | outer, attention_recipes(config, "out_proj") | layer)


FAMILY = Family(
    name="opt",
    hf_architecture="OPTForCausalLM",
    parse=_parse,
    write=_write,
    make_model=functools.partial(LearnedPositionDecoder, position_offset=_POSITION_OFFSET),
    weight_map=_weight_map,
    tensor_prefix="model.decoder.",
    presets=_PRESETS,
    has_position_table=True,
)
