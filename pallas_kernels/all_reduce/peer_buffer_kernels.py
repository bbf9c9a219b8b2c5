"""Sums through inboxes, in plain Triton: of all rows on all devices, or of a share of them on each.

Owns: the bodies of both kernels, what goes into which inbox, and what becomes of what comes.
Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Needs Triton, which the extra `triton` installs.

How devices find each other's numbers, and what that takes for granted of all launches, is in `inboxes`.

Sums are made in the order of devices, so that all have the same bits. Programs that are more than run at once
begin in the order of their numbers on every device, and none waits for one of a higher number.

Of a peer that is given up sums and normed rows are NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.kernel_parts import added_and_normed, is_lost, rounded, vector
from pallas_kernels.all_reduce.peer_buffers import as_integers, begin, columns_of_peer, receive, send

EMPTY = tl.constexpr(specs.EMPTY)  # a NaN


@triton.jit
def sum_of_rows(
    partial_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    sum_bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    num_devices: tl.constexpr,
    norms: tl.constexpr,
    is_layer: tl.constexpr,
    has_sum_bias: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """All rows on all devices; program p has row p, p + number of programs, and so on.

    Args:
      partial_ptr: [num_rows, width], this device's.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], what the sum is added to; not read unless `norms`.
      sum_bias_ptr: [width], added to the rounded sum, and rounded again; not read unless `norms`.
      scale_ptr: [width], of the norm; not read unless `norms`.
      bias_ptr: [width], of the norm; not read unless `norms`.
      sum_ptr: [num_rows, width], the sum as partial sums are, or, with `norms`, f32, the stream and the sum.
      normed_ptr: [num_rows, width], the stream's norm; not written unless `norms`.
      num_rows: of this launch, at least one, the same everywhere.
      capacity: numbers of this size that a device may leave in an inbox.
      width: of a row.
      block: the power of two from there, and no less than there are threads.
      num_devices: that add up.
      norms: whether the sum goes on to the stream and its norm.
      is_layer: whether it is a layer norm; else it is the root mean square's.
      has_sum_bias: whether there is one; else its array is any, and not read.
      has_scale: likewise.
      has_bias: likewise.
      eps: of the norm.
      limit: looks at an inbox before a peer counts as lost.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    turn, rank = begin(table, program, num_devices)
    columns = tl.arange(0, block)
    inside = columns < width
    partial = as_integers(partial_ptr)

    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        numbers = tl.load(partial + where, mask=inside)
        for ahead in tl.static_range(1, num_devices):  # in step, all write to different ones
            send(numbers, partial, table, turn, rank, ahead, where, inside, capacity, num_devices)
    # All that a row needs is asked for before the first look.
    sum_bias = vector(sum_bias_ptr, columns, inside, has_sum_bias)
    scale = vector(scale_ptr, columns, inside, has_scale)
    bias = vector(bias_ptr, columns, inside, has_bias)
    lost = is_lost(table)
    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        stream = columns
        if norms:
            stream = tl.load(stream_ptr + where, mask=inside, other=0.0)
        total, lost = _sum_of_all(
            partial, partial_ptr, table, turn, row * width, columns, width, rank, lost,
            capacity, num_devices, limit,
        )  # fmt: skip
        if norms:
            total, normed = added_and_normed(
                total, stream, sum_bias, scale, bias, partial_ptr, inside, lost,
                width, is_layer, has_sum_bias, has_scale, has_bias, eps,
            )  # fmt: skip
            tl.store(normed_ptr + where, normed.to(normed_ptr.dtype.element_ty), mask=inside)
        tl.store(sum_ptr + where, total.to(sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def shares_by_peer_buffer(
    partial_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    sum_bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    num_devices: tl.constexpr,
    is_layer: tl.constexpr,
    has_sum_bias: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Each device adds up its share of the rows, norms it, and sends the normed rows to all.

    The first half of the programs adds up, the other one takes in what peers send back.

    Args:
      partial_ptr: [num_devices * num_rows, width], this device's.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], of this device's share, what the sum is added to.
      sum_bias_ptr: [width], added to the rounded sum, and rounded again.
      scale_ptr: [width], of the norm.
      bias_ptr: [width], of the norm.
      sum_ptr: f32[num_rows, width], the stream and the sum.
      normed_ptr: [num_devices * num_rows, width], the norm of everybody's, of as many bytes as partial sums.
      num_rows: of a share, at least one.
      capacity: numbers of this size that a device may leave in an inbox, at least 2 * num_rows * width.
      width: of a row.
      block: the power of two from there, and no less than there are threads.
      num_devices: that add up.
      is_layer: whether it is a layer norm; else it is the root mean square's.
      has_sum_bias: whether there is one; else its array is any, and not read.
      has_scale: likewise.
      has_bias: likewise.
      eps: of the norm.
      limit: looks at an inbox before a peer counts as lost.
    """
    program = tl.program_id(0)
    num_adding = tl.num_programs(0) // 2
    table = table_ptr.to(tl.pointer_type(tl.int64))
    turn, rank = begin(table, program, num_devices)
    columns = tl.arange(0, block)
    inside = columns < width
    partial, all_normed = as_integers(partial_ptr), as_integers(normed_ptr)
    lost = is_lost(table)
    if program < num_adding:
        sum_bias = vector(sum_bias_ptr, columns, inside, has_sum_bias)
        scale = vector(scale_ptr, columns, inside, has_scale)
        bias = vector(bias_ptr, columns, inside, has_bias)
        for row in range(program, num_rows, num_adding):
            where = row * width + columns
            for ahead in tl.static_range(1, num_devices):
                peer = (rank + ahead) % num_devices
                numbers = tl.load(partial + peer * num_rows * width + where, mask=inside)
                send(numbers, partial, table, turn, rank, ahead, where, inside, capacity, num_devices)
        for row in range(program, num_rows, num_adding):
            where = row * width + columns
            own = partial + rank * num_rows * width
            stream = tl.load(stream_ptr + where, mask=inside, other=0.0)
            total, lost = _sum_of_all(
                own, partial_ptr, table, turn, row * width, columns, width, rank, lost,
                capacity, num_devices, limit,
            )  # fmt: skip
            total, normed = added_and_normed(
                total, stream, sum_bias, scale, bias, partial_ptr, inside, lost,
                width, is_layer, has_sum_bias, has_scale, has_bias, eps,
            )  # fmt: skip
            normed = normed.to(normed_ptr.dtype.element_ty)
            numbers = normed.to(partial.dtype.element_ty, bitcast=True)
            place = num_rows * width + where
            for ahead in tl.static_range(1, num_devices):
                send(numbers, partial, table, turn, rank, ahead, place, inside, capacity, num_devices)
            tl.store(normed_ptr + rank * num_rows * width + where, normed, mask=inside)
            tl.store(sum_ptr + where, total, mask=inside)
    else:
        for row in range(program - num_adding, num_rows, num_adding):
            start = (num_rows + row) * width
            one, two, three, four, lost = receive(
                partial, table, turn, start, columns, width, False, rank, lost, capacity, num_devices, limit
            )
            target, share_len = all_normed + row * width, num_rows * width
            _put(target, one, columns, width, 0, rank, lost, share_len)
            _put(target, two, columns, width, 1, rank, lost, share_len)
            if num_devices > 2:
                _put(target, three, columns, width, 2, rank, lost, share_len)
            if num_devices > 3:
                _put(target, four, columns, width, 3, rank, lost, share_len)


@triton.jit
def _sum_of_all(
    own_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    table: tl.tensor,
    turn: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    width: tl.constexpr,
    rank: tl.tensor,
    lost: tl.tensor,
    capacity: tl.constexpr,
    num_devices: tl.constexpr,
    limit: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of every device's numbers of the row that begins at `start`, rounded, and whether a device is lost."""
    one, two, three, four, lost = receive(
        own_ptr, table, turn, start, columns, width, True, rank, lost, capacity, num_devices, limit
    )
    dtype: tl.constexpr = partial_ptr.dtype.element_ty
    total = one.to(dtype, bitcast=True).to(tl.float32) + two.to(dtype, bitcast=True).to(tl.float32)
    if num_devices > 2:
        total += three.to(dtype, bitcast=True).to(tl.float32)
    if num_devices > 3:
        total += four.to(dtype, bitcast=True).to(tl.float32)
    return rounded(total, partial_ptr, lost), lost


@triton.jit
def _put(
    normed_ptr: tl.tensor,
    numbers: tl.tensor,
    columns: tl.tensor,
    width: tl.constexpr,
    peer: tl.constexpr,
    rank: tl.tensor,
    lost: tl.tensor,
    share_len: tl.tensor,
) -> None:
    """A peer's row where it belongs; NaN of one that is lost."""
    target = normed_ptr + peer * share_len + columns
    tl.store(target, tl.where(lost, EMPTY, numbers), mask=columns_of_peer(columns, width, peer, rank))
