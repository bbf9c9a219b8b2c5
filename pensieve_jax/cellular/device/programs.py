"""Device programs of an engine: consecutive tasks of a cell, and reads and writes of rows.

Owns: the traced functions, and the checks of a user's module.
Does not know: which rows are used, or when a program runs.

Several tasks of a launch form one executable, since the host needs longer to launch a cell than a GPU to run
it. Each task gathers rows, runs the cell, and scatters the results, in place on the same donated pool.

The module is traced for each batch size when the engine is created, and programs are made from them.
A program that is compiled later thus depends neither on later changes of the module, nor on the JAX settings
of another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import SingleDeviceSharding

from pensieve_jax.cellular.cells import CellType, CellTypes, Field, Kind
from pensieve_jax.cellular.errors import CellError

type Pool = tuple[jax.Array, ...]
"""Arrays [num_rows + 1, ...], one per field of a kind of state; the last row is the initial state."""

_SAME, _NEARLY_SAME = 1e-4, 2e-2
"""Tolerances of a row computed at two places of a batch: all float32, and with any narrower type.

Both places are in one program, which rounds its inputs the same way, also to TF32. On an H200, products of up
to 4,096 columns were equal bit by bit in each of the three types. Elsewhere the order of a sum may differ:
float32 then differs in its last bits, and narrower types may round to a neighbouring number. A range of 2e-2
holds 2 or 3 bfloat16 numbers.
"""
_LOUD = 100.0  # scale of the neighbouring rows, large enough to be visible in narrow types
ROWS_READ = (8, 32, 128, 512)
"""Numbers of rows that one program reads or writes. More rows need several programs."""


class CellProgram(NamedTuple):
    """Program that runs tasks of one type.

    Attributes:
      run: function of (pool of the type's kind, pools of `other_kinds`, weights, words i32[k, words, B]). It
        returns the pool, [k, B] for every emitted field, and a number that is ready at the end. See `on`.
      weights: arrays of the module.
      other_kinds: kinds of its inputs other than its own.
    """

    run: Callable[..., tuple[Pool, Pool, jax.Array]]
    weights: tuple[jax.Array, ...]
    other_kinds: tuple[int, ...]

    def on(self, device: jax.Device) -> Any:
        """Return `run` jitted for `device`: it donates the pool and writes emitted fields to host memory."""
        here, host = SingleDeviceSharding(device), host_sharding(device)
        return jax.jit(self.run, donate_argnums=0, out_shardings=(here, host, here))


def host_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Return the placement of results that the host reads.

    A GPU writes them into pinned memory, since a copy that the host requests and waits for costs it
    200 microseconds.
    """
    return SingleDeviceSharding(device, memory_kind="pinned_host" if device.platform == "gpu" else None)


def cell_program(types: CellTypes, kind: CellType, num_rows: int) -> CellProgram:
    """Check the module of one type, trace it for every batch size, and build its program.

    Raises:
      CellError: the module does not return its state, or cannot be called as `Cell` describes.
    """
    check_cell(types, kind)
    _, weights = _pure(types.cells[kind.index].module)
    others = tuple(dict.fromkeys(one for one in kind.input_kinds if one != kind.state_kind))
    traced = _traced(types, kind, others, num_rows)

    def run_tasks(
        pool: Pool, other_pools: tuple[Pool, ...], weights: tuple[jax.Array, ...], words: jax.Array
    ) -> tuple[Pool, Pool, jax.Array]:
        run_task = traced[words.shape[2]]
        emitted = []
        for task in words:
            pool, values = run_task(pool, other_pools, weights, task)
            emitted.append(values)
        by_field = tuple(jnp.stack(values) for values in zip(*emitted, strict=True))
        return pool, by_field, words[0, 0, 0]

    return CellProgram(run_tasks, weights, others)


def _traced(
    types: CellTypes, kind: CellType, others: tuple[int, ...], num_rows: int
) -> dict[int, Callable[..., tuple[Pool, Pool]]]:
    """Trace one task for every batch size.

    Return functions of (pool, other pools, weights, words i32[words, B]), which return the pool and the
    emitted fields [B].
    """
    call, weights = _pure(types.cells[kind.index].module)
    state = types.kinds[kind.state_kind]
    fields = [[name for name, _ in types.kinds[one]] for one in kind.input_kinds]

    def run_task(
        pool: Pool, other_pools: tuple[Pool, ...], weights: tuple[jax.Array, ...], task: jax.Array
    ) -> tuple[Pool, Pool]:
        num = task.shape[1]
        if num == 1:
            task = jnp.concatenate([task, _nothing(task, kind, pool)], axis=1)
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
        result = call(weights, inputs, immediates, task.shape[1])
        pool = tuple(
            array.at[task[0]].set(result[name], mode="drop", unique_indices=True)
            for (name, _), array in zip(state, pool, strict=True)
        )
        return pool, tuple(result[name][:num] for name, _ in kind.emits)

    pools = tuple(pool_shapes(types.kinds[one], num_rows) for one in (kind.state_kind, *others))
    shapes = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in weights)
    return {
        size: _replayed(run_task, pools[0], pools[1:], shapes, words_shape(kind, size))
        for size in kind.batch_sizes
    }


