"""Sums of few rows in plain Triton: devices write numbers into each other's inboxes, and see them come.

Owns: the bodies of the kernels in which all devices add up all rows, or each its share of them.
Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Called by: `jax_triton`, which launches them. Needs Triton, which the extra `triton` installs.

An inbox that is empty is full of ones, all bits of it: a NaN that nobody sends, since senders replace it by
another one. So a number is its own flag: who reads anything else has what was sent, and no fence or flag
needs to travel behind it. Who has read empties the inbox. This is how NCCL's protocols for short messages
work, which spend a flag on every 8 or 128 bytes.

An inbox has a place for every other device, by how far that one is ahead in the circle of devices. So a
device that takes itself for all its peers finds what it sends, and waits for nobody.

Two inboxes take turns. A device writes to one for the second time when its launch between the two has ended,
for which every peer has sent something, in whose stream then the launch before that has ended, inbox emptied.
This takes for granted that all launches have equally many programs, which count alike, that kernels of a
stream do not overlap, and that a memory is for rows of one width.

Sums are made in the order of devices, so that all have the same bits. Programs that are more than run at once
begin in the order of their numbers on every device, and none waits for one of a higher number.

A peer that does not come is not waited for for ever: after `limit` looks the program writes NaN, and a word
at every device that says so; from then on nobody waits. Who reads the word makes new memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.kernel_parts import (
    is_lost,
    next_launch,
    normed_row,
    rounded,
    tell_of_loss,
    vector,
)

RANK, ADDRESSES, TURNS = map(tl.constexpr, (specs.RANK, specs.ADDRESSES, specs.TURNS))
EMPTY = tl.constexpr(specs.EMPTY)
OTHER_NAN = tl.constexpr(specs.EMPTY - 1)  # all ones but the last bit


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
      num_rows: of this launch, the same everywhere.
      capacity: numbers that a device may leave in an inbox.
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
    turn, rank = _begin(table, program, num_devices)
    columns = tl.arange(0, block)
    inside = columns < width
    partial = _as_integers(partial_ptr)

    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        numbers = _can_be_sent(tl.load(partial + where, mask=inside))
        for ahead in tl.static_range(1, num_devices):  # in step, all write to different ones
            inbox = _inbox(partial, table, turn, (rank + ahead) % num_devices, ahead, capacity, num_devices)
            tl.store(inbox + where, numbers, mask=inside)
    # All that a row needs is asked for before the first look.
    sum_bias = vector(sum_bias_ptr, columns, inside, has_sum_bias)
    scale = vector(scale_ptr, columns, inside, has_scale)
    bias = vector(bias_ptr, columns, inside, has_bias)
    lost = is_lost(table)
    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        before = columns
        if norms:
            before = tl.load(stream_ptr + where, mask=inside, other=0.0)
        total, lost = _sum_of_all(
            partial,
            partial_ptr,
            table,
            turn,
            row * width,
            columns,
            width,
            rank,
            lost,
            capacity,
            num_devices,
            limit,
        )
        if norms:
            if has_sum_bias:
                total = rounded(total + sum_bias.to(tl.float32), partial_ptr, lost)
            total += before
            normed = normed_row(total, scale, bias, inside, width, is_layer, has_scale, has_bias, eps)
            tl.store(normed_ptr + where, normed.to(normed_ptr.dtype.element_ty), mask=inside)
        tl.store(sum_ptr + where, total.to(sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def shares_by_inbox(
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
      num_rows: of a share.
      capacity: numbers that a device may leave in an inbox, at least 2 * num_rows * width.
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
    turn, rank = _begin(table, program, num_devices)
    columns = tl.arange(0, block)
    inside = columns < width
    partial, all_normed = _as_integers(partial_ptr), _as_integers(normed_ptr)
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
                inbox = _inbox(partial, table, turn, peer, ahead, capacity, num_devices)
                tl.store(inbox + where, _can_be_sent(numbers), mask=inside)
        for row in range(program, num_rows, num_adding):
            where = row * width + columns
            own = partial + rank * num_rows * width
            before = tl.load(stream_ptr + where, mask=inside, other=0.0)
            total, lost = _sum_of_all(
                own,
                partial_ptr,
                table,
                turn,
                row * width,
                columns,
                width,
                rank,
                lost,
                capacity,
                num_devices,
                limit,
            )
            if has_sum_bias:
                total = rounded(total + sum_bias.to(tl.float32), partial_ptr, lost)
            total += before
            normed = normed_row(total, scale, bias, inside, width, is_layer, has_scale, has_bias, eps).to(
                normed_ptr.dtype.element_ty
            )
            numbers = _can_be_sent(normed.to(partial.dtype.element_ty, bitcast=True))
            for ahead in tl.static_range(1, num_devices):
                peer = (rank + ahead) % num_devices
                inbox = _inbox(partial, table, turn, peer, ahead, capacity, num_devices)
                tl.store(inbox + num_rows * width + where, numbers, mask=inside)
            tl.store(normed_ptr + rank * num_rows * width + where, normed, mask=inside)
            tl.store(sum_ptr + where, total, mask=inside)
    else:
        for row in range(program - num_adding, num_rows, num_adding):
            taken = (num_rows + row) * width
            one, two, three, four, lost = _taken(
                partial, table, turn, taken, columns, width, False, rank, lost, capacity, num_devices, limit
            )
            target, share_len = all_normed + row * width, num_rows * width
            _put(target, one, columns, width, 0, rank, lost, share_len)
            _put(target, two, columns, width, 1, rank, lost, share_len)
            if num_devices > 2:
                _put(target, three, columns, width, 2, rank, lost, share_len)
            if num_devices > 3:
                _put(target, four, columns, width, 3, rank, lost, share_len)


@triton.jit
def _begin(table: tl.tensor, program: tl.tensor, num_devices: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which inbox's turn it is, and this device's place."""
    rank = tl.load(table + RANK).to(tl.int32)
    return next_launch(table, TURNS + program) & 1, rank


