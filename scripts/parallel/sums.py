"""How long a sum over devices takes by itself: many in a row, each of what the one before left.

Owns: the chains, of the compiler's sums and of our own, and whether ours has the right bits.
Does not know: steps or models. Called by: profile_parallel.

Between two sums each row is multiplied by a device's own numbers, since a sum of equal parts would be none. A
chain of the multiplications alone says what they take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from common.spread import Spread
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from steps.row_steps import Timed

from model_defs.sharding import TENSOR_AXIS
from pallas_kernels import all_reduce

_CHAIN = 64
_NUM_LAUNCHES = 4
_SPLIT, _WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()


def measure_sums(
    mesh: Mesh, sizes: Sequence[int], width: int, dtype: Any, *, repeats: int, own: bool
) -> dict[str, Any]:
    """Seconds of a sum of [rows, width] by who makes it; our own where they run and are asked for."""
    backend = "jax_triton" if all_reduce.device_limit(mesh.devices.flat[0]) is None else "xla"
    memory = all_reduce.ExchangeMemory(mesh, width, dtype) if own else None
    found = {}
    for num_rows in sizes:
        chains: dict[str, Callable[..., jax.Array]] = {
            "none": lambda x, _: x,
            "compiler": lambda x, _: lax.psum(x, TENSOR_AXIS),
        }
        if memory is not None and all_reduce.serves(num_rows, width, mesh.devices.size):
            chains["own"] = functools.partial(
                all_reduce.sum_over_devices, axis=TENSOR_AXIS, capacity=memory.capacity, backend=backend
            )
        found[f"{num_rows} x {width}"] = _measure(mesh, chains, num_rows, width, dtype, memory, repeats)
    return found


def _measure(
    mesh: Mesh,
    chains: dict[str, Callable[..., jax.Array]],
    num_rows: int,
    width: int,
    dtype: Any,
    memory: all_reduce.ExchangeMemory | None,
    repeats: int,
) -> dict[str, Any]:
    num_devices = mesh.devices.size
    split = NamedSharding(mesh, _SPLIT)
    rng = np.random.default_rng(num_rows)
    x = jax.device_put(rng.normal(size=(num_devices, num_rows, width)).astype(dtype), split)
    factors = jax.device_put(rng.uniform(0.3, 0.7, x.shape).astype(dtype), split)
    empty = jax.device_put(np.zeros((num_devices, 2), np.int32), split)
    once = {name: _program(mesh, one, 1) for name, one in chains.items()}
    compiled = {name: _program(mesh, one, _CHAIN) for name, one in chains.items()}

    def table() -> jax.Array:
        return empty if memory is None else memory.table

    if memory is not None:
        memory.renew(alone=True)
        for programs in (once, compiled):  # loaded by devices that do not wait for each other
            jax.block_until_ready(programs["own"](x, factors, table()) if "own" in programs else x)
        memory.renew()
    found: dict[str, Any] = {}
    for name, program in compiled.items():
        timed = Timed(functools.partial(program, x, factors, table()), jax.block_until_ready)
        samples = [timed.sample_s(_NUM_LAUNCHES) / _CHAIN for _ in range(repeats + 1)]
        found[f"{name}_s"] = Spread.of(samples[1:]).as_dict()
    if "own" in once:
        answers = [np.asarray(once[name](x, factors, table())) for name in ("own", "compiler")]
        found["same_bits"] = bool((answers[0] == answers[1]).all())
    return found


def _program(mesh: Mesh, add_up: Callable[..., jax.Array], length: int) -> Any:
    """`length` sums in a row."""

    def chain(x: jax.Array, factors: jax.Array, table: jax.Array) -> jax.Array:
        value = x[0]
        for _ in range(length):
            value = add_up(lax.optimization_barrier(value * factors[0]), table)
        return value[None]

    run = jax.shard_map(
        chain, mesh=mesh, in_specs=(_SPLIT, _SPLIT, _SPLIT), out_specs=_SPLIT, check_vma=False
    )
    return jax.jit(run)
