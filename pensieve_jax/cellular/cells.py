"""Cells, the unit of batching: their state, their inputs, and the cell types of an engine.

Owns: the declaration of a cell's inputs and outputs, the kinds of state, and batch sizes.
Does not know: how a cell computes, graphs, or devices.

A cell includes its weights. The first dimension of all its arrays is the batch (thesis, section 2.4.2).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from pensieve_jax.cellular.errors import CellError

if TYPE_CHECKING:  # models import JAX, which this module does not need
    from model_defs.recurrent import RecurrentCell

DEFAULT_MAX_BATCH = 512
_TAKEN_NAMES = frozenset({"self", "batch", "cell", "inputs", "words", "num", "after", "until"})
"""Argument names of `Graph` and modules, which immediates must not use."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a row of state.

    Attributes:
      shape: shape of one row, without the batch.
      dtype: name of the dtype, such as "float32" or "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))  # numpy itself has no bfloat16
        return math.prod(self.shape) * dtype.itemsize


def Float(*shape: int, dtype: str = "float32") -> Field:
    """Return a field of floating-point numbers."""
    return Field(shape, dtype)


def Int(*shape: int) -> Field:
    """Return a field of 32-bit integers."""
    return Field(shape, "int32")


class Cell(NamedTuple):
    """Cell of an engine. Any object with these attributes works, such as the cells of `model_defs`.

    Attributes:
      module: called as `module(inputs, **immediates)` with a tuple of mappings of arrays [B, ...], one per
        input, and i32[B] for each immediate; with neither, as `module((), batch=B)`. It returns a mapping of
        arrays, its `state`. Its attributes declare the rest:
          state: a mapping of `Field`s, or of `jax.ShapeDtypeStruct`s: the output of a node.
          inputs: a sequence of such mappings, one per input; if absent, one input of its own state.
          immediates: names of the integers given with each node, such as a token id; if absent, none.
          emits: scalar fields of its state that are reported for every node; if absent, none.
      name: name of the type, unique in an engine.
      max_batch: the largest batch. Measure how long cells take to choose it.
      priority: among types with enough ready nodes the highest runs first. Rank a decoder above its encoder.
      batch_sizes: compiled batch sizes, rising to `max_batch`; None means `default_batch_sizes(max_batch)`.
    """

    module: Any
    name: str
    max_batch: int = DEFAULT_MAX_BATCH
    priority: int = 0
    batch_sizes: tuple[int, ...] | None = None


def default_batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return powers of two to 64, then steps of at most 1.5, then `max_batch`.

    This balances padding against the number of programs.
    """
    sizes = {2**i for i in range(7)} | {size for i in range(7, 20) for size in (2**i * 3 // 4, 2**i)}
    return (*sorted(size for size in sizes if size < max_batch), max_batch)


type Kind = tuple[tuple[str, Field], ...]
"""Fields sorted by name. Nodes whose states are of the same kind share a pool of rows."""


@dataclass(frozen=True, slots=True)
class CellType:
    """Cell as the scheduler sees it.

    Attributes:
      index: index of the type in its engine, in order of registration.
      name: see `Cell`.
      state_kind: index of the kind of its state.
      input_kinds: index of the kind of each input.
      immediates: see `Cell`.
      emits: see `Cell`, with the dtype of each field.
      batch_sizes: see `Cell`.
      priority: see `Cell`.
      is_chained: whether its nodes can form chains: it has one input, of the kind of its own state.
    """

    index: int
    name: str
    state_kind: int
    input_kinds: tuple[int, ...]
    immediates: tuple[str, ...]
    emits: tuple[tuple[str, str], ...]
    batch_sizes: tuple[int, ...]
    priority: int
    is_chained: bool

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]

    def batch_size(self, num_nodes: int) -> int:
        """Return the smallest compiled batch size that holds `num_nodes`."""
        assert num_nodes <= self.max_batch, "a task is larger than the largest batch"
        return self.batch_sizes[bisect_left(self.batch_sizes, num_nodes)]


class CellTypes:
    """Cells of an engine, and their types.

    Attributes:
      cells: the cells, in order of registration.
      types: the type of each cell.
      kinds: kinds of state, in order of first use.
      max_fan_in, max_num_immediates, max_num_emitted: maxima over all types.
    """

    def __init__(self, cells: Iterable[Cell | RecurrentCell]) -> None:
        """Check and number the cells.

        Raises:
          CellError: an attribute of a cell is invalid; the error names both.
        """
        self.cells = tuple(cells)
        self.kinds: list[Kind] = []
        self._by_name: dict[str, CellType] = {}
        self._by_module: dict[int, CellType | None] = {}  # None: several cells share the module
        for index, cell in enumerate(self.cells):
            self._add(index, cell)
        if not self.cells:
            raise CellError("cells", (), "at least one cell")
        self.types = tuple(self._by_name.values())
        self.max_fan_in = max(len(one.input_kinds) for one in self.types)
        self.max_num_immediates = max(len(one.immediates) for one in self.types)
        self.max_num_emitted = max(len(one.emits) for one in self.types)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of every kind of state. A device has `num_rows` of each, and the initial one."""
        return sum(one.num_bytes for kind in self.kinds for _, one in kind)

    def find(self, cell: Any) -> CellType:
        """Return the type of a `Cell`, of a module, or of a name.

        Raises:
          CellError: no type matches, or several cells share the module.
        """
        found = self._by_module.get(id(cell))
        if found is not None:
            return found
        if isinstance(cell, CellType):
            return cell
        found = self._by_name.get(cell) if isinstance(cell, str) else self._named_alike(cell)
        if found is None:
            mine = [name for name, one in self._by_name.items() if self.cells[one.index].module is cell]
            if mine:
                named = ", ".join(mine)
                raise CellError("cell", cell, f"one of {named} by name: they share this module")
            raise CellError("cell", cell, f"a cell of this engine: {', '.join(self._by_name)}")
        return found

    def _named_alike(self, cell: Any) -> CellType | None:
        """Return the type with the same name and module as a `Cell`-like object, or None."""
        name = getattr(cell, "name", None)
        found = self._by_name.get(name) if isinstance(name, str) else None
        is_its = found is not None and self.cells[found.index].module is getattr(cell, "module", None)
        return found if is_its else None

    def _add(self, index: int, cell: Cell | RecurrentCell) -> None:
        if not hasattr(cell, "module") or not hasattr(cell, "name"):
            raise CellError(f"cells[{index}]", cell, "a Cell: a module and a name for it")
        name = cell.name
        if not isinstance(name, str) or not name or name in self._by_name:
            raise CellError(f"cells[{index}].name", name, "a name that no other cell has")
        state = _fields(f"{name}.state", getattr(cell.module, "state", None))
        inputs = getattr(cell.module, "inputs", (dict(state),))
        if not isinstance(inputs, Sequence):
            raise CellError(f"{name}.inputs", inputs, "a sequence of mappings of fields")
        kinds = tuple(self._kind(_fields(f"{name}.inputs[{i}]", fields)) for i, fields in enumerate(inputs))
        if not isinstance(cell.priority, int):
            raise CellError(f"{name}.priority", cell.priority, "an int")
        state_kind = self._kind(state)
        self._by_name[name] = kind = CellType(
            index=index,
            name=name,
            state_kind=state_kind,
            is_chained=kinds == (state_kind,),
            input_kinds=kinds,
            immediates=_immediates(name, getattr(cell.module, "immediates", ())),
            emits=_emitted(name, getattr(cell.module, "emits", ()), dict(state)),
            batch_sizes=_batch_sizes(cell),
            priority=cell.priority,
        )
        self._by_module[id(cell.module)] = None if id(cell.module) in self._by_module else kind

    def _kind(self, fields: Kind) -> int:
        if fields not in self.kinds:
            self.kinds.append(fields)
        return self.kinds.index(fields)


