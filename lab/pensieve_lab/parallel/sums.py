"""Time of an all-reduce alone: many in sequence, each on the previous one's result.

Owns: the chains, of XLA's all-reduces and of this project's, and the difference of their results.
Does not know: steps or models.
Called by `programs.profile_parallel`.

Between two sums each row is multiplied by a device's own numbers, since a sum of equal parts would be
trivial. Also, `_BALLAST_BYTES` of memory are read, so that the host launches ahead of the devices, as in a
step. A chain without sums gives the time of these extras. `..._norm` is a sum with the residual addition and
the norm that follow it. In `own_shares_norm` and `own_letters_norm`, this project's kernels give each device
a share of the rows, for few rows and for any number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.sharding import TENSOR_AXIS
from pallas_kernels import all_reduce, residual_norms
from pensieve_jax.device.row_steps import Timed
from pensieve_lab.common.spread import Spread

_CHAIN = 64
_CHAIN_ELSEWHERE = 4  # without a GPU nothing is timed, and compiling a long chain takes seconds
_BALLAST_BYTES = 96 << 20  # 30 to 40 us on an H100, in which the host launches more than one link of a chain
_NUM_LAUNCHES = 4
_SPLIT, _WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()
_EPS = 1e-5
_SAME_AS = {"own": "compiler"} | dict.fromkeys(
    ("own_norm", "own_shares_norm", "own_letters_norm"), "compiler_norm"
)
"""The project's chains, and the chain whose result each must match."""

type Chain = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""[rows, width] of a device, its table, the whole stream, the norm's scale -> input of the next sum."""


def measure_sums(
    mesh: Mesh, sizes: Sequence[int], width: int, dtype: Any, *, repeats: int, own: bool
) -> dict[str, Any]:
    """Return seconds per sum of [rows, width] by implementation, with `own` also of this project's."""
    backend = "jax_triton" if all_reduce.devices_limit(list(mesh.devices.flat)) is None else "xla"
    memory = all_reduce.ExchangeMemory(mesh, width, dtype) if own else None
    found = {}
    for num_rows in sizes:
        chains: dict[str, Chain] = {
            "none": lambda x, *_: x,
            "compiler": lambda x, *_: lax.psum(x, TENSOR_AXIS),
            "compiler_norm": _compiler_norm,
        }
        if memory is not None:
            chains |= _own_chains(num_rows, width, dtype, mesh.devices.size, memory.capacity, backend)
        found[f"{num_rows} x {width}"] = _measure(mesh, chains, num_rows, width, dtype, memory, repeats)
    return found


def _own_chains(
    num_rows: int, width: int, dtype: Any, num_devices: int, capacity: int, backend: str
) -> dict[str, Chain]:
    """Return every kernel of this project that serves this number of rows."""
    size = num_rows, width, dtype, num_devices
    chains: dict[str, Chain] = {}
    arguments = {"axis": TENSOR_AXIS, "capacity": capacity, "backend": backend}
    if all_reduce.supports(*size):
        chains["own"] = functools.partial(_own, arguments)
        chains["own_norm"] = functools.partial(_own_norm, arguments)
    if all_reduce.supports_shares(*size):
        chains["own_letters_norm"] = functools.partial(_own_shares, arguments | {"capacity": 0})
        share_bytes = num_rows // num_devices * width * np.dtype(dtype).itemsize
        if all_reduce.fits_in_peer_buffers(share_bytes, capacity):
            chains["own_shares_norm"] = functools.partial(_own_shares, arguments)
    return chains


def _compiler_norm(x: jax.Array, _: jax.Array, stream: jax.Array, scale: jax.Array) -> jax.Array:
    total = lax.psum(x, TENSOR_AXIS)
    backend = residual_norms.choose_backend(x.shape[1], jax.devices()[0])
    return residual_norms.add_and_norm(stream, total, scale, **_rms(x.dtype)._asdict(), backend=backend)[1]


def _own(arguments: dict[str, Any], x: jax.Array, table: jax.Array, _: jax.Array, __: jax.Array) -> jax.Array:
    return all_reduce.sum_over_devices(x, table, **arguments)


