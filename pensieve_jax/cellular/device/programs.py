"""The programs of an engine: tasks of a cell, one after the other, and rows that go in or out.

Owns: what is traced, and the check of what a user's module returns.
Does not know: which rows, or when.

A launch of several tasks is one executable, since the host needs longer to launch a cell than a GPU to run
it. Each task of it gathers rows, runs the cell, and scatters, all on the same donated pool, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from pensieve_jax.cellular.cells import CellType, CellTypes, Field, Kind
from pensieve_jax.cellular.errors import CellError

type Pool = tuple[jax.Array, ...]
"""[num_rows + 1, ...] of every field of a kind of state, in its order; the last row is the initial state."""

_SAME, _NEARLY_SAME = 1e-4, 2e-2
"""What rounding may make of a row in another place: where all is float32, and where anything has fewer bits.

Both places are of one program, which rounds what it reads alike in each, to TF32 as well: on an H200
products of up to 4,096 columns were equal bit by bit in each of the three types. The order of a sum might
differ elsewhere, which float32 shows in its last bits; what has fewer may be rounded to the next number,
of which bfloat16 has 2 or 3 in 2e-2.
"""
_LOUD = 100.0  # how much larger neighbours are, so that they show in what has few bits
ROWS_READ = (8, 32, 128, 512)
"""How many rows a program reads or writes; more are several."""


class CellProgram(NamedTuple):
    """Tasks of a type.

    Attributes:
      run: (pool of its kind; pools of other kinds that it reads; weights; words i32[k, words, B]) to
        (the pool; of every field that it emits [k, B]; a number that is there once everything is); see `on`.
      weights: arrays of the module.
      other_kinds: of its inputs.
    """

    run: Callable[..., tuple[Pool, Pool, jax.Array]]
    weights: tuple[jax.Array, ...]
    other_kinds: tuple[int, ...]

    def on(self, device: jax.Device) -> Any:
        """`run`, to be compiled: the pool is donated, and what is emitted goes to the host by itself."""
        here, host = SingleDeviceSharding(device), host_sharding(device)
        return jax.jit(self.run, donate_argnums=0, out_shardings=(here, host, here))


def host_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Where a device puts what the host is to read.

    A GPU writes into pinned memory, so that nobody has to ask for a copy and wait for it; that costs the host
    200 microseconds a time.
    """
    return SingleDeviceSharding(device, memory_kind="pinned_host" if device.platform == "gpu" else None)


def cell_program(types: CellTypes, kind: CellType) -> CellProgram:
    """Of one type.

    Raises:
      CellError: the module does not return its state, or cannot be called as `Cell` says.
    """
    cell = types.cells[kind.index]
    call, weights = _pure(cell.module)
    others = tuple(dict.fromkeys(one for one in kind.input_kinds if one != kind.state_kind))
    state = types.kinds[kind.state_kind]
    fields = [[name for name, _ in types.kinds[one]] for one in kind.input_kinds]
    check_cell(types, kind)

    def run_tasks(
        pool: Pool, other_pools: tuple[Pool, ...], weights: tuple[jax.Array, ...], words: jax.Array
    ) -> tuple[Pool, Pool, jax.Array]:
        emitted = []
        num = words.shape[2]
        if num == 1:
            words = jnp.concatenate([words, _nothing(words, kind, pool)], axis=2)
        for task in words:
            pools = {kind.state_kind: pool, **dict(zip(others, other_pools, strict=True))}
            first = 1 + len(kind.input_kinds)
            inputs = tuple(
                {
                    name: array.at[rows].get(mode="promise_in_bounds")
                    for name, array in zip(fields[slot], pools[one], strict=True)
                }
                for slot, (one, rows) in enumerate(zip(kind.input_kinds, task[1:first], strict=True))
            )
            immediates = dict(zip(kind.immediates, task[first:], strict=True))
            result = call(weights, inputs, immediates, words.shape[2])
            pool = tuple(
                array.at[task[0]].set(result[name], mode="drop", unique_indices=True)
                for (name, _), array in zip(state, pool, strict=True)
            )
            emitted.append([result[name][:num] for name, _ in kind.emits])
        by_field = tuple(jnp.stack(values) for values in zip(*emitted, strict=True))
        return pool, by_field, words[0, 0, 0]

    return CellProgram(run_tasks, weights, others)


