"""`ModelConfig`: the frozen description of a model.

Owns the meaning of every field, the checks between fields, and the JSON form. `hf_config` reads model
directories, and `registry` holds the named presets. Knows nothing of JAX, devices or weights.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

from model_defs.errors import CheckpointError, UnsupportedModelError

MODEL_CONFIG_FILE = "model_config.json"
"""File of a converted (Orbax) directory that holds `ModelConfig.to_json()` and the other saved values."""

FORMAT_VERSION = 3
"""Version of converted directories that are written. Version 2 has no field for weights in 8 bits."""
_READ_VERSIONS = (2, 3)
_SAVED_KEYS = {
    "format_version": int,
    "config": dict,
    "weights_digest": str,
    "files_bytes": dict,
    "files_crc32": dict,
}

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
DTYPES = ("float32", "bfloat16", "float16")


def _check_kinds(config: Any, prefix: str = "") -> None:
    """Raise UnsupportedModelError for a field of float, bool or str that has another type of value."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Not math.isfinite, which raises OverflowError for an int of 400 digits.
        if field.type is float and not (is_number and abs(value) <= sys.float_info.max):
            raise UnsupportedModelError(f"{prefix}{field.name}={value!r} must be a finite number")
        if field.type is bool and not isinstance(value, bool):
            raise UnsupportedModelError(f"{prefix}{field.name}={value!r} must be true or false")
        if field.type is str and not isinstance(value, str):
            raise UnsupportedModelError(f"{prefix}{field.name}={value!r} must be a string")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields after `theta` apply only to some kinds.

    `factor` stretches positions (linear, llama3, yarn); `original_max_positions` is the context the
    model was trained on before stretching (llama3, yarn). `low_freq_factor` and `high_freq_factor`
    are for llama3, the others for yarn. `attention_factor` multiplies cos and sin (1 for other kinds).
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for values that give no valid frequencies."""
        _check_kinds(self, "rope.")
        original = self.original_max_positions
        if type(original) is not int or original < 0:
            raise UnsupportedModelError(
                f"rope.original_max_positions={original!r} must be an integer of at least 0"
            )
        for field in dataclasses.fields(self):
            if field.type is float and getattr(self, field.name) <= 0:
                raise UnsupportedModelError(
                    f"rope.{field.name}={getattr(self, field.name)!r} must be above 0"
                )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Decoder-only transformer. It is hashable, so that it can be a static argument of a compiled step.

    `architecture` is the name of a row in `registry.FAMILIES`. Features that a family always has (Qwen3's
    norms of queries and keys) are in its module, not here. `activation` is the MLP's. `attention_bias`
    applies to the projections that have a bias in the family: all four, or (Qwen2) queries, keys and values.
    `sliding_window` is the number of tokens that a token sees, itself included; None means all. A model is
    built only with a context that its window covers (`check_window`).
    `word_embed_dim`, `pre_norm`, `final_norm`, `norm_affine` are OPT's: width of the token table (0 means
    `hidden_size`), layer norm before each block instead of after it, the norm after the last layer, and
    whether norms have weights. `dtype` is the checkpoint's dtype; the model may run in another.
    `initializer_range` is the standard deviation of random weights, `initial_norm_scale` the scale of their
    last norm (it widens gaps between logits).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    activation: str = "silu"
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = RopeConfig()
    word_embed_dim: int = 0
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    initializer_range: float = 0.02
    initial_norm_scale: float = 1.0
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for values that no implementation could run."""
        _check_kinds(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "word_embed_dim" else 1
            if field.type is int and (type(value) is not int or value < least):
                limit = "a positive integer" if least else "an integer of at least 0"
                raise UnsupportedModelError(f"{field.name}={value!r} must be {limit}")
        for name in ("bos_token_id", "sliding_window"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise UnsupportedModelError(f"{name}={value!r} must be an integer or null")
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in self.eos_token_ids):
            raise UnsupportedModelError(
                f"eos_token_ids={self.eos_token_ids!r} must be integers from 0 to {self.vocab_size - 1}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UnsupportedModelError(
                f"sliding_window={self.sliding_window} must be a positive integer or null"
            )
        for name, value, allowed in (
            ("activation", self.activation, ACTIVATIONS),
            ("rope.kind", self.rope.kind, ROPE_KINDS),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise UnsupportedModelError(f"{name}={value!r} is not one of {', '.join(allowed)}")

    def with_context(self, max_position_embeddings: int | None = None) -> "ModelConfig":
        """Return this config for a context of `max_position_embeddings` tokens; None leaves it as it is.

        Raises UnsupportedModelError if the sliding window would hide a token of such a context: layers here
        attend to all tokens.
        """
        wanted = max_position_embeddings or self.max_position_embeddings
        config = dataclasses.replace(self, max_position_embeddings=wanted)
        config.check_window()
        return config

    def check_window(self) -> None:
        """Raise UnsupportedModelError if the sliding window would hide a token of the whole context."""
        # Not when a config is made: a checkpoint can be served with a context that its window covers.
        window, context = self.sliding_window, self.max_position_embeddings
        if window is not None and window < context:
            raise UnsupportedModelError(
                f"sliding_window={window} is not supported with max_position_embeddings={context}, since it "
                f"would hide tokens; set max_position_embeddings to at most {window}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies two projections of its input, which is the case for silu only."""
        return self.activation == "silu"

    @property
    def embed_width(self) -> int:
        """Width of the token table."""
        return self.word_embed_dim or self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads back as an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Read the values of `to_json`. An unknown or missing field raises UnsupportedModelError."""
        fields = dict(values)
        try:
            rope = RopeConfig(**fields.pop("rope", {}))
            fields["eos_token_ids"] = tuple(fields.get("eos_token_ids", ()))
            return cls(**fields, rope=rope)
        except TypeError as error:
            raise UnsupportedModelError(f"not a model config of this version: {error}") from error


def read_saved(directory: Path) -> dict[str, Any]:
    """Read the values that `save_parameters` wrote into `directory`, and check the type of every key.

    Raises CheckpointError, which names the file and the missing or wrong key, or the format version.
    """
    path = directory / MODEL_CONFIG_FILE
    values = read_json(path)
    found = values.get("format_version", FORMAT_VERSION)
    if found not in _READ_VERSIONS:
        known = " and ".join(map(str, _READ_VERSIONS))
        raise CheckpointError(f"{path} has format version {found!r}, this code reads {known}")
    for key, kind in _SAVED_KEYS.items():
        if not isinstance(values.get(key), kind):
            state = f"is {values[key]!r:.60}" if key in values else "is missing"
            raise CheckpointError(
                f"{path}: {key!r} {state}, but must be {kind.__name__}; convert the model again"
            )
    return values


def saved_weights_dtype(directory: Path) -> str | None:
    """Return the format in which a converted directory keeps the weights of layers; None is the dtype's.

    Raises CheckpointError as `read_saved` does.
    """
    found = read_saved(directory).get("weights_dtype")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(
            f"{directory / MODEL_CONFIG_FILE}: 'weights_dtype' is {found!r:.60}, but must be str or null; "
            "convert the model again"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; raise CheckpointError if it is missing or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"no {path.name} in {path.parent}; is this a model directory?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values
