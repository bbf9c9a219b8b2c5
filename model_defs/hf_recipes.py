"""How each parameter is made from Hugging Face tensors: names, shapes, fusing and transposing.

Owns the table from our parameter names to theirs. Their linear weights are [out, in], ours [in, out] with
the head dimensions apart; names are given without the prefix ("model." or "model.decoder."). Assembly
happens on the devices, where a transpose costs nothing, so a recipe also says along which axis the tensors
may be split beforehand. Recipes of one config are the same objects for every layer: one program each.
Knows nothing of files. Called by hf_weights.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from model_defs.config import ModelConfig
from model_defs.opt import POSITION_OFFSET

Shape = tuple[int, ...]
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class Recipe(NamedTuple):
    """Tensor names without prefix, the shape of each, and the function that makes one array of them.

    `assemble` None: the one tensor is the parameter. `split_axis` is the axis of the tensors that becomes
    the parameter's "tp" dimension; None: they are needed whole.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    assemble: Callable[..., jax.Array] | None = None
    split_axis: int | None = None


def recipe(parameter_name: str, config: ModelConfig) -> Recipe:
    """How `parameter_name` is made from a checkpoint of `config`."""
    match = _LAYER.fullmatch(parameter_name)
    if match is None:
        return _outer_recipes(config)[parameter_name]
    layer = _llama_layer_recipes if config.architecture == "llama" else _opt_layer_recipes
    found = layer(config)[match[2]]
    return found._replace(names=tuple(f"layers.{match[1]}.{name}" for name in found.names))


def _vector(name: str, size: int) -> Recipe:
    return Recipe((name,), ((size,),))


def _table(name: str, num_rows: int, width: int) -> Recipe:
    return Recipe((name,), ((num_rows, width),))


def _matrix(name: str, in_size: int, out_size: int, split_axis: int | None = None) -> Recipe:
    return Recipe((name,), ((out_size, in_size),), jnp.transpose, split_axis)


@functools.lru_cache(maxsize=4)
def _outer_recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Parameters outside the layers, of both architectures."""
    hidden, width, vocab_size = config.hidden_size, config.embed_width, config.vocab_size
    norm = "norm" if config.architecture == "llama" else "final_layer_norm"
    num_positions = config.max_position_embeddings + POSITION_OFFSET
    return {
        "embed.table": _table("embed_tokens.weight", vocab_size, width),
        "head.table": _table("lm_head.weight", vocab_size, width),
        "position_table": _table("embed_positions.weight", num_positions, hidden),
        "project_in.kernel": _matrix("project_in.weight", width, hidden),
        "project_out.kernel": _matrix("project_out.weight", hidden, width),
        "final_norm.scale": _vector(f"{norm}.weight", hidden),
        "final_norm.bias": _vector(f"{norm}.bias", hidden),
    }


def _attention_recipes(config: ModelConfig, out_name: str) -> dict[str, Recipe]:
    """Fused QKV and output projection. Rows of their weights are ordered (head, dimension)."""
    hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rows = (heads * dim, kv_heads * dim, kv_heads * dim)

    def fuse_kernel(*weights: jax.Array) -> jax.Array:
        parts = [weight.reshape(kv_heads, -1, dim, hidden) for weight in weights]
        # The barrier keeps copy and transpose apart: fused, they are several times slower on a CPU.
        return optimization_barrier(jnp.concatenate(parts, axis=1)).transpose(3, 0, 1, 2)

    def fuse_bias(*biases: jax.Array) -> jax.Array:
        return jnp.concatenate([bias.reshape(kv_heads, -1, dim) for bias in biases], axis=1)

    def split_heads(weight: jax.Array) -> jax.Array:
        return weight.T.reshape(heads, dim, hidden)

    return {
        "qkv.proj.kernel": Recipe(
            tuple(f"{name}.weight" for name in names), tuple((size, hidden) for size in rows), fuse_kernel, 0
        ),
        "qkv.proj.bias": Recipe(
            tuple(f"{name}.bias" for name in names), tuple((size,) for size in rows), fuse_bias, 0
        ),
        "out.kernel": Recipe((f"self_attn.{out_name}.weight",), ((hidden, heads * dim),), split_heads, 1),
        "out.bias": _vector(f"self_attn.{out_name}.bias", hidden),
    }


@functools.lru_cache(maxsize=4)
def _llama_layer_recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Parameters of one Llama layer."""
    hidden, wide = config.hidden_size, config.intermediate_size

    def fuse_kernel(gate: jax.Array, up: jax.Array) -> jax.Array:
        return optimization_barrier(jnp.stack([gate, up])).transpose(2, 0, 1)

    def fuse_bias(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jnp.stack([gate, up])

    return _attention_recipes(config, "o_proj") | {
        "input_norm.scale": _vector("input_layernorm.weight", hidden),
        "mlp_norm.scale": _vector("post_attention_layernorm.weight", hidden),
        "mlp.gate_up.kernel": Recipe(
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"), ((wide, hidden),) * 2, fuse_kernel, 0
        ),
        "mlp.gate_up.bias": Recipe(("mlp.gate_proj.bias", "mlp.up_proj.bias"), ((wide,),) * 2, fuse_bias, 0),
        "mlp.down.kernel": _matrix("mlp.down_proj.weight", wide, hidden, 1),
        "mlp.down.bias": _vector("mlp.down_proj.bias", hidden),
    }


@functools.lru_cache(maxsize=4)
def _opt_layer_recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Parameters of one OPT layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    return _attention_recipes(config, "out_proj") | {
        "attention_norm.scale": _vector("self_attn_layer_norm.weight", hidden),
        "attention_norm.bias": _vector("self_attn_layer_norm.bias", hidden),
        "mlp_norm.scale": _vector("final_layer_norm.weight", hidden),
        "mlp_norm.bias": _vector("final_layer_norm.bias", hidden),
        "fc1.kernel": _matrix("fc1.weight", hidden, wide, 0),
        "fc1.bias": _vector("fc1.bias", wide),
        "fc2.kernel": _matrix("fc2.weight", wide, hidden, 1),
        "fc2.bias": _vector("fc2.bias", hidden),
    }