def _nothing(words: jax.Array, kind: CellType, pool: Pool) -> jax.Array:
    """A place of every task that reads the initial state and writes behind all rows, which writes nothing.

    A batch of one would be slices of the pool, and XLA copies the pool between reading and writing these.
    """
    num_rows = pool[0].shape[0] - 1
    place = np.zeros((words.shape[1], 1), np.int32)
    place[0], place[1 : 1 + len(kind.input_kinds)] = num_rows + 1, num_rows
    return jnp.broadcast_to(place, (words.shape[0], *place.shape))


def check_cell(types: CellTypes, kind: CellType) -> None:
    """Call the module with shapes alone, and compare what it returns with what it says.

    With the smallest batch and the largest; a batch of one runs as two, see `_nothing`.

    Raises:
      CellError: they differ, or it cannot be called.
    """
    for batch in dict.fromkeys((kind.batch_sizes[0], kind.batch_sizes[-1])):
        _check_batch(types, kind, max(batch, 2))
    _check_rows(types, kind)


def _check_rows(types: CellTypes, kind: CellType) -> None:
    """Compute a row beside two others, much larger ones, in one place and another: it must come out the same.

    Dropout that is on makes of a row what its place says, and batch norm what its neighbours say.
    """
    call, weights = _pure(types.cells[kind.index].module)
    rng = np.random.default_rng(0)
    inputs = [{name: _three_rows(rng, one) for name, one in types.kinds[index]} for index in kind.input_kinds]
    numbers = np.array([0, 1, 0], np.int32)
    run = jax.jit(lambda *given: call(*given, 2))

    def beside(rows: list[int]) -> Mapping[str, jax.Array]:
        immediates = {name: numbers[rows] for name in kind.immediates}
        told: Mapping[str, jax.Array] = run(
            weights, tuple({name: value[rows] for name, value in one.items()} for one in inputs), immediates
        )
        return told

    first, second = beside([0, 1]), beside([2, 0])
    kinds = (kind.state_kind, *kind.input_kinds)
    fields = [np.dtype(one.dtype) for index in kinds for _, one in types.kinds[index]]
    dtypes = (*fields, *(one.dtype for one in weights))  # of which one may be a key of random numbers
    floats = [one for one in dtypes if jnp.issubdtype(one, jnp.floating)]
    same = _SAME if all(jnp.finfo(one).bits >= 32 for one in floats) else _NEARLY_SAME
    for name, one in types.kinds[kind.state_kind]:
        if jnp.issubdtype(one.dtype, jnp.floating) and not np.allclose(
            np.asarray(first[name][0], np.float32),
            np.asarray(second[name][1], np.float32),
            rtol=same,
            atol=same,
            equal_nan=True,
        ):
            raise CellError(
                f"{kind.name}.state[{name!r}]",
                "a row that depends on the rest of its batch",
                "the same whatever stands beside it",
                "call .eval() of a module with dropout or batch norm first",
            )


def _three_rows(rng: np.random.Generator, field: Field) -> np.ndarray:
    shape = (3, *field.shape)
    if jnp.issubdtype(field.dtype, jnp.floating):
        rows = rng.normal(size=shape)
        rows[1:] *= _LOUD
        return rows.astype(field.dtype)
    return np.zeros(shape, field.dtype)