def _replayed(function: Callable[..., Any], *shapes: Any) -> Callable[..., Any]:
    """Trace `function` now; return one that replays the trace."""
    jaxpr, told = jax.make_jaxpr(function, return_shape=True)(*shapes)
    structure = jax.tree.structure(told)

    def replay(*arguments: Any) -> Any:
        return jax.tree.unflatten(structure, jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments)))

    return replay


def words_shape(kind: CellType, batch_size: int, num_tasks: int | None = None) -> jax.ShapeDtypeStruct:
    """Return the shape of a task's words, i32[words, B], or those of `num_tasks`, i32[k, words, B]."""
    task = (1 + len(kind.input_kinds) + len(kind.immediates), batch_size)
    return jax.ShapeDtypeStruct(task if num_tasks is None else (num_tasks, *task), np.int32)


def pool_shapes(kind: Kind, num_rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of a pool."""
    return tuple(jax.ShapeDtypeStruct((num_rows + 1, *one.shape), one.dtype) for _, one in kind)


def _nothing(task: jax.Array, kind: CellType, pool: Pool) -> jax.Array:
    """Return the words of a padding node, i32[words, 1].

    It reads the initial state and writes past all rows, which has no effect. A batch of one would be a slice
    of the pool, and XLA copies the pool between reading and writing slices.
    """
    num_rows = pool[0].shape[0] - 1
    place = np.zeros((task.shape[0], 1), np.int32)
    place[0], place[1 : 1 + len(kind.input_kinds)] = num_rows + 1, num_rows
    return jnp.asarray(place)


def check_cell(types: CellTypes, kind: CellType) -> None:
    """Evaluate the module's shapes with the smallest and the largest batch, and compare them with `state`.

    A batch of one runs as two; see `_nothing`.

    Raises:
      CellError: they differ, or the module cannot be called, or a row depends on its batch.
    """
    for batch in dict.fromkeys((kind.batch_sizes[0], kind.batch_sizes[-1])):
        _check_batch(types, kind, max(batch, 2))
    _check_rows(types, kind)


def _check_rows(types: CellTypes, kind: CellType) -> None:
    """Check that a row gives the same result at two places, next to two different, much larger rows.

    Active dropout depends on the place of a row, and batch norm depends on its neighbours.
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
    dtypes = (*fields, *(one.dtype for one in weights))  # may include a random key's dtype
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
                "independent of the other rows",
                "call .eval() on a module with dropout or batch norm first",
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
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # an error of the user's module
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
    """Return a pool of zeros, which are the initial state."""
    return tuple(jnp.zeros(one.shape, one.dtype, device=device) for one in pool_shapes(kind, num_rows))


def _read_rows(pool: Pool, rows: jax.Array) -> Pool:
    return tuple(array.at[rows].get(mode="promise_in_bounds") for array in pool)


def rows_reader(sharding: SingleDeviceSharding) -> Callable[[Pool, np.ndarray], Pool]:
    """Return a jitted function that copies rows of every field to the given placement."""
    reader: Callable[[Pool, np.ndarray], Pool] = jax.jit(_read_rows, out_shardings=sharding)
    return reader


def _write_rows(pool: Pool, rows: jax.Array, values: Pool) -> Pool:
    return tuple(
        array.at[rows].set(value, mode="drop", unique_indices=True)
        for array, value in zip(pool, values, strict=True)
    )


write_rows = jax.jit(_write_rows, donate_argnums=0)


def padded_rows(rows: np.ndarray, num_rows: int, *, writes: bool = False) -> list[np.ndarray]:
    """Split rows into groups of the sizes of `ROWS_READ`, padded by the initial row (no row if `writes`)."""
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
    """Return a cell as a pure function of (weights, inputs, immediates, batch), and its weights."""
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
    """Call a module; one without inputs and immediates receives the batch size."""
    if not inputs and not immediates:
        return module(inputs, batch=batch)
    return module(inputs, **immediates)


def _shown(value: Any) -> str:
    return str(sorted(value)) if isinstance(value, Mapping) else type(value).__name__
