"""Readers of config.json options: each returns a typed value, or the default if it is missing or null.

Owns the readers, and the options that every family has. An option of a wrong type or out of range raises
UnsupportedModelError, which names it and its value.
"""

import sys
from typing import Any

from model_defs.config import DTYPES, ModelConfig, check_num_layers
from model_defs.errors import UnsupportedModelError


def common_fields(
    values: dict[str, Any],
    generation: dict[str, Any] | None,
    *,
    bos: int | None,
    eos: int | None,
    max_positions: int,
) -> dict[str, Any]:
    """Read the ModelConfig fields of every family; keywords are the family's defaults for missing keys."""
    vocab_size = integer(values, "vocab_size")
    return {
        "num_layers": integer(values, "num_hidden_layers"),
        "hidden_size": integer(values, "hidden_size"),
        "num_heads": integer(values, "num_attention_heads"),
        "vocab_size": vocab_size,
        "max_position_embeddings": integer(values, "max_position_embeddings", max_positions),
        "dtype": _dtype(values),
        "eos_token_ids": _eos_token_ids(values, generation, eos, vocab_size),
        "bos_token_id": _token_id("bos_token_id", values.get("bos_token_id", bos)),
    }


def written_common_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the options that `common_fields` reads, in the form of transformers 4, which 5 reads, too."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": config.dtype,
    }


_MOST = 2**31 - 1  # sizes and positions are 32-bit integers on a device


def integer(values: dict[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """Read an integer from `least` to 2**31 - 1; missing or null gives the default."""
    found = values.get(name)
    found = default if found is None else found
    if type(found) is int and found > _MOST:
        raise UnsupportedModelError(f"config.json: {name}={found!r:.40} must be at most {_MOST}")
    if type(found) is not int or found < least:
        limit = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise UnsupportedModelError(f"config.json: {name}={found!r} must be {limit}")
    if name == "num_hidden_layers":  # families list the kinds of all layers at once
        check_num_layers(f"config.json: {name}", found)
    return found


def number(
    values: dict[str, Any], name: str, default: float | None = None, *, above: float = 0, of: str = ""
) -> float:
    """Read a finite number above `above`; missing or null gives the default, which may equal the bound.

    `of` names the section of the option in the error message.
    """
    found = values.get(name)
    found = default if found is None else found
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if found is None or not is_number or not (above < found <= sys.float_info.max or found == default):
        raise UnsupportedModelError(
            f"config.json: {f'{of} {name}'.lstrip()}={found!r} must be a finite number above {above:g}"
        )
    return float(found)


def section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Read a JSON object; missing or null gives an empty one."""
    found = values.get(name)
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"config.json: {name}={found!r} must be an object")
    return found


def boolean(values: dict[str, Any], name: str, default: bool) -> bool:
    """Read true or false; missing or null gives the default."""
    found = values.get(name)
    found = default if found is None else found
    if not isinstance(found, bool):
        raise UnsupportedModelError(f"config.json: {name}={found!r} must be true or false")
    return found


def choice(values: dict[str, Any], name: str, default: str, allowed: dict[str, str]) -> str:
    """Read a string and map it by `allowed` to our name; a missing one gives the default."""
    found = values.get(name)
    found = default if found is None else found
    if not isinstance(found, str) or found not in allowed:
        raise UnsupportedModelError(f"{name}={found!r} is not supported; one of {', '.join(allowed)} is")
    return allowed[found]


def _token_id(name: str, value: Any) -> int | None:
    """Check a token id; null means no token, even if a missing key has a default."""
    if value is not None and (type(value) is not int or value < 0):
        raise UnsupportedModelError(f"config.json: {name}={value!r} must be a token id or null")
    return value


def _eos_token_ids(
    values: dict[str, Any], generation: dict[str, Any] | None, default: int | None, vocab_size: int
) -> tuple[int, ...]:
    """Return the distinct end-of-sequence ids of both files, in order.

    An id that no model of `vocab_size` ids can sample would never end a reply, so it is refused.
    """
    ids: list[int] = []
    for file, found in (
        ("config.json", values.get("eos_token_id", default)),
        ("generation_config.json", (generation or {}).get("eos_token_id")),
    ):
        for token_id in found if isinstance(found, list) else [] if found is None else [found]:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise UnsupportedModelError(
                    f"{file}: eos_token_id={found!r} must be ids from 0 to {vocab_size - 1}, the vocabulary"
                )
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def _dtype(values: dict[str, Any]) -> str:
    """Read `dtype` (transformers 5) or `torch_dtype` (4); the default is float32."""
    for name in ("dtype", "torch_dtype"):
        if (value := values.get(name)) is None:
            continue
        found = str(value).removeprefix("torch.")
        if found not in DTYPES:
            raise UnsupportedModelError(f"{name}={value!r} is not supported; {', '.join(DTYPES)} are")
        return found
    return "float32"
