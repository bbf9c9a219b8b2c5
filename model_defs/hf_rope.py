"""Reader and writer of the rope section of config.json, in the formats of transformers 4 and 5.

Owns the supported kinds of rotary positions, the defaults of their options, and their written form. Kinds
whose frequencies depend on the current length are rejected by name, since cached keys would be wrong.
"""

import dataclasses
import math
from typing import Any

from model_defs.config import RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.hf_options import boolean, integer, number, section

_ORIGINAL = "original_max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"
_FRACTION = "partial_rotary_factor"
_TYPES = ("full_attention", "sliding_attention")


def parse_rope(
    values: dict[str, Any],
    max_positions: int,
    theta_default: float = 10000.0,
    fraction_default: float | None = None,
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

    `max_positions` is the config's; the last two are the family's defaults of theta and of the part of a head
    that is rotated, or None if it rotates whole heads. Raises UnsupportedModelError, which names the option.
    """
    found, theta = _section(values, theta_default)
    fraction = _fraction(values, found, 1.0 if fraction_default is None else fraction_default)
    if fraction_default is None and fraction != 1:
        raise UnsupportedModelError(f"partial_rotary_factor={fraction!r} is not supported; only 1.0 is")
    return dataclasses.replace(_rope(values, found, theta, max_positions), rotary_fraction=fraction)


def _rope(values: dict[str, Any], found: dict[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """Read a kind and its options from the section `found`."""
    kind = _kind(found)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, _number(found, "factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported (default, linear, llama3 and yarn are); types whose "
            f"frequencies depend on the current length, such as dynamic and longrope, make cached keys wrong"
        )
    original = integer(values, _ORIGINAL, integer(found, _ORIGINAL, max_positions))
    if kind == "llama3":
        return _llama3(found, theta, original)
    factor = _number(found, "factor", max_positions / original)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=_number(found, "beta_fast", 32),
        beta_slow=_number(found, "beta_slow", 1),
        attention_factor=_yarn_attention_factor(found, factor),
        truncate=boolean(found, "truncate", True),
    )


def parse_longrope(values: dict[str, Any], max_positions: int, original_default: int) -> RopeConfig:
    """Read the rope of a family with plain frequencies, or with a factor for each of them (longrope).

    `max_positions` is the config's, `original_default` the family's for a missing
    `original_max_position_embeddings`. Raises UnsupportedModelError, which names the option.
    """
    found, theta = _section(values)
    fraction = _fraction(values, found)
    kind = _kind(found)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_fraction=fraction)
    if kind not in ("longrope", "su", "yarn"):  # two older names, as transformers reads them in this family
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported in this family; 'default' and 'longrope' are"
        )
    for name in ("short_mscale", "long_mscale"):
        if found.get(name) is not None:
            raise UnsupportedModelError(f"rope {name}={found[name]!r} is not supported")
    original = integer(values, _ORIGINAL, original_default, least=2)
    if found.get(_ORIGINAL, original) != original:
        raise UnsupportedModelError(
            f"config.json: {_ORIGINAL}={original} differs from {found[_ORIGINAL]!r} of the rope section"
        )
    factor = _number(found, "factor", max_positions / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        "longrope",
        theta,
        original_max_positions=original,
        attention_factor=_number(found, "attention_factor", scale),
        rotary_fraction=fraction,
        short_factors=found.get("short_factor"),  # type: ignore[arg-type]  # which RopeConfig checks
        long_factors=found.get("long_factor"),  # type: ignore[arg-type]
    )


def parse_ropes_by_type(
    values: dict[str, Any], max_positions: int, full_theta: float, sliding_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Read `rope_parameters` with a section for layers that see all tokens, and one for those with a window.

    Returns both in this order. The last arguments are the defaults of a missing `rope_theta`. Raises
    UnsupportedModelError for another section, if there is `rope_scaling` besides, or if an option outside of
    the sections contradicts them.
    """
    sections = section(values, "rope_parameters")
    if section(values, "rope_scaling") or not sections.keys() <= set(_TYPES):
        raise UnsupportedModelError(
            f"rope_parameters={sections!r:.120} must have sections {' and '.join(_TYPES)} alone, and no "
            f"rope_scaling besides"
        )
    outer = {_FRACTION: values.get(_FRACTION)}
    full, sliding = (
        parse_rope(outer | {"rope_parameters": section(sections, name)}, max_positions, theta)
        for name, theta in zip(_TYPES, (full_theta, sliding_theta), strict=True)
    )
    if values.get(_ORIGINAL) is not None:  # transformers does not read it beside sections
        original = integer(values, _ORIGINAL)
        for name, rope in zip(_TYPES, (full, sliding), strict=True):
            if rope.original_max_positions not in (0, original):
                raise UnsupportedModelError(
                    f"config.json: {_ORIGINAL}={original} differs from {rope.original_max_positions} of the "
                    f"rope section {name}; remove one"
                )
    return full, sliding


def parse_growing_rope(values: dict[str, Any], max_positions: int) -> RopeConfig:
    """Read YaRN of a family whose queries grow with positions (`llama_4_scaling_beta`).

    Raises UnsupportedModelError, which names the option.
    """
    rope = parse_rope(values, max_positions)
    if rope.kind != "yarn":
        raise UnsupportedModelError(f"rope_type={rope.kind!r} is not supported in this family; 'yarn' is")
    found, _ = _section(values, rope.theta)
    return dataclasses.replace(rope, query_growth=_number(found, _GROWTH))


def _section(values: dict[str, Any], theta_default: float = 10000.0) -> tuple[dict[str, Any], float]:
    """Return the rope section of either version, and theta.

    Two different sections are rejected: transformers 5 uses `rope_scaling`, but the author may have meant the
    other one.
    """
    new, old = (section(values, name) for name in ("rope_parameters", "rope_scaling"))
    if new and old and new != old:
        raise UnsupportedModelError(
            f"rope_scaling={old!r} with a different rope_parameters={new!r} is not supported; keep one"
        )
    found = new or old
    # With a theta of 1 all pairs would rotate alike, and yarn would divide by log(1) = 0.
    theta = number(found, "rope_theta", number(values, "rope_theta", theta_default, above=1), above=1)
    if any(isinstance(value, dict) for value in found.values()):
        raise UnsupportedModelError(f"rope_parameters per layer type ({', '.join(found)}) are not supported")
    return found, theta


def _kind(found: dict[str, Any]) -> Any:
    named = (found.get(name) for name in ("rope_type", "type"))
    return next((kind for kind in named if kind is not None), "default")


def _fraction(values: dict[str, Any], found: dict[str, Any], default: float = 1.0) -> float:
    """Read the part of a head that is rotated."""
    return number(found, _FRACTION, number(values, _FRACTION, default))


def written_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the options that `parse_rope` reads, in the form of transformers 4, which 5 reads, too."""
    names = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor")}
    names["yarn"] = ("beta_fast", "beta_slow", "attention_factor")
    whole = {} if rope.rotary_fraction == 1 else {_FRACTION: rope.rotary_fraction}
    if rope.kind == "default":
        return {"rope_theta": rope.theta} | whole
    if rope.kind == "longrope":
        section = {"rope_type": "longrope", "attention_factor": rope.attention_factor}
        section |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        original = {_ORIGINAL: rope.original_max_positions}
        return {"rope_theta": rope.theta, "rope_scaling": section} | original | whole
    section = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        section["original_max_position_embeddings"] = rope.original_max_positions
    section |= {name: getattr(rope, name) for name in names[rope.kind]}
    if rope.query_growth is not None:
        section[_GROWTH] = rope.query_growth
    if not rope.truncate:  # written only if needed, since older versions warn about it
        section["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": section}


def written_ropes_by_type(full: RopeConfig, sliding: RopeConfig) -> dict[str, Any]:
    """Return the options that `parse_ropes_by_type` reads. transformers 4 does not read them."""
    sections = {}
    for name, rope in zip(_TYPES, (full, sliding), strict=True):
        written = written_rope(rope)
        kind = written.pop("rope_scaling", {"rope_type": "default"})
        sections[name] = kind | written
    return {"rope_parameters": sections}


def _number(fields: dict[str, Any], name: str, default: float | None = None) -> float:
    """Read a positive number of the section."""
    return number(fields, name, default, of="rope")


def _llama3(fields: dict[str, Any], theta: float, original: int) -> RopeConfig:
    """Read a llama3 section. Its ramp divides by the difference of two factors, which must be ordered."""
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if low >= high:
        raise UnsupportedModelError(
            f"config.json: rope low_freq_factor={low!r} must be below high_freq_factor={high!r}"
        )
    factor = _number(fields, "factor")
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn_attention_factor(fields: dict[str, Any], factor: float) -> float:
    """Return the factor of cos and sin: as given, or from mscale, or from `factor` alone."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dim = (_number(fields, name, 0) for name in ("mscale", "mscale_all_dim"))
    given = temperature(scale) / temperature(all_dim) if scale and all_dim else temperature(1.0)
    return _number(fields, "attention_factor", given)
