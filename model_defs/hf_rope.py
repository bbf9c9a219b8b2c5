"""The rope section of config.json, in the spellings of transformers 4 and 5.

Owns which kinds of rotary positions are understood and which defaults their options have. Kinds whose
frequencies depend on the current length are refused by name: cached keys would be wrong. Called by what reads
the configs of decoders with rotary positions.
"""

import math
from typing import Any

from model_defs.config import RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.hf_options import boolean, number


def parse_rope(values: dict[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

    Raises UnsupportedModelError naming the option. Both sections, unless they are equal, are refused:
    transformers 5 lets `rope_scaling` win, and whoever wrote the other one meant that to hold.
    """
    new, old = (values.get(name) for name in ("rope_parameters", "rope_scaling"))
    if new and old and new != old:
        raise UnsupportedModelError(
            f"rope_scaling={old!r} beside a rope_parameters={new!r} that differs is not supported; keep one"
        )
    found = new or old or {}
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
        return RopeConfig("linear", theta, number(found, "factor"))
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
            number(found, "factor"),
            int(original),
            low_freq_factor=number(found, "low_freq_factor"),
            high_freq_factor=number(found, "high_freq_factor"),
        )
    if found.get("factor") is None:
        found = {**found, "factor": values.get("max_position_embeddings", 2048) / original}
    return RopeConfig(
        "yarn",
        theta,
        number(found, "factor"),
        int(original),
        beta_fast=float(found.get("beta_fast") or 32),
        beta_slow=float(found.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(found),
        truncate=boolean(found, "truncate", True),
    )


def _yarn_attention_factor(found: dict[str, Any]) -> float:
    """What cos and sin are multiplied by: given, or from mscale, or from the factor alone."""
    if found.get("attention_factor") is not None:
        return number(found, "attention_factor")
    factor = number(found, "factor")

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):
        return temperature(number(found, "mscale")) / temperature(number(found, "mscale_all_dim"))
    return temperature(1.0)
