"""The directory of a scripted model: a tiny Llama, a tokenizer with tool marks, and a chat template.

Owns: its files.
Does not know: scripts, or how an engine uses them.

The vocabulary is that of the chat model in the package, with the marks of the Hermes and Qwen families. The
weights are random, because the script chooses the tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import AddedToken

from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model
from pensieve_lab.scripted.script import MESSAGE_BEGIN, MESSAGE_END, load_script

SCRIPT_FILE: Final = "script.toml"
TEMPLATE_FILE: Final = "chat_template.jinja"
_MAX_TOKENS: Final = 32768
_SPECIAL: Final = ("<|endoftext|>", MESSAGE_BEGIN, MESSAGE_END)
_MARKS: Final = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE = 64, 2, 1, 32, 64
_SCALE: Final = 0.02


def make_model(directory: Path, script: Path) -> None:
    """Write the model and a copy of `script` to an existing directory; raises ConfigError for the script."""
    load_script(script)
    shutil.copyfile(script, directory / SCRIPT_FILE)
    make_tool_model(directory)


def make_tool_model(directory: Path) -> None:
    """Write the model alone to an existing directory; without a script, its replies are random."""
    shutil.copyfile(Path(__file__).with_name(TEMPLATE_FILE), directory / TEMPLATE_FILE)
    backend = tokenizers.Tokenizer.from_file(str(Path(resolve_model(DEFAULT_MODEL)) / "tokenizer.json"))
    backend.add_special_tokens(list(_SPECIAL))
    backend.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in _MARKS])
    backend.save(str(directory / "tokenizer.json"))
    vocab_size = backend.get_vocab_size(with_added_tokens=True)
    end_id = backend.token_to_id(MESSAGE_END)
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": MESSAGE_END,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _MAX_TOKENS,
        },
    )
    _write(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": _HIDDEN,
            "intermediate_size": _INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "max_position_embeddings": _MAX_TOKENS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": [end_id],
            "torch_dtype": "float32",
        },
    )
    safetensors.numpy.save_file(
        _weights(vocab_size), directory / "model.safetensors", metadata={"format": "pt"}
    )


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    """Return the tensors of a Llama with tied embeddings, by their names in a checkpoint."""
    random = np.random.default_rng(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocab_size, _HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, _HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{layer}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
    }
    norms = (
        f"{layer}.input_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight",
        "model.norm.weight",
    )
    drawn = {
        name: (random.standard_normal(shape) * _SCALE).astype(np.float32) for name, shape in shapes.items()
    }
    return drawn | {name: np.ones(_HIDDEN, np.float32) for name in norms}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