def _own_norm(
    arguments: dict[str, Any], x: jax.Array, table: jax.Array, stream: jax.Array, scale: jax.Array
) -> jax.Array:
    affine, norm = all_reduce.Affine(scale=scale), _rms(x.dtype)
    return all_reduce.sum_and_norm(x, table, stream, affine, norm=norm, **arguments)[1]


def _own_shares(
    arguments: dict[str, Any], x: jax.Array, table: jax.Array, stream: jax.Array, scale: jax.Array
) -> jax.Array:
    num_rows = x.shape[0] // lax.axis_size(TENSOR_AXIS)
    share = lax.dynamic_slice_in_dim(stream, lax.axis_index(TENSOR_AXIS) * num_rows, num_rows)
    affine, norm = all_reduce.Affine(scale=scale), _rms(x.dtype)
    return all_reduce.sum_and_norm_of_shares(x, table, share, affine, norm=norm, **arguments)[1]


def _rms(dtype: Any) -> residual_norms.NormSpec:
    return residual_norms.NormSpec("rms", _EPS, dtype)


def _measure(
    mesh: Mesh,
    chains: dict[str, Chain],
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
    stream = jax.device_put(
        rng.normal(size=(num_rows, width)).astype(np.float32), NamedSharding(mesh, _WHOLE)
    )
    is_timed = jax.default_backend() == "gpu"
    length = _CHAIN if is_timed else _CHAIN_ELSEWHERE
    num_bytes = _BALLAST_BYTES if is_timed else 4 * width
    ballast = jax.device_put(np.zeros((num_devices, num_bytes // (4 * width), width), np.float32), split)
    empty = jax.device_put(np.zeros((num_devices, 2), np.int32), split)
    once = {name: _program(mesh, one, 1) for name, one in chains.items()}
    compiled = {name: _program(mesh, one, length) for name, one in chains.items()}

    def table() -> jax.Array:
        return empty if memory is None else memory.table

    if memory is not None:
        memory.renew(alone=True)
        for programs in (once, compiled):  # load programs while devices do not wait for each other
            for name in filter(programs.__contains__, _SAME_AS):
                jax.block_until_ready(programs[name](x, factors, table(), stream, ballast))
        memory.renew()
    found: dict[str, Any] = {}
    for name, program in compiled.items():
        timed = Timed(functools.partial(program, x, factors, table(), stream, ballast), jax.block_until_ready)
        samples = [timed.sample_s(_NUM_LAUNCHES) / length for _ in range(repeats + 1)]
        found[f"{name}_s"] = Spread.of(samples[1:]).as_dict()
    for name in filter(once.__contains__, _SAME_AS):
        answers = [
            np.asarray(once[each](x, factors, table(), stream, ballast)).astype(np.float32)
            for each in (name, _SAME_AS[name])
        ]
        error = float(np.abs(answers[0] - answers[1]).max())
        found[f"error{name.removeprefix('own')}"] = error
        # The sum of two addends is exact; a norm may differ in the last of eight bits.
        is_exact = name == "own" and num_devices == 2
        is_right = error == 0 if is_exact else error <= 2**-7 * np.abs(answers[1]).max()
        found["is_right"] = bool(is_right) and found.get("is_right", True)
    return found


def _program(mesh: Mesh, add_up: Chain, length: int) -> Any:
    """Return a program of `length` sums in sequence."""

    def chain(
        x: jax.Array, factors: jax.Array, table: jax.Array, stream: jax.Array, ballast: jax.Array
    ) -> jax.Array:
        value, scale = x[0], jnp.ones(x.shape[-1], x.dtype)
        for _ in range(length):
            is_beyond = value[0] > jnp.finfo(x.dtype).max  # always false
            nothing = jnp.sum(jnp.where(is_beyond, ballast[0], 0), axis=0).astype(x.dtype)
            value = add_up(lax.optimization_barrier(value * factors[0] + nothing), table, stream, scale)
        return value[None]

    in_specs = (_SPLIT, _SPLIT, _SPLIT, _WHOLE, _SPLIT)
    run = jax.shard_map(chain, mesh=mesh, in_specs=in_specs, out_specs=_SPLIT, check_vma=False)
    return jax.jit(run)
