"""Telling one model from another without reading its weights.

Owns `model_fingerprint`, a short string that a history store keeps to refuse conversations of another
model. It depends on the arithmetic of the config and on where the weights come from, not on dtype,
context length, mesh or directory; a converted checkpoint keeps its source's.
"""

import hashlib
import json
from pathlib import Path

from model_defs.config import MODEL_CONFIG_FILE, ModelConfig, read_saved
from model_defs.loading import RANDOM_PREFIX
from model_defs.safetensors_reader import open_checkpoint

_SAMPLE_BYTES = 64
_NOT_ARITHMETIC = (
    "max_position_embeddings",
    "dtype",
    "bos_token_id",
    "eos_token_ids",
    "initializer_range",
    "initial_norm_scale",
    "sliding_window",  # one that would hide a token is refused
)


def model_fingerprint(config: ModelConfig, source: str | Path, *, seed: int = 0) -> str:
    """E.g. "llama-2x64-91c2a8f0d3b74e15": architecture, layers x hidden size, 64 bits of SHA-256.

    source and seed are those given to `load_model`. Raises CheckpointError when the source is unreadable.
    """
    fields = {key: value for key, value in config.to_json().items() if key not in _NOT_ARITHMETIC}
    text = json.dumps(fields, sort_keys=True) + weights_digest(source, seed=seed)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}-{digest}"


def weights_digest(source: str | Path, *, seed: int = 0) -> str:
    """Where weights come from, as a string.

    Random weights: preset and seed. Converted directory: what it recorded of its source. Safetensors:
    a hash over every tensor's name, dtype, shape, the file it lies in with its size, and its first bytes.
    Two fine-tunings of one model differ if the first bytes of any tensor do: training all of a tensor changes
    them, but one that only trained later rows of a table (those of added tokens) is not told from its base.
    What is hashed stays: histories and converted directories keep the result.
    """
    if str(source).startswith(RANDOM_PREFIX):
        return f"{source}#{seed}"
    root = Path(source)
    if (root / MODEL_CONFIG_FILE).is_file():
        return str(read_saved(root)["weights_digest"])
    entries = open_checkpoint(root)
    sizes = {entry.path: entry.path.stat().st_size for entry in entries.values()}
    digest = hashlib.sha256()
    for name in sorted(entries):
        entry = entries[name]
        place = (name, entry.dtype, entry.shape, entry.path.name, sizes[entry.path], entry.offset_bytes)
        digest.update(repr(place).encode())
        if entry.num_bytes:
            digest.update(entry.read_bytes(min(_SAMPLE_BYTES, entry.num_bytes)).tobytes())
    return digest.hexdigest()