@triton.jit
def _as_integers(numbers_ptr: tl.tensor) -> tl.tensor:
    """The pointer, to the bits of numbers."""
    if numbers_ptr.dtype.element_ty.primitive_bitwidth == 16:
        return numbers_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return numbers_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _can_be_sent(numbers: tl.tensor) -> tl.tensor:
    return tl.where(numbers == EMPTY, OTHER_NAN, numbers)


@triton.jit
def _inbox(
    integers_ptr: tl.tensor,
    table: tl.tensor,
    turn: tl.tensor,
    device: tl.tensor,
    ahead: tl.tensor,
    capacity: tl.constexpr,
    num_devices: tl.constexpr,
) -> tl.tensor:
    """Where who is so far behind `device` leaves what it sends."""
    place = (turn * (num_devices - 1) + ahead - 1) * capacity
    return tl.multiple_of(tl.load(table + ADDRESSES + device).to(integers_ptr.dtype) + place, 16)


@triton.jit
def _source(
    own_ptr: tl.tensor,
    table: tl.tensor,
    turn: tl.tensor,
    peer: tl.constexpr,
    rank: tl.tensor,
    capacity: tl.constexpr,
    num_devices: tl.constexpr,
) -> tl.tensor:
    """Where the numbers of a device are: in this one's inbox, or its own."""
    ahead = (rank - peer + num_devices) % num_devices
    inbox = _inbox(own_ptr, table, turn, rank, ahead, capacity, num_devices)
    source = tl.where(rank == peer, own_ptr.to(tl.int64), inbox.to(tl.int64))
    return tl.multiple_of(source.to(own_ptr.dtype), 16)


@triton.jit
def _others(columns: tl.tensor, width: tl.constexpr, peer: tl.constexpr, rank: tl.tensor) -> tl.tensor:
    """Which columns are a peer's; none if it is this device."""
    return columns < tl.where(rank == peer, 0, width)


@triton.jit
def _look(
    source: tl.tensor,
    columns: tl.tensor,
    width: tl.constexpr,
    peer: tl.constexpr,
    rank: tl.tensor,
    with_own: tl.constexpr,
) -> tl.tensor:
    """What there is of a device's numbers; zeros in place of the own ones, unless they are asked for."""
    reads = columns < width if with_own else _others(columns, width, peer, rank)
    return tl.load(source + columns, mask=reads, other=0, volatile=True)


@triton.jit
def _is_late(
    numbers: tl.tensor, columns: tl.tensor, width: tl.constexpr, peer: tl.constexpr, rank: tl.tensor
) -> tl.tensor:
    return (numbers == EMPTY) & _others(columns, width, peer, rank)


@triton.jit
def _empty(
    source: tl.tensor, columns: tl.tensor, width: tl.constexpr, peer: tl.constexpr, rank: tl.tensor
) -> None:
    tl.store(source + columns, EMPTY, mask=_others(columns, width, peer, rank))


@triton.jit
def _taken(
    own_ptr: tl.tensor,
    table: tl.tensor,
    turn: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    width: tl.constexpr,
    with_own: tl.constexpr,
    rank: tl.tensor,
    lost: tl.tensor,
    capacity: tl.constexpr,
    num_devices: tl.constexpr,
    limit: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Every device's numbers of the row at `start`, in the order of devices, and whether a device is lost.

    All are looked at at once, again and again. A thread uses what it has seen itself, so that no number may
    be two threads'. Past the last device they are any.
    """
    from_one = _source(own_ptr, table, turn, 0, rank, capacity, num_devices) + start
    from_two = _source(own_ptr, table, turn, 1, rank, capacity, num_devices) + start
    from_three = from_two
    from_four = from_two
    if num_devices > 2:
        from_three = _source(own_ptr, table, turn, 2, rank, capacity, num_devices) + start
    if num_devices > 3:
        from_four = _source(own_ptr, table, turn, 3, rank, capacity, num_devices) + start
    num_looks = 0
    is_late = 1
    one = tl.zeros_like(columns).to(own_ptr.dtype.element_ty)
    two = one
    three = one
    four = one
    while (is_late > 0) & (num_looks < limit):
        one = _look(from_one, columns, width, 0, rank, with_own)
        two = _look(from_two, columns, width, 1, rank, with_own)
        if num_devices > 2:
            three = _look(from_three, columns, width, 2, rank, with_own)
        if num_devices > 3:
            four = _look(from_four, columns, width, 3, rank, with_own)
        late = _is_late(one, columns, width, 0, rank) | _is_late(two, columns, width, 1, rank)
        if num_devices > 2:
            late |= _is_late(three, columns, width, 2, rank)
        if num_devices > 3:
            late |= _is_late(four, columns, width, 3, rank)
        is_late = tl.max(late.to(tl.int32), axis=0)
        num_looks = tl.where(lost, limit, num_looks + 1)
    _empty(from_one, columns, width, 0, rank)
    _empty(from_two, columns, width, 1, rank)
    if num_devices > 2:
        _empty(from_three, columns, width, 2, rank)
    if num_devices > 3:
        _empty(from_four, columns, width, 3, rank)
    lost = lost | (is_late > 0)
    if lost:
        tell_of_loss(table, num_devices)
    return one, two, three, four, lost


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
    one, two, three, four, lost = _taken(
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
    tl.store(target, tl.where(lost, EMPTY, numbers), mask=_others(columns, width, peer, rank))
