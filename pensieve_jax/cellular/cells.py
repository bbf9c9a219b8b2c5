"""Cells: what is batched. Their state, their inputs, and the types that an engine makes of them.

Owns: how a cell says what it reads and leaves, which kinds of state there are, and batch sizes.
Does not know: how a cell computes, graphs, or devices.

A cell's weights are part of it; its first dimension everywhere is the batch (thesis, section 2.4.2).
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

if TYPE_CHECKING:  # models bring JAX along, which nothing here needs
    from model_defs.recurrent import RecurrentCell

DEFAULT_MAX_BATCH = 512
_TAKEN_NAMES = frozenset({"self", "batch", "cell", "inputs", "words", "num", "after", "until"})
"""Of arguments that `Graph` and modules have beside immediates."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a row of state, without the batch.

    Attributes:
      shape: of one row.
      dtype: by name, such as "float32" or "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes that one row takes, without the batch."""
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))  # numpy alone knows no bfloat16
        return math.prod(self.shape) * dtype.itemsize


def Float(*shape: int, dtype: str = "float32") -> Field:
    """A field of real numbers."""
    return Field(shape, dtype)


def Int(*shape: int) -> Field:
    """A field of i32."""
    return Field(shape, "int32")


class Cell(NamedTuple):
    """A cell as an engine takes it; what else has these attributes will do, such as those of `model_defs`.

    Attributes:
      module: called as `module(inputs, **immediates)`: a tuple with a mapping of arrays [B, ...] for each
        input, and i32[B] for each immediate; with neither, as `module((), batch=B)`. It returns a mapping of
        arrays, its `state`. Its attributes say the rest:
          state: a mapping of `Field`s, or of `jax.ShapeDtypeStruct`s, what a node leaves.
          inputs: a sequence of such mappings, one for each input; absent is one input, of its own state.
          immediates: names of numbers that are given with each node, such as a token's id; absent is none.
          emits: scalar fields of its state that are told for every node; absent is none.
      name: of the type, unique in an engine.
      max_batch: the largest batch, best found by measuring how long cells take.
      priority: of types that have enough to run the highest goes first; a decoder is above its encoder.
      batch_sizes: what is compiled, in rising order up to `max_batch`; None is `batch_lattice(max_batch)`.
    """

    module: Any
    name: str
    max_batch: int = DEFAULT_MAX_BATCH
    priority: int = 0
    batch_sizes: tuple[int, ...] | None = None


def batch_lattice(max_batch: int) -> tuple[int, ...]:
    """Powers of two to 64, then steps of at most 1.5, then `max_batch`: a balance of padding and programs."""
    sizes = {2**i for i in range(7)} | {size for i in range(7, 20) for size in (2**i * 3 // 4, 2**i)}
    return (*sorted(size for size in sizes if size < max_batch), max_batch)


type Kind = tuple[tuple[str, Field], ...]
"""Fields by name, sorted: nodes whose states are of one kind share rows."""


@dataclass(frozen=True, slots=True)
class CellType:
    """What the scheduler knows of a cell.

    Attributes:
      index: of the type in its engine, in order of registration.
      name: see `Cell`.
      state_kind: index of the kind of state that it leaves.
      input_kinds: index of the kind of each input.
      immediates: see `Cell`.
      emits: see `Cell`, with the dtype of each.
      batch_sizes: see `Cell`.
      priority: see `Cell`.
      is_chained: whether one may read another: it has one input, of the kind that it leaves.
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
        """The smallest batch that is compiled and has room for so many."""
        assert num_nodes <= self.max_batch, "a task is larger than the largest batch"
        return self.batch_sizes[bisect_left(self.batch_sizes, num_nodes)]


class CellTypes:
    """The cells of an engine.

    Attributes:
      cells: as given.
      types: one for each.
      kinds: of state, in order of first use.
      max_fan_in, max_num_immediates, max_num_emitted: the most that any type has.
    """

    def __init__(self, cells: Iterable[Cell | RecurrentCell]) -> None:
        """Check and number them.

        Raises:
          CellError: a cell says what cannot work; it names the cell and the attribute.
        """
        self.cells = tuple(cells)
        self.kinds: list[Kind] = []
        self._by_name: dict[str, CellType] = {}
        self._by_module: dict[int, CellType | None] = {}  # None: of several
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
        """Bytes of one row of every kind of state; a device keeps `num_rows` of each, and the initial one."""
        return sum(one.num_bytes for kind in self.kinds for _, one in kind)

    def find(self, cell: Any) -> CellType:
        """The type of a `Cell`, of its module, or of a name.

        Raises:
          CellError: there is none.
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
        """The type of a `Cell`, which has the same name and the same module."""
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
    """Of what has a shape and a dtype, but no values: one would take them for the initial state."""
    is_field = hasattr(one, "shape") and hasattr(one, "dtype") and not hasattr(one, "__array__")
    if not isinstance(key, str) or not is_field:
        raise CellError(name, one, "a Field under a name, such as Float(512)")
    if not all(isinstance(size, int | np.integer) and size > 0 for size in one.shape):
        raise CellError(f"{name}.shape", one.shape, "positive ints")
    return Field(tuple(int(size) for size in one.shape), _dtype(f"{name}.dtype", one.dtype))


def _dtype(name: str, dtype: Any) -> str:
    """Its name, however it is written: fields of one kind of state are equal."""
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
    sizes = batch_lattice(most) if cell.batch_sizes is None else cell.batch_sizes
    if not isinstance(sizes, Sequence):
        raise CellError(f"{cell.name}.batch_sizes", sizes, "a sequence of ints")
    sizes = tuple(sizes)
    is_rising = all(isinstance(size, int) and size > 0 for size in sizes) and sorted({*sizes}) == list(sizes)
    if not sizes or not is_rising or sizes[-1] != most:
        raise CellError(f"{cell.name}.batch_sizes", sizes, f"rising ints that end at max_batch ({most})")
    return sizes
