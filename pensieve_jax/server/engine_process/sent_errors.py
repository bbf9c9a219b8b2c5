"""Errors that cross between the two processes, and come out as what they were.

Owns: which classes cross, and what becomes of values that cannot.
Does not know: frames, or who raised them.

An error crosses as its class, its message and its attributes, and is made again without its constructor: so
the message is word for word the same, though a value of a foreign type arrives as the text that showed it.
"""

from __future__ import annotations

import importlib
import reprlib
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import PensieveError

# Modules whose errors cross; a name from anywhere else must not make this process import something.
_MODULES: Final = frozenset(
    {
        "pensieve_jax.core.errors",
        "pensieve_jax.server.engine_process.wire",
        "model_defs.errors",
        "pallas_kernels.ragged_paged_attention.errors",
    }
)
_PLAIN: Final = (str, int, float, bool, type(None))


class SentError(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses."""

    module: str
    name: str
    message: tuple[Any, ...]
    attributes: dict[str, Any]


def sent_error(error: Exception) -> SentError:
    """To be sent; attributes are those that the error's own class sets."""
    kind = type(error)
    attributes = {name: _plain(value) for name, value in vars(error).items() if not name.startswith("_")}
    return SentError(kind.__module__, kind.__name__, tuple(map(_plain, error.args)), attributes)


def received_error(sent: SentError) -> Exception:
    """The error again; a PensieveError of the same words where its class is not one of this project's."""
    kind: Any = None
    if sent.module in _MODULES:
        kind = getattr(importlib.import_module(sent.module), sent.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return PensieveError(*sent.message)
    error: Exception = kind.__new__(kind)
    error.args = sent.message
    for name, value in sent.attributes.items():
        setattr(error, name, value)
    return error


def _plain(value: object) -> object:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return str(value)
    return value if type(value) in _PLAIN else reprlib.repr(value)
