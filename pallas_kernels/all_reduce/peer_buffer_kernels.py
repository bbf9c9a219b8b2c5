"""All-reduce through peer buffers in plain Triton: each device sums all rows, or a share of them.

Owns: the bodies of both kernels: what is sent where, and how the received rows are used.
Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Called by: `jax_triton`. Needs Triton, which the extra `triton` installs.

`peer_buffers` describes how devices exchange numbers, and what that requires of all launches.

Sums are made in device order, so all devices get the same bits. If more programs are launched than run
concurrently, they start in order of their index on every device, and no program waits for a higher index.

If a peer is lost, sums and normed rows are NaN.
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
    """Sum all rows on every device; program p has rows p, p + number of programs, and so on.

    Args:
      partial_ptr: [num_rows, width], this device's partial sums.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], to which the sum is added; not read unless `norms`.
      sum_bias_ptr: [width], added to the rounded sum, which is rounded again; not read unless `norms`.
      scale_ptr: [width], the norm's scale; not read unless `norms`.
      bias_ptr: [width], the norm's bias; not read unless `norms`.
      sum_ptr: [num_rows, width], the sum in the dtype of `partial_ptr`; with `norms`, f32, stream plus sum.
      normed_ptr: [num_rows, width], the norm of stream plus sum; not written unless `norms`.
      num_rows: rows of this launch, at least one, the same on all devices.
      capacity: numbers of this size that a device may write to a peer's buffer.
      width: numbers of a row.
      block: `width` rounded up to a power of two, at least the number of threads.
      num_devices: number of devices.
      norms: whether the sum is added to the stream and normed.
      is_layer: whether the norm is a layer norm; otherwise it is an RMS norm.
      has_sum_bias: whether there is a bias of the sum; otherwise its array is not read.
      has_scale: whether the norm has a scale; otherwise its array is not read.
      has_bias: whether the norm has a bias; otherwise its array is not read.
      eps: epsilon of the norm.
      limit: polls of a peer buffer before a peer counts as lost.
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
        for ahead in tl.static_range(1, num_devices):  # devices in step write to different peers
            send(numbers, partial, table, turn, rank, ahead, where, inside, capacity, num_devices)
    # Issue all loads that a row needs before the first poll.
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
    """Sum and norm this device's share of the rows, and send the normed rows to all peers.

    The first half of the programs sums; the second half receives the peers' normed rows.

    Args:
      partial_ptr: [num_devices * num_rows, width], this device's partial sums.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], this device's share, to which the sum is added.
      sum_bias_ptr: [width], added to the rounded sum, which is rounded again.
      scale_ptr: [width], the norm's scale.
      bias_ptr: [width], the norm's bias.
      sum_ptr: f32[num_rows, width], stream plus sum.
      normed_ptr: [num_devices * num_rows, width], the norm of all shares; numbers as large as partial sums.
      num_rows: rows of a share, at least one.
      capacity: numbers of this size that a device may write to a peer's buffer; 2 * num_rows * width or more.
      width: numbers of a row.
      block: `width` rounded up to a power of two, at least the number of threads.
      num_devices: number of devices.
      is_layer: whether the norm is a layer norm; otherwise it is an RMS norm.
      has_sum_bias: whether there is a bias of the sum; otherwise its array is not read.
      has_scale: whether the norm has a scale; otherwise its array is not read.
      has_bias: whether the norm has a bias; otherwise its array is not read.
      eps: epsilon of the norm.
      limit: polls of a peer buffer before a peer counts as lost.
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
    """Return the rounded sum of all devices' rows at `start`, and whether a device is lost."""
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
    """Store a peer's row in its share of `normed_ptr`; NaN if a device is lost."""
    target = normed_ptr + peer * share_len + columns
    tl.store(target, tl.where(lost, EMPTY, numbers), mask=columns_of_peer(columns, width, peer, rank))
