"""Shared parts of the all-reduce kernels in plain Triton: the table, lost peers, rounding and norms.

Owns: how a kernel reads its table, counts its launches, gives up a peer, and rounds and norms a sum.
Does not know: how devices exchange their rows. Called by: `peer_buffers`, and both modules of kernels.
Needs Triton, which the extra `triton` installs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs

STATUS, ADDRESSES = map(tl.constexpr, (specs.STATUS, specs.ADDRESSES))


@triton.jit
def next_launch(table: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Return the number of this launch. Each program counts launches in its own word."""
    count_ptr = tl.load(table + STATUS).to(tl.pointer_type(tl.int32)) + place
    count = tl.load(count_ptr) + 1
    tl.debug_barrier()  # one thread stores the count, after all threads have read it
    tl.store(count_ptr, count)
    return count


@triton.jit
def words_of(table: tl.tensor, device: tl.tensor, num_devices: tl.constexpr) -> tl.tensor:
    """Return a pointer to the i32 words of a device."""
    return tl.load(table + ADDRESSES + num_devices + device).to(tl.pointer_type(tl.int32))


@triton.jit
def is_lost(table: tl.tensor) -> tl.tensor:
    """Return whether this device has lost a peer, or was notified of a loss."""
    return tl.load(tl.load(table + STATUS).to(tl.pointer_type(tl.int32))) != 0


@triton.jit
def report_loss(table: tl.tensor, num_devices: tl.constexpr) -> None:
    """Notify every device, this one included, that a peer was lost."""
    for peer in tl.static_range(num_devices):
        tl.atomic_xchg(words_of(table, peer, num_devices), 1, sem="release", scope="sys")


@triton.jit
def rounded(total: tl.tensor, partial_ptr: tl.tensor, lost: tl.tensor) -> tl.tensor:
    """Round to the dtype of the partial sums, as if the sum had been stored; NaN if a peer is lost."""
    total = total.to(partial_ptr.dtype.element_ty).to(tl.float32)
    return tl.where(lost, float("nan"), total)


@triton.jit
def vector(vector_ptr: tl.tensor, columns: tl.tensor, inside: tl.tensor, is_there: tl.constexpr) -> tl.tensor:
    """Load a bias or scale [width], as stored. Without one, return a placeholder that is not used."""
    if is_there:
        return tl.load(vector_ptr + columns, mask=inside, other=0.0)
    else:
        return columns


@triton.jit
def added_and_normed(
    total: tl.tensor,
    stream: tl.tensor,
    sum_bias: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    partial_ptr: tl.tensor,
    inside: tl.tensor,
    lost: tl.tensor,
    width: tl.constexpr,
    is_layer: tl.constexpr,
    has_sum_bias: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the stream plus the rounded sum and its bias, and the norm of that."""
    if has_sum_bias:
        total = rounded(total + sum_bias.to(tl.float32), partial_ptr, lost)
    total += stream
    return total, _normed(total, scale, bias, inside, width, is_layer, has_scale, has_bias, eps)


@triton.jit
def _normed(
    total: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    inside: tl.tensor,
    width: tl.constexpr,
    is_layer: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
) -> tl.tensor:
    """Norm a row as `residual_norms` does."""
    total = tl.where(inside, total, 0.0)
    if is_layer:
        # Columns past the end were zero; after the subtraction they must not count in the second sum.
        total = tl.where(inside, total - tl.sum(total, axis=0) / width, 0.0)
    normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    if has_scale:
        normed *= scale.to(tl.float32)
    if has_bias:
        normed += bias.to(tl.float32)
    return normed
