"""Model families by name, named presets, and the sizes of a model.

Owns the table of families, and the number of parameters and bytes of a config. It builds only abstract
models, whose arrays have no values.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from model_defs.config import DTYPES, ModelConfig
from model_defs.decoder import Decoder
from model_defs.errors import UnsupportedModelError
from model_defs.families import (
    cohere2,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    granite,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from model_defs.family import Family
from model_defs.layers import Build
from model_defs.sharding import TENSOR_AXIS, AnyMesh, check_divides
from model_defs.weight_formats import weight_format

Model = Decoder
"""Model of any family."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        opt.FAMILY,
        llama.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        mistral.FAMILY,
        olmo2.FAMILY,
        phi3.FAMILY,
        gpt2.FAMILY,
        granite.FAMILY,
        ministral3.FAMILY,
        seed_oss.FAMILY,
        glm4.FAMILY,
        smollm3.FAMILY,
        olmo3.FAMILY,
        cohere2.FAMILY,
        gemma3.FAMILY,
        gemma2.FAMILY,
        qwen3_moe.FAMILY,
        mixtral.FAMILY,
    )
}
"""All families, by name."""

PRESETS: dict[str, ModelConfig] = {
    name: config for family in FAMILIES.values() for name, config in family.presets.items()
}
"""All presets of `random:<preset>`, by name."""


def family(architecture: str) -> Family:
    """Return the family of `architecture`; raise UnsupportedModelError, which lists the known ones."""
    if architecture not in FAMILIES:
        raise UnsupportedModelError(f"architecture={architecture!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the preset `name` with fields replaced, e.g. `preset("opt-13b", num_layers=2)`.

    Fewer layers have the kinds of the first ones.
    Raises UnsupportedModelError for an unknown preset or field.
    """
    if name not in PRESETS:
        raise UnsupportedModelError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    unknown = overrides.keys() - {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown:
        raise UnsupportedModelError(f"preset field {', '.join(sorted(unknown))} is unknown")
    config, num_layers = PRESETS[name], overrides.get("num_layers")
    if num_layers is not None:
        overrides = {"layer_kinds": config.layer_kinds[:num_layers]} | overrides
    return dataclasses.replace(config, **overrides)


def resolve_dtype(dtype: str, config: ModelConfig) -> jnp.dtype:
    """Return the dtype to run in; "auto" is the checkpoint's. Raises UnsupportedModelError if unknown."""
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UnsupportedModelError(f"dtype={dtype!r} must be auto, float32, bfloat16 or float16")
    return jnp.dtype(name)


def abstract_model(
    config: ModelConfig, *, dtype: str, mesh: AnyMesh, weights_dtype: str | None = None
) -> Model:
    """Build the model with a ShapeDtypeStruct (shape, dtype, sharding) instead of each array.

    It suffices to lower and compile a step ahead of time, and loaders fill it. `mesh` may be abstract.
    `weights_dtype` is the format in 8 bits in which layers keep their weights, a key of
    `weight_formats.FORMATS`; None keeps them in `dtype`. Raises ShardingError if the model is not divisible
    by the mesh, and UnsupportedModelError for an unknown format, weights in 8 bits of a mixture of experts,
    or a feature that the family does not have.
    """
    check_divides(config, mesh)
    if weights_dtype is not None:
        weight_format(weights_dtype)
        if config.experts is not None:
            raise UnsupportedModelError(
                f"weights_dtype={weights_dtype!r} must be None for a mixture of experts, whose experts "
                "would keep their dtype; leave it out"
            )
    build = Build(config, resolve_dtype(dtype, config), mesh, weights_dtype)
    return family(config.architecture).make_model(build)


def abstract_parameters(config: ModelConfig, *, dtype: str = "auto") -> list[jax.ShapeDtypeStruct]:
    """Return the shape and dtype of every parameter of the whole model (one device)."""
    mesh = AbstractMesh((1,), (TENSOR_AXIS,))
    return jax.tree.leaves(nnx.state(abstract_model(config, dtype=dtype, mesh=mesh), nnx.Param))


@functools.cache  # listing a large model's parameters takes a quarter of a second
def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in abstract_parameters(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that compute a token: of experts only those that it chooses."""
    return num_parameters(config) - _num_unchosen(config)


@functools.cache
def num_layer_parameters(config: ModelConfig) -> int:
    """Return the number of parameters in the layers that compute a token, also without sampling."""
    mesh = AbstractMesh((1,), (TENSOR_AXIS,))
    layers = abstract_model(config, dtype="auto", mesh=mesh).layers
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(layers, nnx.Param)))
    return total - _num_unchosen(config)


def _num_unchosen(config: ModelConfig) -> int:
    """Return the number of parameters of the experts that a token does not choose, in all layers."""
    if config.experts is None:
        return 0
    num_layers = sum(kind.mlp == "moe" for kind in config.kinds)
    num_others = config.experts.num_experts - config.experts.num_chosen
    return num_layers * num_others * 3 * config.hidden_size * config.experts.width


def parameter_bytes(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    tensor_parallel_size: int = 1,
    weights_dtype: str | None = None,
) -> int:
    """Return the bytes of all parameters on one device of a mesh of `tensor_parallel_size`."""
    mesh = AbstractMesh((tensor_parallel_size,), (TENSOR_AXIS,))
    model = abstract_model(config, dtype=dtype, mesh=mesh, weights_dtype=weights_dtype)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def kv_bytes_per_token(config: ModelConfig, *, dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
    """Return the KV cache bytes of one token on one device, over all layers."""
    per_layer = 2 * config.num_kv_heads * config.head_dim // tensor_parallel_size
    return config.num_layers * per_layer * resolve_dtype(dtype, config).itemsize
