"""Who adds up the partial sums of products that are split along what they sum over.

Owns: the choice, which whoever traces a step makes for what is traced inside `summing`; without one it is the
compiler's, which puts its own sum behind such a product. A sum is left to the norm that follows: until then
there are `PartialSums`.
Does not know: kernels, or models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model_defs.sharding import TENSOR_AXIS, AnyMesh, tensor_parallel_size
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Affine
from pallas_kernels.residual_norms import NormSpec

_SPLIT, _WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()


@dataclass(frozen=True)
class SumSpec:
    """What is static of it: `backend` of `all_reduce`, and the `capacity` of its memory, in bytes."""

    backend: str
    capacity: int


@dataclass(frozen=True)
class PartialSums:
    """What is still to be added up over devices, and what is added to that.

    Attributes:
      sums: who is to add them up.
      parts: [devices, T, width], a row on each device.
      bias: [width], or None.
    """

    sums: AllReduce
    parts: jax.Array
    bias: jax.Array | None


type Summand = jax.Array | PartialSums
"""[T, width], what a block adds to the stream."""


@dataclass(frozen=True)
class AllReduce:
    """Sums by `all_reduce`, over the devices of `mesh`; `table` is that of its memory."""

    spec: SumSpec
    table: jax.Array
    mesh: AnyMesh

    def serves(self, num_rows: int, width: int, dtype: Any) -> bool:
        """Whether partial sums of so many rows are left to be added up here, and not by the compiler."""
        size = num_rows, width, dtype
        return self._sums_whole(*size) or all_reduce.serves_shares(*size, tensor_parallel_size(self.mesh))

    def _sums_whole(self, num_rows: int, width: int, dtype: Any) -> bool:
        """Whether every device adds up all of so many rows; else each its share, before a norm."""
        size = num_rows, width, dtype, tensor_parallel_size(self.mesh)
        fits = num_rows * width * jnp.dtype(dtype).itemsize <= self.spec.capacity
        return fits and all_reduce.serves(*size) and not all_reduce.shares_are_faster(*size)

    def partial(
        self, product: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array, specs: tuple[Any, Any]
    ) -> jax.Array:
        """[devices, T, width]: on each device `product` of its parts of `x` and `kernel`."""
        run = self._on_shards(lambda *parts: product(*parts)[None], specs, _SPLIT)
        result: jax.Array = run(x, kernel)
        return result

    def total(self, y: PartialSums) -> jax.Array:
        """[T, width] on all devices; of many rows the compiler's."""
        total = self._added_up(y.parts)
        return total if y.bias is None else total + y.bias

    def _added_up(self, partial: jax.Array) -> jax.Array:
        _, num_rows, width = partial.shape
        if not self._sums_whole(num_rows, width, partial.dtype):
            return self._on_shards(lambda part: lax.psum(part[0], TENSOR_AXIS), _SPLIT, _WHOLE)(partial)
        run = self._on_shards(
            lambda part, table: all_reduce.sum_over_devices(part[0], table, **self._arguments),
            (_SPLIT, _SPLIT),
            _WHOLE,
        )
        result: jax.Array = run(partial, self.table)
        return result

    def total_and_norm(
        self,
        stream: jax.Array,
        y: PartialSums,
        scale: jax.Array | None,
        bias: jax.Array | None,
        *,
        norm: NormSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """The stream f32[T, width] and the sum, added, and the norm of that, [T, width] in the norm's dtype.

        `scale` and `bias`, [width], are the norm's; None: it has none. Of many rows each device has a share
        of the stream, whatever it has of the one that is given.
        """
        _, num_rows, width = y.parts.shape
        is_whole = self._sums_whole(num_rows, width, y.parts.dtype)
        add_up = all_reduce.sum_and_norm if is_whole else all_reduce.sum_and_norm_of_shares

        def run(stream: jax.Array, part: jax.Array, affine: Affine, table: jax.Array) -> Any:
            return add_up(part[0], table, stream, affine, norm=norm, **self._arguments)

        of_stream = _WHOLE if is_whole else _SPLIT
        shards = self._on_shards(run, (of_stream, _SPLIT, _WHOLE, _SPLIT), (of_stream, _WHOLE))
        result: tuple[jax.Array, jax.Array] = shards(stream, y.parts, Affine(y.bias, scale, bias), self.table)
        return result

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"axis": TENSOR_AXIS, "capacity": self.spec.capacity, "backend": self.spec.backend}

    def _on_shards(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # Kernels do not declare over which axes their outputs vary.
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_current: ContextVar[AllReduce | None] = ContextVar("device_sums", default=None)


@contextlib.contextmanager
def summing(sums: AllReduce | None) -> Iterator[None]:
    """Sums of what is traced meanwhile are made by `sums`; None: by the compiler."""
    token = _current.set(sums)
    try:
        yield
    finally:
        _current.reset(token)


def current_sums() -> AllReduce | None:
    """Return what the enclosing `summing` was given; None outside of one."""
    return _current.get()


def added_up(y: Summand) -> jax.Array:
    """[T, width], whatever `y` is."""
    if not isinstance(y, PartialSums):
        return y
    return y.sums.total(y)