def _fields(name: str, fields: Any) -> Kind:
    if not isinstance(fields, Mapping) or not fields:
        raise CellError(name, fields, "a mapping of names to fields, of one at least")
    return tuple(sorted((key, _field(f"{name}[{key!r}]", key, one)) for key, one in fields.items()))


def _field(name: str, key: Any, one: Any) -> Field:
    """Check a declared field. Arrays are rejected, since their values look like an initial state."""
    is_field = hasattr(one, "shape") and hasattr(one, "dtype") and not hasattr(one, "__array__")
    if not isinstance(key, str) or not is_field:
        raise CellError(name, one, "a Field under a name, such as Float(512)")
    if not all(isinstance(size, int | np.integer) and size > 0 for size in one.shape):
        raise CellError(f"{name}.shape", one.shape, "positive ints")
    return Field(tuple(int(size) for size in one.shape), _dtype(f"{name}.dtype", one.dtype))


def _dtype(name: str, dtype: Any) -> str:
    """Return the canonical name of a dtype, so that equal fields compare equal."""
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        raise CellError(name, dtype, "a dtype by name, such as 'float32'") from error


def _names(name: str, value: Any) -> tuple[str, ...]:
    is_several = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_several or not all(isinstance(one, str) for one in value) or len({*value}) < len(value):
        raise CellError(name, value, "distinct names")
    return tuple(value)


def _immediates(name: str, value: Any) -> tuple[str, ...]:
    names = _names(f"{name}.immediates", value)
    for one in names:
        if one in _TAKEN_NAMES:
            raise CellError(
                f"{name}.immediates", one, "a name that no argument of Graph.chain or of a module has"
            )
    return names


def _emitted(name: str, value: Any, state: Mapping[str, Field]) -> tuple[tuple[str, str], ...]:
    for one in _names(f"{name}.emits", value):
        if one not in state or state[one].shape or np.dtype(state[one].dtype).itemsize != 4:
            raise CellError(f"{name}.emits", one, "scalar fields of its state, of four bytes each")
    return tuple((one, state[one].dtype) for one in value)


def _batch_sizes(cell: Cell | RecurrentCell) -> tuple[int, ...]:
    most = cell.max_batch
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise CellError(f"{cell.name}.max_batch", most, "an int of at least 1")
    sizes = default_batch_sizes(most) if cell.batch_sizes is None else cell.batch_sizes
    if not isinstance(sizes, Sequence):
        raise CellError(f"{cell.name}.batch_sizes", sizes, "a sequence of ints")
    sizes = tuple(sizes)
    is_rising = all(isinstance(size, int) and size > 0 for size in sizes) and sorted({*sizes}) == list(sizes)
    if not sizes or not is_rising or sizes[-1] != most:
        raise CellError(f"{cell.name}.batch_sizes", sizes, f"rising ints that end at max_batch ({most})")
    return sizes
