"""Model directories -> ModelConfig: config.json in the spellings of transformers 4 and 5, or our own file.

Owns which option is understood, which default a missing one has, and which are refused by name: an
option that changes the arithmetic is never ignored. Knows nothing of weights. Called by loading and
by whoever wants to know a model without loading it.
"""

import math
from pathlib import Path
from typing import Any

from model_defs.config import DTYPES, MODEL_CONFIG_FILE, ModelConfig, RopeConfig, read_json, read_saved
from model_defs.errors import UnsupportedModelError

_ARCHITECTURES = {"OPTForCausalLM": "opt", "LlamaForCausalLM": "llama"}
_OPT_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def load_config(directory: str | Path) -> ModelConfig:
    """Read the config of a converted (Orbax) or Hugging Face directory.

    Raises CheckpointError when there is none, it is not JSON or lacks a key, UnsupportedModelError when the
    architecture or an option of it is not implemented.
    """
    root = Path(directory)
    if (root / MODEL_CONFIG_FILE).is_file():
        return ModelConfig.from_json(read_saved(root)["config"])
    generation = root / "generation_config.json"
    return parse_hf_config(
        read_json(root / "config.json"), read_json(generation) if generation.is_file() else None
    )


def parse_hf_config(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Build a ModelConfig from the JSON objects of config.json and, when present, generation_config.json.

    Raises UnsupportedModelError that names the architecture, option or missing field.
    """
    architecture = _architecture(values)
    if values.get("quantization_config"):
        raise UnsupportedModelError("quantization_config: quantized checkpoints are not supported")
    common: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": _integer(values, "num_hidden_layers"),
        "hidden_size": _integer(values, "hidden_size"),
        "num_heads": _integer(values, "num_attention_heads"),
        "vocab_size": _integer(values, "vocab_size"),
        "max_position_embeddings": _integer(values, "max_position_embeddings", 2048),
        "dtype": _dtype(values),
        "eos_token_ids": _eos_token_ids(values, generation, default=2),
        "bos_token_id": values.get("bos_token_id", 2 if architecture == "opt" else 1),
    }
    return (_opt if architecture == "opt" else _llama)(values, common)


def _architecture(values: dict[str, Any]) -> str:
    """Our name for theirs: from `architectures`, or from `model_type` where that is missing."""
    names = values.get("architectures") or []
    model_type = values.get("model_type")
    if names:
        found = [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES]
        if len(found) == 1 and model_type in (None, found[0]):
            return found[0]
    elif model_type in _ARCHITECTURES.values():
        return str(model_type)
    raise UnsupportedModelError(
        f"architectures={names!r}, model_type={model_type!r} is not supported; "
        f"supported: {', '.join(_ARCHITECTURES)}"
    )


def _opt(values: dict[str, Any], common: dict[str, Any]) -> ModelConfig:
    """The fields that only OPT has."""
    hidden_size, num_heads = common["hidden_size"], common["num_heads"]
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}"
        )
    pre_norm = _boolean(values, "do_layer_norm_before", True)
    bias = _boolean(values, "enable_bias", True)
    width = _integer(values, "word_embed_proj_dim", hidden_size)
    return ModelConfig(
        **common,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=_integer(values, "ffn_dim"),
        tie_word_embeddings=_boolean(values, "tie_word_embeddings", True),
        activation=_choice(values, "activation_function", "relu", _OPT_ACTIVATIONS),
        attention_bias=bias,
        mlp_bias=bias,
        word_embed_dim=0 if width == hidden_size else width,
        pre_norm=pre_norm,
        final_norm=pre_norm and not _boolean(values, "_remove_final_layer_norm", False),
        norm_affine=_boolean(values, "layer_norm_elementwise_affine", True),
        initializer_range=float(values.get("init_std", 0.02)),
    )


def _llama(values: dict[str, Any], common: dict[str, Any]) -> ModelConfig:
    """The fields that only Llama has."""
    hidden_size, num_heads = common["hidden_size"], common["num_heads"]
    if not values.get("head_dim") and hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, "
            f"and there is no head_dim"
        )
    return ModelConfig(
        **common,
        num_kv_heads=_integer(values, "num_key_value_heads", num_heads),
        head_dim=_integer(values, "head_dim", hidden_size // num_heads),
        intermediate_size=_integer(values, "intermediate_size"),
        tie_word_embeddings=_boolean(values, "tie_word_embeddings", False),
        activation=_choice(values, "hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        attention_bias=_boolean(values, "attention_bias", False),
        mlp_bias=_boolean(values, "mlp_bias", False),
        rope=_rope(values),
        initializer_range=float(values.get("initializer_range", 0.02)),
    )


def _rope(values: dict[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = found.get("rope_theta", values.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)
    if any(isinstance(value, dict) for value in found.values()):
        raise UnsupportedModelError(f"rope_parameters per layer type ({', '.join(found)}) are not supported")
    partial = found.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor={partial!r} is not supported; only 1.0 is")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, _number(found, "factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported (default, linear, llama3 and yarn are); types whose "
            f"frequencies depend on the current length, such as dynamic and longrope, would spoil cached keys"
        )
    original = (
        values.get("original_max_position_embeddings")
        or found.get("original_max_position_embeddings")
        or values.get("max_position_embeddings", 2048)
    )
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            _number(found, "factor"),
            int(original),
            low_freq_factor=_number(found, "low_freq_factor"),
            high_freq_factor=_number(found, "high_freq_factor"),
        )
    if found.get("factor") is None:
        found = {**found, "factor": values.get("max_position_embeddings", 2048) / original}
    return RopeConfig(
        "yarn",
        theta,
        _number(found, "factor"),
        int(original),
        beta_fast=float(found.get("beta_fast") or 32),
        beta_slow=float(found.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(found),
        truncate=_boolean(found, "truncate", True),
    )


def _yarn_attention_factor(found: dict[str, Any]) -> float:
    """What cos and sin are multiplied by: given, or from mscale, or from the factor alone."""
    if found.get("attention_factor") is not None:
        return _number(found, "attention_factor")
    factor = _number(found, "factor")

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):
        return temperature(_number(found, "mscale")) / temperature(_number(found, "mscale_all_dim"))
    return temperature(1.0)


def _eos_token_ids(
    values: dict[str, Any], generation: dict[str, Any] | None, default: int
) -> tuple[int, ...]:
    """Every end-of-sequence id of both files, in order, once each."""
    ids: list[int] = []
    for found in (values.get("eos_token_id", default), (generation or {}).get("eos_token_id")):
        for token_id in found if isinstance(found, list) else [found]:
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
    if not all(type(token_id) is int for token_id in ids):
        raise UnsupportedModelError(f"eos_token_id={ids!r} must be an integer or a list of integers")
    return tuple(ids)


def _dtype(values: dict[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (4); float32 when neither is there."""
    found = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if found not in DTYPES:
        raise UnsupportedModelError(f"dtype={found!r} is not supported; {', '.join(DTYPES)} are")
    return found


def _integer(values: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; missing or null takes the default."""
    found = values.get(name)
    found = default if found is None else found
    if type(found) is not int or found < 1:
        raise UnsupportedModelError(f"config.json: {name}={found!r} must be a positive integer")
    return found


def _number(values: dict[str, Any], name: str) -> float:
    """A positive finite number of the rope section; there is no default."""
    found = values.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise UnsupportedModelError(f"config.json: rope {name}={found!r} must be a positive number")
    return float(found)


def _boolean(values: dict[str, Any], name: str, default: bool) -> bool:
    """True or false; missing or null takes the default."""
    found = values.get(name)
    found = default if found is None else found
    if not isinstance(found, bool):
        raise UnsupportedModelError(f"config.json: {name}={found!r} must be true or false")
    return found


def _choice(values: dict[str, Any], name: str, default: str, allowed: dict[str, str]) -> str:
    """Our name for one of theirs."""
    found = values.get(name) or default
    if found not in allowed:
        raise UnsupportedModelError(f"{name}={found!r} is not supported; one of {', '.join(allowed)} is")
    return allowed[found]
