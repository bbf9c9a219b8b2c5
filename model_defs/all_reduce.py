"""All-reduce of the partial sums of products that are split along the summed dimension.

Owns: the choice of the all-reduce. Code traced inside `summing` uses the given `AllReduce`; outside of it,
the compiler inserts its own sum after such a product. The norm that follows does the sum: until then there
are `PartialSums`.
Does not know: kernels, or models.

The choice is a context variable for the reasons given in `small_batch_matmul`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model_defs.sharding import TENSOR_AXIS, AnyMesh, tensor_parallel_size
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Affine
from pallas_kernels.residual_norms import NormSpec

Terms = Annotated[jax.Array, "f[T, width]"]
"""Terms of T tokens, or their sum."""
Stream = Annotated[jax.Array, "f32[T, width]"]
"""Residual stream of T tokens."""
Parts = Annotated[jax.Array, "f[devices, T, width]"]
"""Terms that are not yet summed, one row on each device."""
Vector = Annotated[jax.Array, "f[width]"]
"""Bias or scale of every row."""
_SPLIT, _WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()


@dataclass(frozen=True)
class SumSpec:
    """Static part of an `AllReduce`: `backend` of `all_reduce`, and the `capacity` of its memory in bytes."""

    backend: str
    capacity: int


@dataclass(frozen=True)
class PartialSums:
    """Terms that are not yet summed over devices, and a bias to add afterwards.

    Attributes:
      sums: the all-reduce to use.
      parts: [devices, T, width], one row on each device.
      bias: [width], or None.
    """

    sums: AllReduce
    parts: Parts
    bias: Vector | None


type Summand = Terms | PartialSums
"""[T, width], the term that a block adds to the residual stream."""


@dataclass(frozen=True)
class AllReduce:
    """All-reduce by the kernels of `all_reduce` over the devices of `mesh`; `table` addresses its memory."""

    spec: SumSpec
    table: Annotated[jax.Array, "i32[devices, 2 * table_len]"]
    mesh: AnyMesh

    def supports(self, num_rows: int, width: int, dtype: Any) -> bool:
        """Return whether this all-reduce, not the compiler, sums arrays of this size."""
        size = num_rows, width, dtype
        return self._sums_whole(*size) or all_reduce.supports_shares(*size, tensor_parallel_size(self.mesh))

    def _sums_whole(self, num_rows: int, width: int, dtype: Any) -> bool:
        """Return whether every device sums all rows. Otherwise each device sums a share, before a norm."""
        size = num_rows, width, dtype, tensor_parallel_size(self.mesh)
        fits = num_rows * width * jnp.dtype(dtype).itemsize <= self.spec.capacity
        return fits and all_reduce.supports(*size) and not all_reduce.shares_are_faster(*size)

    def partial(
        self,
        product: Callable[..., jax.Array],
        arguments: tuple[Any, ...],
        specs: tuple[Any, ...],
    ) -> Parts:
        """Return [devices, T, width]: on each device, `product` of its parts of the arguments.

        Arguments are arrays or trees of arrays, and `specs` their partitions.
        """
        run = self._on_shards(lambda *parts: product(*parts)[None], specs, _SPLIT)
        result: jax.Array = run(*arguments)
        return result

    def total(self, y: PartialSums) -> Terms:
        """Return the sum [T, width] on all devices. For many rows the compiler's all-reduce is used."""
        total = self._sum(y.parts)
        return total if y.bias is None else total + y.bias

    def _sum(self, partial: jax.Array) -> jax.Array:
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
        stream: Stream,
        y: PartialSums,
        scale: Vector | None,
        bias: Vector | None,
        *,
        norm: NormSpec,
    ) -> tuple[Stream, Terms]:
        """Add the sum to the stream f32[T, width]; return the result, and its norm in the norm's dtype.

        `scale` and `bias`, [width], are the norm's; None means that it has none. For many rows the returned
        stream is split over the devices by rows, however the given one is placed.
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
        # Kernels do not declare the axes over which their outputs vary.
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_current: ContextVar[AllReduce | None] = ContextVar("all_reduce", default=None)


@contextlib.contextmanager
def summing(sums: AllReduce | None) -> Iterator[None]:
    """Make code that is traced in this context use `sums`; None means the compiler's sums."""
    token = _current.set(sums)
    try:
        yield
    finally:
        _current.reset(token)


def current_all_reduce() -> AllReduce | None:
    """Return the all-reduce of the enclosing `summing`; None outside of one."""
    return _current.get()


def add_terms(one: Summand, other: Summand) -> Summand:
    """Return the sum of two terms [T, width]. That of partial sums is partial, so it takes one all-reduce."""
    if isinstance(one, PartialSums) and isinstance(other, PartialSums):
        biases = [y.bias for y in (one, other) if y.bias is not None]
        return PartialSums(one.sums, one.parts + other.parts, sum(biases[1:], biases[0]) if biases else None)
    return finish_sum(one).astype(jnp.float32) + finish_sum(other).astype(jnp.float32)


def finish_sum(y: Summand) -> Terms:
    """Return [T, width], summing `y` over devices if it is `PartialSums`."""
    if not isinstance(y, PartialSums):
        return y
    return y.sums.total(y)
