"""Sums of many rows in plain Triton: each device reads its share of them where its peers have it.

Owns: the body of the kernel in which devices tell each other where their arrays are.
Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Needs Triton, which the extra `triton` installs.

Every device adds up its own share of the rows, norms it, and writes the normed rows to where the peers want
them. So launches begin with a letter, the addresses of their arrays, and none ends before its peers have done
with its arrays. Program p exchanges with the programs p of the peers alone. It counts launches by itself, in
memory that nothing else writes to, so that a replayed graph counts as well. Sums are made in the order of
devices, so that all have the same bits. Programs that are more than run at once begin in the order of their
numbers on every device, and so those that wait for each other run.

A peer that does not come is given up as in `inboxes`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.kernel_parts import (
    added_and_normed,
    is_lost,
    next_launch,
    report_loss,
    rounded,
    vector,
    words_of,
)

RANK, HANDSHAKE_COUNTS, FLAGS = map(tl.constexpr, (specs.RANK, specs.HANDSHAKE_COUNTS, specs.FLAGS))
MAX_PROGRAMS = tl.constexpr(specs.MAX_PROGRAMS)
LANES = tl.constexpr(specs.MAX_DEVICES)  # a power of two


@triton.jit
def shares_by_handshake(
    partial_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    sum_bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    num_rows: tl.tensor,
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
    """Many rows, of which this device adds up its share, and norms.

    Args:
      partial_ptr: [num_devices * num_rows, width], this device's.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], of this device's share, what the sum is added to.
      sum_bias_ptr: [width], added to the rounded sum, and rounded again.
      scale_ptr: [width], of the norm.
      bias_ptr: [width], of the norm.
      sum_ptr: f32[num_rows, width], the stream and the sum.
      normed_ptr: [num_devices * num_rows, width], the norm of everybody's.
      num_rows: of a share.
      width: of a row.
      block: the power of two from there.
      num_devices: that add up.
      is_layer: whether it is a layer norm; else it is the root mean square's.
      has_sum_bias: whether there is one; else its array is any, and not read.
      has_scale: likewise.
      has_bias: likewise.
      eps: of the norm.
      limit: looks at a flag before a peer counts as lost.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    rank = tl.load(table + RANK).to(tl.int32)
    launch = next_launch(table, HANDSHAKE_COUNTS + program)
    lost = is_lost(table)  # a device that waits for nobody lends its arrays to nobody
    for peer in tl.static_range(num_devices):
        if peer != rank:
            handshake = _handshake(table, peer, program, rank, num_devices)
            tl.store(handshake, tl.where(lost, 0, partial_ptr.to(tl.int64)))
            tl.store(handshake + 1, tl.where(lost, 0, normed_ptr.to(tl.int64)))
    tl.debug_barrier()
    _signal(table, FLAGS, program, rank, launch, num_devices)
    lost = _wait(table, FLAGS, program, rank, launch, lost, num_devices, limit)
    tl.debug_barrier()

    sources, targets = (), ()
    for peer in tl.static_range(num_devices):
        handshake = _handshake(table, rank, program, peer, num_devices)
        sources += (_lent_array(handshake, partial_ptr),)  # type: ignore[assignment]
    for step in tl.static_range(1, num_devices):  # in a circle, as of few rows
        handshake = _handshake(table, rank, program, (rank + step) % num_devices, num_devices)
        targets += (_lent_array(handshake + 1, normed_ptr),)  # type: ignore[assignment]
    columns = tl.arange(0, block)
    inside = columns < width
    reached = columns < tl.where(lost, 0, width)
    for row in range(program, num_rows, num_programs):
        whole = (rank * num_rows + row) * width + columns
        total = tl.zeros((block,), tl.float32)
        for peer in tl.static_range(num_devices):
            values = tl.load(sources[peer] + whole, mask=reached, other=0.0, cache_modifier=".cg")
            total += values.to(tl.float32)
        total = rounded(total, partial_ptr, lost)
        share = row * width + columns
        sum_bias = vector(sum_bias_ptr, columns, inside, has_sum_bias)
        scale = vector(scale_ptr, columns, inside, has_scale)
        bias = vector(bias_ptr, columns, inside, has_bias)
        stream = tl.load(stream_ptr + share, mask=inside, other=0.0)
        total, normed = added_and_normed(
            total, stream, sum_bias, scale, bias, partial_ptr, inside, lost,
            width, is_layer, has_sum_bias, has_scale, has_bias, eps,
        )  # fmt: skip
        normed = normed.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + whole, normed, mask=inside)
        for target in tl.static_range(num_devices - 1):
            tl.store(targets[target] + whole, normed, mask=reached)
        tl.store(sum_ptr + share, total, mask=inside)
    tl.debug_barrier()
    done = FLAGS + MAX_PROGRAMS * num_devices
    _signal(table, done, program, rank, launch, num_devices)
    if _wait(
        table, done, program, rank, launch, lost, num_devices, limit
    ):  # also what peers should have written
        for row in range(program, num_devices * num_rows, num_programs):
            nothing = tl.full((block,), float("nan"), normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + row * width + columns, nothing, mask=inside)


