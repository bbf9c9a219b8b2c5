"""Shapes that annotations of public functions give, compared with the arrays of a call.

An array is annotated as `Annotated[jax.Array, "f32[T, width]"]`. A dtype comes first: `f`, `i` or `u` for any
of a kind, or nothing for any dtype. A name stands for one size in all arrays of a call.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

_KINDS = {"f": jnp.floating, "i": jnp.signedinteger, "u": jnp.unsignedinteger}
_PREFIXES = {"f": "float", "i": "int", "u": "uint"}


def mismatches(function: Callable[..., Any], *args: Any, result: Any, **kwargs: Any) -> list[str]:
    """Return a sentence for each array that differs from its annotation; raises TypeError without any."""
    hints = typing.get_type_hints(function, include_extras=True)
    bound = inspect.signature(function).bind(*args, **kwargs).arguments | {"return": result}
    arrays = [one for name, value in bound.items() if name in hints for one in _arrays(hints[name], value)]
    if not arrays:
        raise TypeError(f"{function.__name__} has no annotated arrays")
    sizes: dict[str, Any] = {}
    for text, array in arrays:
        for name, size in _named_sizes(_dimensions(text), tuple(array.shape)):
            if name.isidentifier():
                sizes.setdefault(name, size)
            elif (match := re.fullmatch(r"2 \* (\w+)", name)) is not None:
                sizes.setdefault(match[1], size // 2)
    return [
        f"{array.dtype}{list(array.shape)} is not {text} with {sizes}"
        for text, array in arrays
        if not _fits(text, array, sizes)
    ]


def _named_sizes(names: list[str], shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield each name with its size, and that of a star with the tuple of its sizes."""
    star = next((i for i, name in enumerate(names) if name.startswith("*")), None)
    if star is None:
        yield from zip(names, shape, strict=False)
        return
    end = len(shape) - (len(names) - star - 1)
    yield from zip(names[:star], shape, strict=False)
    yield names[star][1:], shape[star:end]
    yield from zip(names[star + 1 :], shape[end:], strict=False)


def _arrays(hint: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each array of a value with its annotation."""
    if value is None:
        return
    if isinstance(hint, typing.TypeAliasType):
        yield from _arrays(hint.__value__, value)
    elif dataclasses.is_dataclass(value) or hasattr(value, "_asdict"):
        for name, one in typing.get_type_hints(type(value), include_extras=True).items():
            yield from _arrays(one, getattr(value, name))
    elif metadata := getattr(hint, "__metadata__", None):
        yield metadata[0], value
    elif typing.get_origin(hint) is tuple:
        for one, part in zip(typing.get_args(hint), value, strict=True):
            yield from _arrays(one, part)
    elif isinstance(value, list):
        for part in value:
            yield from _arrays(typing.get_args(hint)[0], part)
    elif hasattr(value, "shape"):
        for one in typing.get_args(hint):
            yield from _arrays(one, value)


def _dimensions(text: str) -> list[str]:
    inside = text[text.index("[") + 1 : -1]
    return inside.split(", ") if inside else []


def _fits(text: str, array: Any, sizes: dict[str, int]) -> bool:
    dtype, dimensions = text[: text.index("[")], _dimensions(text)
    right = not dtype or (
        jnp.issubdtype(array.dtype, _KINDS[dtype])
        if dtype in _KINDS
        else array.dtype == jnp.dtype(_PREFIXES[dtype[0]] + dtype[1:])
    )
    return right and list(array.shape) == eval(f"[{', '.join(dimensions)}]", {}, sizes)
