"""`ModelConfig`: the frozen description of a model.

Owns the meaning of every field, the checks between fields, and the JSON form. `hf_config` reads model
directories, and `registry` holds the named presets. Knows nothing of JAX, devices or weights.
"""

import dataclasses
import functools
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

MAX_WINDOWS = 2
"""The most distinct windows of a model's layers, no window included: a step has work lists for each."""

MAX_LAYERS = 10_000
"""The most layers of a model, so that a wrong number is refused before lists of that length are made."""

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
MLP_KINDS = ("dense", "moe")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "geglu_tanh")
_GATES = {"silu": "silu", "geglu_tanh": "gelu_tanh"}
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


def _check_positive(name: str, value: Any) -> None:
    """Raise UnsupportedModelError for a value that is neither None nor a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= sys.float_info.max):
        raise UnsupportedModelError(f"{name}={value!r} must be a finite number above 0, or null")


def check_num_layers(name: str, value: Any) -> None:
    """Raise UnsupportedModelError for a number of layers above `MAX_LAYERS`."""
    if type(value) is int and value > MAX_LAYERS:
        raise UnsupportedModelError(f"{name}={value!r:.40} must be at most {MAX_LAYERS}")


def _positive_numbers(name: str, values: Any) -> tuple[float, ...]:
    """Return a list of JSON, or a tuple, as a tuple; raise UnsupportedModelError for other values."""
    are_numbers = isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
        for value in values
    )
    if not are_numbers:
        raise UnsupportedModelError(f"{name}={values!r:.80} must be a list of finite numbers above 0")
    return tuple(map(float, values))


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields after `theta` apply only to some kinds.

    `factor` stretches positions (linear, llama3, yarn); `original_max_positions` is the context the
    model was trained on before stretching (llama3, yarn, longrope). `low_freq_factor` and `high_freq_factor`
    are for llama3, those from `beta_fast` to `truncate` for yarn. `attention_factor` multiplies cos and sin
    (yarn, longrope; 1 for other kinds). `rotary_fraction` is the part of a head, from its first element, that
    is rotated (every kind). Longrope divides each frequency by a factor: by one of `short_factors` if the
    context is at most `original_max_positions`, or else of `long_factors`. The context is the served one
    (`in_context`), not that of a sequence. With `query_growth` b, queries at position p are multiplied by
    1 + b * log(1 + floor(p / original_max_positions)).
    """

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    rotary_fraction: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_growth: float | None = None

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for values that give no valid frequencies."""
        _check_kinds(self, "rope.")
        if self.kind not in ROPE_KINDS:
            raise UnsupportedModelError(f"rope.kind={self.kind!r} is not one of {', '.join(ROPE_KINDS)}")
        for name in ("short_factors", "long_factors"):
            object.__setattr__(self, name, _positive_numbers(f"rope.{name}", getattr(self, name)))
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
        _check_positive("rope.query_growth", self.query_growth)
        if self.query_growth and not original:
            raise UnsupportedModelError("rope.original_max_positions=0 must be above 0 with a query_growth")
        if self.rotary_fraction > 1:
            raise UnsupportedModelError(f"rope.rotary_fraction={self.rotary_fraction} must be at most 1")

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of elements of a head that are rotated."""
        return int(head_dim * self.rotary_fraction)

    def in_context(self, max_position_embeddings: int) -> "RopeConfig":
        """Return this embedding with the factors of longrope that a context has, and no others."""
        if self.kind != "longrope":
            return self
        if max_position_embeddings <= self.original_max_positions:
            return dataclasses.replace(self, long_factors=())
        return dataclasses.replace(self, short_factors=())


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What one layer does differently from others of the same model; the default is a plain layer.

    Attributes:
      window: tokens that a token sees, itself included; None means all before it.
      rope: index into `ModelConfig.ropes`; None means that queries and keys are not rotated.
      mlp: "dense", or "moe" for a mixture of experts.
    """

    window: int | None = None
    rope: int | None = 0
    mlp: Literal["dense", "moe"] = "dense"

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for a value out of its range."""
        for name, least in (("window", 1), ("rope", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                limit = "a positive integer" if least else "an integer of at least 0"
                raise UnsupportedModelError(f"layer_kinds: {name}={value!r} must be {limit}, or null")
        if self.mlp not in MLP_KINDS:
            raise UnsupportedModelError(f"layer_kinds: mlp={self.mlp!r} is not one of {', '.join(MLP_KINDS)}")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts in the layers whose kind says so.

    Attributes:
      num_experts: experts of a layer.
      num_chosen: experts that compute a token.
      width: intermediate size of each expert.
      normalized: whether the factors of a token's experts add up to 1.
    """

    num_experts: int
    num_chosen: int
    width: int
    normalized: bool = True

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for a value out of its range."""
        _check_kinds(self, "experts.")
        for name in ("num_experts", "num_chosen", "width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UnsupportedModelError(f"experts.{name}={value!r} must be a positive integer")
        if self.num_chosen > self.num_experts:
            raise UnsupportedModelError(
                f"experts.num_chosen={self.num_chosen} must be at most num_experts={self.num_experts}"
            )

    def num_read(self, num_tokens: float) -> float:
        """Return how many experts `num_tokens` tokens choose on average, if all are equally likely."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)


def _distinct_windows(kinds: tuple[LayerKind, ...]) -> tuple[int | None, ...]:
    return tuple(sorted({kind.window for kind in kinds}, key=lambda window: window or 0))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Decoder-only transformer. It is hashable, so that it can be a static argument of a compiled step.

    `architecture` is the name of a row in `registry.FAMILIES`. Features that a family always has (Qwen3's
    norms of queries and keys) are in its module, not here. `activation` is the MLP's; "silu" and "geglu_tanh"
    (GELU in its tanh form) are those of a gated one. `attention_bias` applies to the projections that have a
    bias in the family: all four, or (Qwen2) queries, keys and values.
    `ropes` are the rotary embeddings that layers refer to. `layer_kinds` has an entry for each layer, or none
    if all are plain: they see all tokens, rotate by the first of `ropes` and have a dense MLP. `kinds` has
    them as served. `attention_scale` is the factor on scores; None means head_dim**-0.5. With
    `attention_softcap`, a scaled score s becomes cap * tanh(s / cap). `has_sinks` adds a logit to the softmax
    of each head, without a value. `logit_scale` is a factor on logits. With `logit_softcap`, a scaled logit l
    becomes cap * tanh(l / cap). Rows of the token table are multiplied by `embedding_scale`. `experts`
    describes the layers of the kind "moe".
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
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    word_embed_dim: int = 0
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    initializer_range: float = 0.02
    initial_norm_scale: float = 1.0
    layer_kinds: tuple[LayerKind, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    has_sinks: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for values that no implementation could run."""
        _check_kinds(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "word_embed_dim" else 1
            if field.type is int and (type(value) is not int or value < least):
                limit = "a positive integer" if least else "an integer of at least 0"
                raise UnsupportedModelError(f"{field.name}={value!r} must be {limit}")
        check_num_layers("num_layers", self.num_layers)
        if self.bos_token_id is not None and type(self.bos_token_id) is not int:
            raise UnsupportedModelError(f"bos_token_id={self.bos_token_id!r} must be an integer or null")
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in self.eos_token_ids):
            raise UnsupportedModelError(
                f"eos_token_ids={self.eos_token_ids!r} must be integers from 0 to {self.vocab_size - 1}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        for name, value, allowed in (
            ("activation", self.activation, ACTIVATIONS),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise UnsupportedModelError(f"{name}={value!r} is not one of {', '.join(allowed)}")
        positive = ("attention_scale", "attention_softcap", "logit_scale", "logit_softcap", "embedding_scale")
        for name in positive:
            _check_positive(name, getattr(self, name))
        self._check_layer_kinds()
        if self.experts is None and any(kind.mlp == "moe" for kind in self.layer_kinds):
            raise UnsupportedModelError(
                "experts=None, but some layer_kinds have mlp='moe'; describe the experts"
            )

    def _check_layer_kinds(self) -> None:
        """Raise UnsupportedModelError unless the kinds fit the model; drop them if all are plain."""
        kinds = self.layer_kinds
        if not self.ropes:
            raise UnsupportedModelError("ropes=() must have at least one entry")
        if not kinds:
            return
        if len(kinds) != self.num_layers:
            raise UnsupportedModelError(
                f"layer_kinds has {len(kinds)} entries; it must have num_layers={self.num_layers}, or none"
            )
        highest = max((kind.rope for kind in kinds if kind.rope is not None), default=0)
        if highest >= len(self.ropes):
            raise UnsupportedModelError(
                f"layer_kinds: rope={highest} must be below {len(self.ropes)}, the number of ropes"
            )
        if len(self.windows) > MAX_WINDOWS:
            raise UnsupportedModelError(
                f"layer_kinds: windows {list(self.windows)} of a context of {self.max_position_embeddings} "
                f"must be at most {MAX_WINDOWS} different ones, None (no window) included"
            )
        if set(kinds) == {LayerKind()}:  # one spelling of it, so that equal models have equal configs
            object.__setattr__(self, "layer_kinds", ())

    def with_context(self, max_position_embeddings: int | None = None) -> "ModelConfig":
        """Return this config for a context of `max_position_embeddings` tokens; None leaves it as it is."""
        if max_position_embeddings is None:
            return self
        return dataclasses.replace(self, max_position_embeddings=max_position_embeddings)

    def with_layers(self, layers: range) -> "ModelConfig":
        """Return the config of a model of these layers alone, numbered from 0."""
        kinds = self.layer_kinds[layers.start : layers.stop]
        return dataclasses.replace(self, num_layers=len(layers), layer_kinds=kinds)

    @functools.cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer as served, without windows that cover the whole context."""
        context = self.max_position_embeddings
        return tuple(
            dataclasses.replace(kind, window=None) if (kind.window or 0) >= context else kind
            for kind in self.layer_kinds or (LayerKind(),) * self.num_layers
        )

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows of the layers as served: None first if a layer has none, then ascending."""
        return _distinct_windows(self.kinds)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def gate(self) -> str | None:
        """Function of the gate of a gated MLP, "silu" or "gelu_tanh"; None for a plain MLP."""
        return _GATES.get(self.activation)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies two projections of its input, one of them after a function."""
        return self.gate is not None

    @property
    def embed_width(self) -> int:
        """Width of the token table."""
        return self.word_embed_dim or self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads back as an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Read the values of `to_json`. An unknown or missing field raises UnsupportedModelError.

        Older values have one `rope`, and a `sliding_window` of all layers or none.
        """
        fields = dict(values)
        try:
            ropes = fields.pop("ropes") if "ropes" in fields else [fields.pop("rope", {})]
            kinds = [LayerKind(**kind) for kind in fields.pop("layer_kinds", ())]
            if (window := fields.pop("sliding_window", None)) is not None:
                check_num_layers("num_layers", fields.get("num_layers"))
                kinds = [LayerKind(window=window)] * fields.get("num_layers", 0)
            fields["eos_token_ids"] = tuple(fields.get("eos_token_ids", ()))
            ropes = tuple(RopeConfig(**rope) for rope in ropes)
            if fields.get("experts") is not None:
                fields["experts"] = ExpertsConfig(**fields["experts"])
            return cls(**fields, ropes=ropes, layer_kinds=tuple(kinds))
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
