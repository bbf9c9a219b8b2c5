"""GPT-2: learned positions, layer norms before the blocks, and biases, from transposed and fused tensors.

Owns the family's config.json, weight map and presets. A checkpoint's linear weights are [in, out], and
queries, keys and values are one tensor. Old files carry the causal mask along, which is skipped. GPT-2's
tokenizers have no chat template.
"""

import functools
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.hf_options import boolean, choice, common_fields, integer, number
from model_defs.learned_positions import LearnedPositionDecoder
from model_defs.tensor_recipes import (
    WeightMap,
    attention_recipes,
    from_one_tensor,
    table,
    transposed,
    untransposed,
    vector,
)
from model_defs.tiny_preset import tiny_preset

_OPTIONS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_MAX_POSITIONS = 1024
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_WRITTEN_ACTIVATIONS = {"gelu_tanh": "gelu_new"}  # names in config.json that differ from ours
_REFUSED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def _published(num_layers: int, hidden_size: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="gpt2",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=4 * hidden_size,
        vocab_size=50257,
        max_position_embeddings=_MAX_POSITIONS,
        bos_token_id=50256,
        eos_token_ids=(50256,),
        tie_word_embeddings=True,
        dtype="float32",
        activation="gelu_tanh",
        attention_bias=True,
        mlp_bias=True,
    )


_PRESETS = {
    "gpt2": _published(12, 768, 12),
    "gpt2-large": _published(36, 1280, 20),
    "gpt2-tiny": tiny_preset(
        "gpt2",
        hidden_size=128,
        num_kv_heads=4,
        tie_word_embeddings=True,
        activation="gelu_tanh",
        attention_bias=True,
        mlp_bias=True,
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    for name, supported in _REFUSED.items():
        if boolean(values, name, supported) != supported:
            raise UnsupportedModelError(f"{name}={values[name]!r} is not supported; {supported} is")
    defaults = {"n_positions": _MAX_POSITIONS}
    read = {other: _read_integer(values, name, other, defaults.get(name)) for other, name in _OPTIONS.items()}
    common = common_fields(values | read, generation, bos=50256, eos=50256, max_positions=_MAX_POSITIONS)
    hidden_size, num_heads = common["hidden_size"], common["num_heads"]
    if hidden_size % num_heads:
        raise UnsupportedModelError(f"n_embd={hidden_size} is not a multiple of n_head={num_heads}")
    return ModelConfig(
        architecture="gpt2",
        **common,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=integer(values, "n_inner", 4 * hidden_size),
        tie_word_embeddings=boolean(values, "tie_word_embeddings", True),
        activation=choice(values, "activation_function", "gelu_new", _ACTIVATIONS),
        norm_eps=number(values, "layer_norm_epsilon", 1e-5),
        attention_bias=True,
        mlp_bias=True,
        initializer_range=number(values, "initializer_range", 0.02),
    )


def _read_integer(values: dict[str, Any], name: str, other: str, default: int | None) -> int:
    """Read an option with two names, which must not have different values."""
    if values.get(other) is None:
        return integer(values, name, default)
    found = integer(values, other)
    if integer(values, name, found) != found:
        raise UnsupportedModelError(
            f"config.json: {name}={values[name]} differs from {other}={found}, another name of the same "
            f"option; remove one"
        )
    return found


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position_embeddings,
        "n_inner": config.intermediate_size,
        "activation_function": _WRITTEN_ACTIVATIONS.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_eps,
    }


def _weight_map(config: ModelConfig) -> WeightMap:
    hidden, wide = config.hidden_size, config.intermediate_size
    shared = attention_recipes(config, "out_proj")
    outer = {
        "embed.table": table("wte.weight", config.vocab_size, hidden),
        "head.table": table("lm_head.weight", config.vocab_size, hidden),
        "position_table": table("wpe.weight", config.max_position_embeddings, hidden),
        "final_norm.scale": vector("ln_f.weight", hidden),
        "final_norm.bias": vector("ln_f.bias", hidden),
    }
    layer = {
        "attention_norm.scale": vector("ln_1.weight", hidden),
        "attention_norm.bias": vector("ln_1.bias", hidden),
        "qkv.proj.kernel": from_one_tensor(transposed(shared["qkv.proj.kernel"]), "attn.c_attn.weight"),
        "qkv.proj.bias": from_one_tensor(shared["qkv.proj.bias"], "attn.c_attn.bias"),
        "out.kernel": transposed(shared["out.kernel"])._replace(names=("attn.c_proj.weight",)),
        "out.bias": vector("attn.c_proj.bias", hidden),
        "mlp_norm.scale": vector("ln_2.weight", hidden),
        "mlp_norm.bias": vector("ln_2.bias", hidden),
        "fc1.kernel": untransposed("mlp.c_fc.weight", hidden, wide),
        "fc1.bias": vector("mlp.c_fc.bias", wide),
        "fc2.kernel": untransposed("mlp.c_proj.weight", wide, hidden),
        "fc2.bias": vector("mlp.c_proj.bias", hidden),
    }
    return WeightMap(outer, layer)


FAMILY = Family(
    name="gpt2",
    hf_architecture="GPT2LMHeadModel",
    parse=_parse,
    write=_write,
    make_model=functools.partial(LearnedPositionDecoder, position_offset=0),
    weight_map=_weight_map,
    tensor_prefix="transformer.",
    layer_prefix="h.",
    constants=(".attn.bias", ".attn.masked_bias"),
    presets=_PRESETS,
    has_position_table=True,
)
