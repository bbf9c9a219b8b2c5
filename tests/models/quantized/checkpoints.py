"""Tiny quantized checkpoints of each format, and the plain ones with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh
from safetensors.numpy import save_file

from model_defs import ModelConfig, abstract_model, preset
from model_defs.hf_config import hf_config
from model_defs.hf_recipes import recipe
from model_defs.parameters import named_parameters
from model_defs.registry import family
from model_defs.sharding import TENSOR_AXIS
from tests.models.quantized.encoders import FORMATS

Tensors = dict[str, np.ndarray]
CONFIGS = {
    "llama": preset("llama-tiny", initial_norm_scale=1.0, dtype="bfloat16"),
    "qwen3": preset("qwen3-tiny", initial_norm_scale=1.0, dtype="bfloat16"),
    "phi3": preset("phi3-tiny", initial_norm_scale=1.0, dtype="bfloat16"),  # has tensors of several in one
    "qwen2": preset("qwen2-tiny", initial_norm_scale=1.0, dtype="float16"),  # has biases
}
_TABLES = ("embed_tokens", "lm_head")


def write(directory: Path, config: dict[str, Any], tensors: Tensors, num_files: int = 1) -> Path:
    """Write a directory of config.json and safetensors; several files have an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if num_files == 1:
        save_file(whole, directory / "model.safetensors")
        return directory
    names, weight_map = sorted(whole), {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        save_file({name: whole[name] for name in names[index::num_files]}, directory / file)
        weight_map |= dict.fromkeys(names[index::num_files], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a plain checkpoint, by its name without prefix."""
    model = abstract_model(config, dtype="auto", mesh=AbstractMesh((1,), (TENSOR_AXIS,)))
    recipes = [recipe(name, config) for name, _ in named_parameters(model)]
    return {name: shape for one in recipes for name, shape in zip(one.names, one.shapes, strict=True)}


def tensors_of(
    config: ModelConfig, name: str, seed: int = 1, plain: Iterable[str] = _TABLES
) -> tuple[Tensors, Tensors]:
    """Return the tensors of a checkpoint in the format `name`, and those of its plain twin.

    Norms, biases and tensors with a name in `plain` are not quantized. Weights of layers have a deviation of
    about 0.2. The twin's are rounded once, to the dtype of the config.
    """
    rng, dtype = np.random.default_rng(seed), np.dtype(getattr(ml_dtypes, config.dtype, config.dtype))
    prefix = family(config.architecture).tensor_prefix
    stored: Tensors = {}
    twin: Tensors = {}
    for short, shape in tensor_shapes(config).items():
        full = short if short.startswith("lm_head.") else prefix + short
        if len(shape) == 2 and not any(one in short for one in plain):
            tensors, weight = FORMATS[name].encode(rng, (shape[0], shape[1]))
            layer = full.removesuffix("weight")
            stored |= {layer + part: value for part, value in tensors.items()}
            twin[full] = weight.astype(dtype)
        else:
            scale = 1.0 if len(shape) == 1 and short.endswith("weight") else 0.3
            stored[full] = twin[full] = (scale * rng.normal(size=shape)).astype(dtype)
    return stored, twin


def checkpoints(
    root: Path, name: str, config: ModelConfig, *, num_files: int = 1, **options: Any
) -> tuple[Path, Path]:
    """Write a checkpoint in the format `name` and its plain twin; return both directories."""
    stored, twin = tensors_of(config, name, **options)
    values = hf_config(config)
    quantized = values | {"quantization_config": FORMATS[name].config}
    return (
        write(root / "quantized", quantized, stored, num_files),
        write(root / "plain", values, twin),
    )


def parameters_of(model: Any) -> dict[str, np.ndarray]:
    """Return every parameter of a model by its name."""
    return {name: np.asarray(jax.device_get(one.get_value())) for name, one in named_parameters(model)}
