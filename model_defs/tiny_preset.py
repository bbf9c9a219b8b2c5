"""The shape of the tiny presets, one a family: small enough for tests, and not blind to their context.

Owns what they share. A name that ends in "-tiny" has the byte tokenizer, whose ids these are.
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
    initializer_range=0.3,  # 0.02 would leave a model this narrow repeating one token
    initial_norm_scale=4.0,  # near-ties between the two best tokens become rare
)


def tiny_preset(architecture: str, **fields: Any) -> ModelConfig:
    """The tiny config of a family, with `fields` replaced."""
    return dataclasses.replace(_TINY, architecture=architecture, **fields)
