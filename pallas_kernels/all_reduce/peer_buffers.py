"""Peer buffers in plain Triton: devices write numbers to them, and each number is its own arrival flag.

Owns: where peer buffers are, the empty value, which buffer is next, and how long a device polls for a peer.
Does not know: what the numbers mean, or what is done with them. Called by: `peer_buffer_kernels`.
Needs Triton, which the extra `triton` installs.

All bits of an empty place are ones. This is a NaN that is never sent: senders replace it by another NaN. Any
other value is data that has arrived, so no fence or flag has to follow it. The reader empties the place
again. NCCL's protocols for short messages work like this, but spend a flag on every 8 or 128 bytes.

Senders use plain stores of 16 bytes, receivers volatile loads. This is safe for three reasons. A number of 16
or 32 bits arrives whole, whatever its neighbours do. Addresses come from a table, so the compiler can prove
nothing about them. The stores that empty a buffer are complete when their kernel ends, before that device
sends anything in the next one.

A buffer has one region for each other device, indexed by that device's distance ahead on the ring of
devices. So a device that is its own peer receives what it sends, and waits for no other.

Two buffers alternate. A device writes to a buffer again only after its launch in between has ended. In that
launch it received data from every peer, and so each peer had ended the launch before and emptied the buffer.
This requires:

- All launches have the same number of programs, so that their counters agree.
- Every launch has at least one row; in shares, at least one row per device.
- Kernels on one memory do not overlap on a device, whether in a stream or in branches of a CUDA graph.
- All launches pass the same capacity in bytes. Then a region is the same bytes in every launch. An empty
  place is empty for numbers of any size, so widths and dtypes may differ.

Waiting for a peer is bounded: after `limit` polls the program writes NaN, and sets a status word on every
device. Programs that start later poll each row once; programs that already wait use up their own limit. The
host that reads the status must create new memory.
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
    """Return the index of the buffer for this launch, and this device's rank."""
    rank = tl.load(table + RANK).to(tl.int32)
    return next_launch(table, PEER_BUFFER_COUNTS + program) & 1, rank


@triton.jit
def as_integers(numbers_ptr: tl.tensor) -> tl.tensor:
    """Return the pointer as a pointer to integers of the same size."""
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
    """Store the bits of `numbers` at `place` in the buffer of the device `ahead` steps further.

    The NaN that marks an empty place is replaced by another NaN. `integers_ptr` gives the size of a number.
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
    """Return all devices' numbers of the row at `start`, in device order, and whether a device is lost.

    All numbers are polled together. A thread uses the values that it loaded itself, so no two threads may
    share a number. Results past the last device are arbitrary.
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
    """Return the mask of a peer's columns; it is empty if the peer is this device."""
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
    """Return where the device `ahead` steps behind `device` writes in the buffer of `device`."""
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
    """Return where the numbers of `peer` are: in this device's buffer, or its own array for itself."""
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
    """Load a device's numbers; zeros for this device's own, unless `with_own`."""
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
