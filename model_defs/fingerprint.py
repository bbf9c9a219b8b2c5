"""Fingerprint of a model, computed without reading all weights.

Owns `model_fingerprint`, a short string that a history store records to reject conversations of another
model. It depends on the arithmetic of the config, on the source of the weights and on the format in 8 bits
that they are kept in, not on dtype, context length, mesh or directory. A converted checkpoint keeps the
fingerprint of its source.
"""

import hashlib
import json
from pathlib import Path

from model_defs.config import MODEL_CONFIG_FILE, ModelConfig, read_saved
from model_defs.loading import RANDOM_PREFIX, source_weights_dtype
from model_defs.safetensors_reader import open_checkpoint

_SAMPLE_BYTES = 64
_NOT_ARITHMETIC = (
    "max_position_embeddings",
    "dtype",
    "bos_token_id",
    "eos_token_ids",
    "initializer_range",
    "initial_norm_scale",
    "sliding_window",  # a window that would hide a token is rejected
)


def model_fingerprint(
    config: ModelConfig, source: str | Path, *, seed: int = 0, weights_dtype: str | None = None
) -> str:
    """Return e.g. "llama-2x64-91c2a8f0d3b74e15": architecture, layers x hidden size, 64 bits of SHA-256.

    source, seed and weights_dtype are those given to `load_model`. Raises CheckpointError if the source is
    unreadable, and UnsupportedModelError if it cannot have its weights in that format.
    """
    fields = {key: value for key, value in config.to_json().items() if key not in _NOT_ARITHMETIC}
    # Left out for weights in the model's dtype, whose fingerprints older histories have.
    if (kept := source_weights_dtype(source, weights_dtype)) is not None:
        fields["weights_dtype"] = kept
    text = json.dumps(fields, sort_keys=True) + weights_digest(source, seed=seed)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}-{digest}"


def weights_digest(source: str | Path, *, seed: int = 0) -> str:
    """Return a string that identifies the source of weights.

    Random weights: preset and seed. Converted directory: the digest recorded from its source. Safetensors:
    a hash over every tensor's name, dtype, shape, its file and the file's size, and its first bytes.
    Two fine-tuned versions of a model differ if the first bytes of any tensor differ. Training a whole tensor
    changes them. A version that only trained later rows of a table (added tokens) equals its base model.
    The hashed data must not change, since histories and converted directories store the result.
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
