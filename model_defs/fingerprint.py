"""Fingerprint of a model, computed without reading all weights.

Owns `model_fingerprint`, a short string that a history store records to reject conversations of another
model. It depends on the arithmetic of the config, on the source of the weights and on the format in 8 bits
that they are kept in. It does not depend on dtype, mesh or directory, nor on the context length unless that
chooses longrope's factors or is within a window. A converted checkpoint keeps the fingerprint of its source.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from model_defs.config import MODEL_CONFIG_FILE, ExpertsConfig, LayerKind, ModelConfig, RopeConfig, read_saved
from model_defs.loading import RANDOM_PREFIX, source_weights_dtype
from model_defs.quantized import read_format
from model_defs.safetensors_reader import open_checkpoint

_SAMPLE_BYTES = 64
_NOT_ARITHMETIC = (
    "max_position_embeddings",
    "dtype",
    "bos_token_id",
    "eos_token_ids",
    "initializer_range",
    "initial_norm_scale",
)
# Fields that always enter the fingerprint. Later ones enter where they differ from their default, so that a
# model without the feature keeps its fingerprint.
_FIRST_FIELDS = {
    ModelConfig: (
        "architecture",
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "tie_word_embeddings",
        "activation",
        "norm_eps",
        "attention_bias",
        "mlp_bias",
        "word_embed_dim",
        "pre_norm",
        "final_norm",
        "norm_affine",
    ),
    RopeConfig: (
        "kind",
        "theta",
        "factor",
        "original_max_positions",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
    LayerKind: (),
    ExpertsConfig: (),
}


def model_fingerprint(
    config: ModelConfig, source: str | Path, *, seed: int = 0, weights_dtype: str | None = None
) -> str:
    """Return e.g. "llama-2x64-91c2a8f0d3b74e15": architecture, layers x hidden size, 64 bits of SHA-256.

    source, seed and weights_dtype are those given to `load_model`. Raises CheckpointError if the source is
    unreadable, and UnsupportedModelError if it cannot have its weights in that format.
    """
    fields = _arithmetic(config)
    # Left out for weights in the model's dtype, whose fingerprints older histories have.
    if (kept := source_weights_dtype(source, weights_dtype)) is not None:
        fields["weights_dtype"] = kept
    text = json.dumps(fields, sort_keys=True) + weights_digest(source, seed=seed)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}-{digest}"


def _arithmetic(config: ModelConfig) -> dict[str, Any]:
    """Return the JSON values of all that the model's arithmetic depends on."""
    values: dict[str, Any] = _hashed(config)
    served = [rope.in_context(config.max_position_embeddings) for rope in config.ropes]
    first, *others = map(_hashed, served)
    values.pop("ropes", None)
    values.pop("layer_kinds", None)
    if set(config.kinds) != {LayerKind()}:  # windows that cover the context hide nothing
        values["layer_kinds"] = _hashed(config.kinds)
    return values | {"rope": first} | ({"other_ropes": others} if others else {})


def _hashed(value: Any) -> Any:
    """Return the JSON value of a configuration, or of a part of it, that a fingerprint hashes."""
    if isinstance(value, tuple):
        return [_hashed(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    first = _FIRST_FIELDS[type(value)]
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return {
        name: _hashed(found)
        for name, found in values.items()
        if name in first or (name not in _NOT_ARITHMETIC and found != defaults[name])
    }


def weights_digest(source: str | Path, *, seed: int = 0) -> str:
    """Return a string that identifies the source of weights.

    Random weights: preset and seed. Converted directory: the digest recorded from its source. Safetensors:
    a hash over every tensor's name, dtype, shape, its file and the file's size, and its first bytes.
    Two fine-tuned versions of a model differ if the first bytes of any tensor differ. Training a whole tensor
    changes them. A version that only trained later rows of a table (added tokens) equals its base model.
    The hashed data must not change, since histories and converted directories store the result.
    For quantized tensors, which are hashed as they are stored, the format and its options follow the hash. So
    equal codes in another form, and the same model unquantized, are other models.
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
    quantized = read_format(root)
    return digest.hexdigest() + ("" if quantized is None else f":{quantized.digest()}")