@triton.jit
def _handshake(
    table: tl.tensor, to: tl.tensor, program: tl.tensor, sender: tl.tensor, num_devices: tl.constexpr
) -> tl.tensor:
    """Where device `to` finds the two addresses of the arrays of device `sender`."""
    handshakes = words_of(table, to, num_devices) + FLAGS + 2 * MAX_PROGRAMS * num_devices
    return handshakes.to(tl.pointer_type(tl.int64)) + 2 * (program * num_devices + sender)


@triton.jit
def _lent_array(handshake: tl.tensor, own_ptr: tl.tensor) -> tl.tensor:
    """A peer's array; the own one for a peer that lends none, for itself, and for all where it is alone."""
    own, address = own_ptr.to(tl.int64), tl.load(handshake, cache_modifier=".cg")
    return tl.multiple_of(tl.where(address == 0, own, address).to(own_ptr.dtype), 16)


@triton.jit
def _signal(
    table: tl.tensor,
    place: tl.constexpr,
    program: tl.tensor,
    rank: tl.tensor,
    launch: tl.tensor,
    num_devices: tl.constexpr,
) -> None:
    """Set this device's flag at all peers at once; what it wrote before is seen by who sees the flag."""
    peers, is_peer = _peers(rank, num_devices)
    flags = words_of(table, peers, num_devices) + place + program * num_devices + rank
    tl.atomic_xchg(flags, launch, mask=is_peer, sem="release", scope="sys")


@triton.jit
def _wait(
    table: tl.tensor,
    place: tl.constexpr,
    program: tl.tensor,
    rank: tl.tensor,
    launch: tl.tensor,
    lost: tl.tensor,
    num_devices: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """For all peers' flags; whether one is lost, which everybody is told then."""
    peers, is_peer = _peers(rank, num_devices)
    flags = words_of(table, rank, num_devices) + place + program * num_devices + peers
    num_late = _num_late(flags, is_peer, launch)
    num_looks = 0
    while (num_late > 0) & (num_looks < limit) & (lost == 0):
        num_late = _num_late(flags, is_peer, launch)
        num_looks += 1
    lost = lost | (num_late > 0)
    if lost:
        report_loss(table, num_devices)
    return lost


@triton.jit
def _peers(rank: tl.tensor, num_devices: tl.constexpr) -> tl.tensor:
    """Devices, padded with the last one to a power of two, and which of them are others."""
    peers = tl.arange(0, LANES)
    return tl.minimum(peers, num_devices - 1), (peers < num_devices) & (peers != rank)


@triton.jit
def _num_late(flags: tl.tensor, is_peer: tl.tensor, launch: tl.tensor) -> tl.tensor:
    """How many of the peers have not come to this launch."""
    seen = tl.atomic_add(flags, 0, mask=is_peer, sem="acquire", scope="sys")
    return tl.sum(((seen - launch < 0) & is_peer).to(tl.int32), axis=0)
