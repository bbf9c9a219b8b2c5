"""Export of a trained model as an ordinary Hugging Face directory.

Owns: config.json, generation_config.json and model.safetensors of a Llama.
Does not know: how it was trained, or its tokenizer.
Called by `programs.train_chat_model`.

Names and layouts come from `model_defs.hf_recipes`. A recipe only moves values (it fuses and transposes), so
its transpose as a linear map is its inverse, and no second table is needed that could disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import safetensors.numpy

from model_defs import ModelConfig
from model_defs.hf_recipes import recipe
from model_defs.registry import resolve_dtype
from pensieve_lab.chat_training.step import Parameters

_PREFIX: Final = "model."


def export_model(directory: Path, config: ModelConfig, parameters: Parameters) -> int:
    """Write the model in the dtype of `config`; return the bytes of its weights.

    Args:
      directory: must exist; files of the same names are replaced.
      config: of a Llama with tied embeddings, default rotary positions and no biases.
      parameters: float32 arrays by name.
    """
    dtype = resolve_dtype("auto", config)
    tensors: dict[str, np.ndarray] = {}
    for name, value in parameters.items():
        made_by = recipe(name, config)
        parts = [value]
        if made_by.assemble is not None:
            inputs = [jax.ShapeDtypeStruct(shape, value.dtype) for shape in made_by.shapes]
            parts = jax.linear_transpose(made_by.assemble, *inputs)(value)
        for tensor_name, part in zip(made_by.names, parts, strict=True):
            tensors[_PREFIX + tensor_name] = np.asarray(part.astype(dtype))
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    _write_json(directory / "config.json", _hf_config(config))
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    _write_json(directory / "generation_config.json", special | {"do_sample": False})
    return path.stat().st_size


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return config.json in the spelling of transformers 4, which version 5 reads too."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0].theta,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": config.dtype,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