def _check_batch(types: CellTypes, kind: CellType, batch: int) -> None:
    module = types.cells[kind.index].module
    call, weights = _pure(module)

    def spec(state: Kind) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct((batch, *one.shape), one.dtype) for name, one in state}

    inputs = tuple(spec(types.kinds[one]) for one in kind.input_kinds)
    immediates = {name: jax.ShapeDtypeStruct((batch,), "int32") for name in kind.immediates}
    try:
        found = jax.eval_shape(lambda *args: call(*args, batch), weights, inputs, immediates)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # whose cell says which it was
        limit = f"callable as a cell: {type(error).__name__}: {error}"
        raise CellError(kind.name, type(module).__name__, limit) from error
    expected = spec(types.kinds[kind.state_kind])
    if not isinstance(found, Mapping) or found.keys() != expected.keys():
        raise CellError(f"{kind.name}.state", sorted(expected), f"what the cell returns: {_shown(found)}")
    for name, one in expected.items():
        shape, dtype = getattr(found[name], "shape", None), getattr(found[name], "dtype", None)
        if (shape, dtype) != (one.shape, one.dtype):
            returned = _shown(found[name]) if shape is None else f"{dtype}{list(shape)}"
            raise CellError(
                f"{kind.name}.state[{name!r}]",
                f"{one.dtype}{list(one.shape)}",
                f"what it returns: {returned}, batch {batch}",
            )


def empty_pool(kind: Kind, num_rows: int, device: jax.Device) -> Pool:
    """Every row is the initial state, zeros."""
    return tuple(jnp.zeros((num_rows + 1, *one.shape), one.dtype, device=device) for _, one in kind)


def _read_rows(pool: Pool, rows: jax.Array) -> Pool:
    return tuple(array.at[rows].get(mode="promise_in_bounds") for array in pool)


def rows_reader(sharding: SingleDeviceSharding) -> Callable[[Pool, np.ndarray], Pool]:
    """What reads rows of every field, and leaves them there."""
    reader: Callable[[Pool, np.ndarray], Pool] = jax.jit(_read_rows, out_shardings=sharding)
    return reader


def _write_rows(pool: Pool, rows: jax.Array, values: Pool) -> Pool:
    return tuple(
        array.at[rows].set(value, mode="drop", unique_indices=True)
        for array, value in zip(pool, values, strict=True)
    )


write_rows = jax.jit(_write_rows, donate_argnums=0)


def padded_rows(rows: np.ndarray, num_rows: int, *, writes: bool = False) -> list[np.ndarray]:
    """Rows in groups of the sizes of `ROWS_READ`; padding is the initial state, or if one `writes` no row."""
    groups = []
    for start in range(0, len(rows), ROWS_READ[-1]):
        group = rows[start : start + ROWS_READ[-1]]
        size = next(one for one in ROWS_READ if one >= len(group))
        padded = np.full(size, num_rows, np.int32)
        if writes:
            padded += 1 + np.arange(size, dtype=np.int32)
        padded[: len(group)] = group
        groups.append(padded)
    return groups


def _pure(module: Any) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """A cell as a function of (weights, inputs, immediates, batch) to its state, and these weights."""
    if not isinstance(module, nnx.Module):
        return (lambda _, inputs, immediates, batch: _call(module, inputs, immediates, batch)), ()
    graph, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)

    def call(
        weights: Sequence[jax.Array], inputs: Any, immediates: Mapping[str, jax.Array], batch: int
    ) -> Any:
        return _call(nnx.merge(graph, jax.tree.unflatten(structure, weights)), inputs, immediates, batch)

    return call, tuple(leaves)


def _call(module: Any, inputs: Any, immediates: Mapping[str, jax.Array], batch: int) -> Any:
    """What has neither inputs nor immediates is told the size of its batch."""
    if not inputs and not immediates:
        return module(inputs, batch=batch)
    return module(inputs, **immediates)


def _shown(value: Any) -> str:
    return str(sorted(value)) if isinstance(value, Mapping) else type(value).__name__
