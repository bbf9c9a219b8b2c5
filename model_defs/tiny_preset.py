"""Tiny presets, one per family: small enough for tests, with outputs that depend on the context.

Owns their common sizes. A preset whose name ends in "-tiny" uses the byte tokenizer and its ids.
"""

import dataclasses
from typing import Any

from model_defs.config import ModelConfig

_TINY = ModelConfig(
    architecture="",
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
    initializer_range=0.3,  # with 0.02, a model this narrow would repeat one token
    initial_norm_scale=4.0,  # makes near-ties between the two best tokens rare
)


def tiny_preset(architecture: str, **fields: Any) -> ModelConfig:
    """Return the tiny config of a family, with `fields` replaced."""
    return dataclasses.replace(_TINY, architecture=architecture, **fields)
