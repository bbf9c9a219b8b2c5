"""A program before it is compiled, and its key, which is the same in every process for equal programs only.

Owns: how a jitted function and its arguments are distinguished from others.
Does not know: what else a compiled program depends on (`executable_environment`), or files.

A key covers everything that a program is lowered from, since it is computed from the arguments of `lower`.
Arrays count by what is traced of them: shape, dtype, weak type, layout and placement. Structures are walked
and not printed, since printed text may be truncated, rounded, or contain an address. A value of an unknown
kind has no key: its program cannot be identified, so it is compiled and not looked up.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}", re.IGNORECASE)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Program(NamedTuple):
    """A call of a jitted function.

    Attributes:
      function: result of `jax.jit` under its own name in its module, whose source determines which arguments
        are donated and static.
      arguments: trees of arrays and `jax.ShapeDtypeStruct`s.
      statics: static arguments, by name.
    """

    function: Any
    arguments: tuple[Any, ...]
    statics: Mapping[str, Any]

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the call."""
        lowered: jax.stages.Lowered = self.function.lower(*self.arguments, **self.statics)
        return lowered


class ProgramKeys:
    """Keys of programs. Programs may share large parts; each shared part is walked once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # frozen values by id; kept so that no id is reused

    def key(self, program: Program) -> str:
        """Return a digest of everything that `program` is lowered from.

        Raises:
          TypeError: it holds a value that cannot be identified.
        """
        return _digest(self._words((program.function, program.arguments, program.statics)))

    def _words(self, value: Any) -> Iterator[str]:
        """Yield words that identify a value; the words of its parts follow their number."""
        kind = _qualified_name(type(value))
        if isinstance(value, enum.Enum):  # first, as it may be an int, too
            yield f"{kind}.{value.name}"
        elif isinstance(value, _PLAIN):
            yield f"{kind} {value!r}"
        elif isinstance(value, range | PartitionSpec | jax.tree_util.PyTreeDef):
            yield f"{kind} {_printed(value)}"
        elif isinstance(value, np.dtype):
            yield f"{kind} {value.name} {value.str}"
        elif isinstance(value, np.ndarray | np.generic):
            yield _numpy_word(np.asarray(value))
        elif isinstance(value, jax.Array | jax.ShapeDtypeStruct):
            yield _array_word(value)
            yield from self._words(value.sharding)
        elif isinstance(value, Mesh):
            yield f"{kind} {value.shape_tuple} {value.axis_types} {value.device_ids.tolist()}"
        elif isinstance(value, NamedSharding):
            yield kind
            yield from self._words((value.mesh, value.spec, value.memory_kind))
        elif isinstance(value, Sharding):
            yield f"{kind} {_printed(value)} {_device_ids(value.device_set)}"
        elif isinstance(value, type) or callable(value):
            yield _code_word(value)
        else:
            yield from self._container_words(kind, value)

    def _container_words(self, kind: str, value: Any) -> Iterator[str]:
        if dataclasses.is_dataclass(value):
            yield f"{kind} {self._dataclass_digest(value)}"
        elif isinstance(value, Mapping):
            yield f"{kind} {len(value)}"
            for key, item in value.items():
                yield from self._words(key)
                yield from self._words(item)
        elif isinstance(value, Set):
            yield f"{kind} {sorted(_digest(self._words(item)) for item in value)}"
        elif isinstance(value, tuple | list):
            yield f"{kind} {len(value)}"
            for item in value:
                yield from self._words(item)
        else:
            raise TypeError(f"no key for a {kind}: {value!r}")

    def _dataclass_digest(self, value: Any) -> str:
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        digest = _digest(self._words(fields))
        if type(value).__dataclass_params__.frozen:
            self._known[id(value)] = value, digest
        return digest


def _digest(words: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for word in words:
        data = word.encode("utf-8", "backslashreplace")
        digest.update(b"%d:" % len(data) + data)  # with lengths, or words could be split differently
    return digest.hexdigest()


def _array_word(value: Any) -> str:  # upstream's annotations lack an array's format
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"no key for a traced value: {value!r}")
    layout, is_committed = value.format.layout, getattr(value, "committed", None)
    return f"array {value.shape} {value.dtype.name} {value.weak_type} {is_committed} {_printed(layout)}"


def _numpy_word(value: np.ndarray) -> str:
    if value.dtype.hasobject:
        raise TypeError("no key for an array of objects")
    content = hashlib.sha256(value.tobytes()).hexdigest()
    return f"numpy {value.dtype.name} {value.dtype.str} {value.shape} {content}"


def _code_word(value: Any) -> str:
    """Identify a class or function that its module has under its name; the source determines the rest.

    Others may share their name: lambdas, functions defined in a call, a second `jax.jit` with other options.
    """
    module, path = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    found = sys.modules.get(module) if module != "__main__" else None  # the source digest omits scripts
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is not value:
        raise TypeError(f"no key for {value!r}: its module has something else under its name")
    return f"code {module}.{path}"


def _device_ids(devices: Iterable[Any]) -> list[int]:
    return sorted(device.id for device in devices)


def _qualified_name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _printed(value: object) -> str:
    text = repr(value)
    if _ADDRESS.search(text):
        raise TypeError(f"no key for a value whose text contains an address: {text}")
    return text
