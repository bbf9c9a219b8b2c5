"""Architectures by name, named presets, and the sizes of a model.

Owns the table of published shapes (those of the paper's Table 1, two smaller ones for single GPUs, two tiny
ones for tests) and what a config costs in parameters and bytes. Builds abstract models only: no array
gets a value here. Called by weights, by the engine (memory planning) and by scripts.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from model_defs.config import ModelConfig, RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.layers import Build
from model_defs.llama import Llama
from model_defs.opt import OPT
from model_defs.sharding import TENSOR_AXIS, AnyMesh, check_divides

Model = OPT | Llama
ARCHITECTURES: dict[str, type[OPT] | type[Llama]] = {"opt": OPT, "llama": Llama}


def _opt(num_layers: int, hidden_size: int, num_heads: int) -> ModelConfig:
    """A published pre-norm OPT."""
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


_LLAMA2_13B = ModelConfig(
    architecture="llama",
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    intermediate_size=13824,
    vocab_size=32000,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_ids=(2,),
)

_LLAMA_TINY = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=320,
    max_position_embeddings=2048,
    bos_token_id=256,  # ids of a byte tokenizer: beginning, end of text, end of a chat message
    eos_token_ids=(257, 261),
    dtype="float32",
    initializer_range=0.3,  # 0.02 would leave a model this narrow repeating one token
    initial_norm_scale=4.0,  # near-ties between the two best tokens become rare
)

PRESETS: dict[str, ModelConfig] = {
    "opt-125m": _opt(12, 768, 12),
    "opt-13b": _opt(40, 5120, 40),
    "opt-66b": _opt(64, 9216, 72),
    "llama2-13b": _LLAMA2_13B,
    "llama2-13b-gqa10": dataclasses.replace(_LLAMA2_13B, num_kv_heads=10),
    "llama2-70b": dataclasses.replace(
        _LLAMA2_13B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, intermediate_size=28672
    ),
    "llama3-8b": dataclasses.replace(
        _LLAMA2_13B,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
        bos_token_id=128000,
        eos_token_ids=(128001,),
        rope=RopeConfig(theta=500000.0),
    ),
    "opt-tiny": dataclasses.replace(
        _LLAMA_TINY,
        architecture="opt",
        num_kv_heads=4,
        tie_word_embeddings=True,
        activation="relu",
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama-tiny": _LLAMA_TINY,
}
"""Every preset that `random:<preset>` takes."""


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The preset `name` with fields replaced, e.g. `preset("opt-13b", num_layers=2)`.

    Raises UnsupportedModelError for an unknown preset or field.
    """
    if name not in PRESETS:
        raise UnsupportedModelError(f"preset {name!r} is unknown; one of {', '.join(PRESETS)} is meant")
    unknown = overrides.keys() - {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown:
        raise UnsupportedModelError(f"preset field {', '.join(sorted(unknown))} is unknown")
    return dataclasses.replace(PRESETS[name], **overrides)


def resolve_dtype(dtype: str, config: ModelConfig) -> jnp.dtype:
    """The dtype to run in; "auto" is the checkpoint's. Raises UnsupportedModelError for an unknown one."""
    name = config.dtype if dtype == "auto" else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(f"dtype={dtype!r} must be auto, float32, bfloat16 or float16")
    return jnp.dtype(name)


def abstract_model(config: ModelConfig, *, dtype: str, mesh: AnyMesh) -> Model:
    """The model with a ShapeDtypeStruct (shape, dtype, sharding) in place of each array.

    Enough to lower and compile a step ahead of time, and what loaders fill. `mesh` may be abstract.
    Raises ShardingError when the model does not divide by it.
    """
    check_divides(config, mesh)
    return ARCHITECTURES[config.architecture](Build(config, resolve_dtype(dtype, config), mesh))


def abstract_parameters(config: ModelConfig, *, dtype: str = "auto") -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of the whole model (one device)."""
    mesh = AbstractMesh((1,), (TENSOR_AXIS,))
    return jax.tree.leaves(nnx.state(abstract_model(config, dtype=dtype, mesh=mesh), nnx.Param))


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in abstract_parameters(config))


def parameter_bytes(config: ModelConfig, *, dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
    """Bytes of all parameters on the fullest device of a mesh of `tensor_parallel_size`."""
    mesh = AbstractMesh((tensor_parallel_size,), (TENSOR_AXIS,))
    leaves = jax.tree.leaves(nnx.state(abstract_model(config, dtype=dtype, mesh=mesh), nnx.Param))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def kv_bytes_per_token(config: ModelConfig, *, dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
    """Bytes of keys and values one token takes on one device, over all layers."""
    per_layer = 2 * config.num_kv_heads * config.head_dim // tensor_parallel_size
    return config.num_layers * per_layer * resolve_dtype(dtype, config).itemsize
