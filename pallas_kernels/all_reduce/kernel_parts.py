"""What kernels of sums have in common: the table, peers that are lost, rounding and norms, in plain Triton.

Owns: how a kernel reads its table, counts its launches, gives a peer up, and what is done to a sum.
Does not know: how devices hand each other their rows.
Needs Triton, which the extra `triton` installs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs

STATUS, ADDRESSES = map(tl.constexpr, (specs.STATUS, specs.ADDRESSES))


@triton.jit
def next_launch(table: tl.tensor, place: tl.tensor) -> tl.tensor:
    """The number of this launch, which every program counts by itself, in a word of its own."""
    count_ptr = tl.load(table + STATUS).to(tl.pointer_type(tl.int32)) + place
    count = tl.load(count_ptr) + 1
    tl.debug_barrier()  # one thread counts, and only when all have read
    tl.store(count_ptr, count)
    return count


@triton.jit
def words_of(table: tl.tensor, device: tl.tensor, num_devices: tl.constexpr) -> tl.tensor:
    """Return a pointer to the i32 words of a device."""
    return tl.load(table + ADDRESSES + num_devices + device).to(tl.pointer_type(tl.int32))


@triton.jit
def is_lost(table: tl.tensor) -> tl.tensor:
    """Whether this device has lost a peer, or was told so."""
    return tl.load(tl.load(table + STATUS).to(tl.pointer_type(tl.int32))) != 0


@triton.jit
def report_loss(table: tl.tensor, num_devices: tl.constexpr) -> None:
    """Tell every device, this one included, that a peer was lost."""
    for peer in tl.static_range(num_devices):
        tl.atomic_xchg(words_of(table, peer, num_devices), 1, sem="release", scope="sys")


@triton.jit
def rounded(total: tl.tensor, partial_ptr: tl.tensor, lost: tl.tensor) -> tl.tensor:
    """As a sum that is an array by itself would be; of a lost peer NaN."""
    total = total.to(partial_ptr.dtype.element_ty).to(tl.float32)
    return tl.where(lost, float("nan"), total)


@triton.jit
def vector(vector_ptr: tl.tensor, columns: tl.tensor, inside: tl.tensor, is_there: tl.constexpr) -> tl.tensor:
    """[width] of what belongs to a sum or a norm, as it is stored; any if there is none."""
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
    """The stream with a rounded sum and its bias, and the norm of that."""
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
    """As `residual_norms` does it."""
    total = tl.where(inside, total, 0.0)
    if is_layer:
        # Columns past the end were zero, and must not count in the second sum.
        total = tl.where(inside, total - tl.sum(total, axis=0) / width, 0.0)
    normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    if has_scale:
        normed *= scale.to(tl.float32)
    if has_bias:
        normed += bias.to(tl.float32)
    return normed
