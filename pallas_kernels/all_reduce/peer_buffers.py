"""Inboxes, in plain Triton: devices write numbers into them that are their own flags, and see them come.

Owns: where inboxes are, what an empty one is, whose turn it is, and how long a device looks for a peer's.
Does not know: what numbers are of, or what is done with them.
Needs Triton, which the extra `triton` installs.

An inbox that is empty is full of ones, all bits of it: a NaN that nobody sends, since senders replace it by
another one. So who reads anything else has what was sent, and no fence or flag needs to travel behind it.
Who has read empties the inbox. This is how NCCL's protocols for short messages work, which spend a flag on
every 8 or 128 bytes.

Plain stores of 16 bytes meet volatile looks. A number of 16 or 32 bits comes as a whole, whatever is beside
it; addresses come from a table, so that the compiler can prove nothing about them; and what empties an inbox
is done when its kernel ends, before that device sends anything in the next one.

An inbox has a place for every other device, by how far that one is ahead in the circle of devices. So a
device that takes itself for all its peers finds what it sends, and waits for nobody.

Two inboxes take turns. A device writes to one for the second time when its launch between the two has ended,
for which every peer has sent something, in whose stream then the launch before that has ended, inbox emptied.
This takes for granted that all launches have equally many programs, which count alike, and at least one row,
in shares one of each; that kernels of a memory do not overlap on a device, be they of a stream or of branches
of a CUDA graph; and that all are told one capacity, in bytes. Then an inbox's places are the same bytes in
all launches, and empty ones are for numbers of any size, so that widths and dtypes may differ.

A peer that does not come is not waited for for ever: after `limit` looks the program writes NaN, and a word
at every device that says so. Programs that begin later look once at each row; those that wait already use up
their own limit. Who reads the word makes new memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.kernel_parts import next_launch, report_loss

RANK, ADDRESSES, PEER_BUFFER_COUNTS = map(
    tl.constexpr, (specs.RANK, specs.ADDRESSES, specs.PEER_BUFFER_COUNTS)
)
EMPTY = tl.constexpr(specs.EMPTY)
OTHER_NAN = tl.constexpr(specs.EMPTY - 1)  # all ones but the last bit


@triton.jit
def begin(table: tl.tensor, program: tl.tensor, num_devices: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which inbox's turn it is, and this device's place."""
    rank = tl.load(table + RANK).to(tl.int32)
    return next_launch(table, PEER_BUFFER_COUNTS + program) & 1, rank


@triton.jit
def as_integers(numbers_ptr: tl.tensor) -> tl.tensor:
    """The pointer, to the bits of numbers."""
    if numbers_ptr.dtype.element_ty.primitive_bitwidth == 16:
        return numbers_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return numbers_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def send(
    numbers: tl.tensor,
    integers_ptr: tl.tensor,
    table: tl.tensor,
    turn: tl.tensor,
    rank: tl.tensor,
    ahead: tl.constexpr,
    place: tl.tensor,
    inside: tl.tensor,
    capacity: tl.constexpr,
    num_devices: tl.constexpr,
) -> None:
    """The bits of numbers to the inbox of who is so far ahead, to `place` there.

    Those of the NaN that an empty inbox is full of go as another one. `integers_ptr` says how large they are.
    """
    numbers = tl.where(numbers == EMPTY, OTHER_NAN, numbers)
    buffer = _peer_buffer_of(
        integers_ptr, table, turn, (rank + ahead) % num_devices, ahead, capacity, num_devices
    )
    tl.store(buffer + place, numbers, mask=inside)


@triton.jit
def receive(
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
    from_three, from_four = from_two, from_two
    if num_devices > 2:
        from_three = _source(own_ptr, table, turn, 2, rank, capacity, num_devices) + start
    if num_devices > 3:
        from_four = _source(own_ptr, table, turn, 3, rank, capacity, num_devices) + start
    num_looks = 0
    is_late = 1
    one = tl.zeros_like(columns).to(own_ptr.dtype.element_ty)
    two, three, four = one, one, one
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
        report_loss(table, num_devices)
    return one, two, three, four, lost


@triton.jit
def columns_of_peer(
    columns: tl.tensor, width: tl.constexpr, peer: tl.constexpr, rank: tl.tensor
) -> tl.tensor:
    """Which columns are there of a peer; none if it is this device."""
    return columns < tl.where(rank == peer, 0, width)


@triton.jit
def _peer_buffer_of(
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
    buffer = _peer_buffer_of(own_ptr, table, turn, rank, ahead, capacity, num_devices)
    source = tl.where(rank == peer, own_ptr.to(tl.int64), buffer.to(tl.int64))
    return tl.multiple_of(source.to(own_ptr.dtype), 16)


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
    reads = columns < width if with_own else columns_of_peer(columns, width, peer, rank)
    return tl.load(source + columns, mask=reads, other=0, volatile=True)


@triton.jit
def _is_late(
    numbers: tl.tensor, columns: tl.tensor, width: tl.constexpr, peer: tl.constexpr, rank: tl.tensor
) -> tl.tensor:
    return (numbers == EMPTY) & columns_of_peer(columns, width, peer, rank)


@triton.jit
def _empty(
    source: tl.tensor, columns: tl.tensor, width: tl.constexpr, peer: tl.constexpr, rank: tl.tensor
) -> None:
    tl.store(source + columns, EMPTY, mask=columns_of_peer(columns, width, peer, rank))
