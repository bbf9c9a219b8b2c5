"""All-reduce of many rows in plain Triton: each device reads its share directly from the peers' arrays.

Owns: the body of the kernel in which devices exchange the addresses of their arrays (the handshake).
Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Called by: `jax_triton`. Needs Triton, which the extra `triton` installs.

Every device sums and norms its share of the rows, and writes the normed rows into the peers' arrays. So a
launch starts with a handshake, in which it sends the addresses of its arrays. It does not end before its
peers are done with these arrays. Program p exchanges only with program p of each peer. It counts launches in
memory that nothing else writes to, so a replayed CUDA graph counts as well.

Sums are made in device order, so all devices get the same bits. If more programs are launched than run
concurrently, they start in order of their index on every device, so programs that wait for each other run.

A lost peer is given up as in `peer_buffers`.
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
    """Sum and norm this device's share of many rows, and write the normed rows to all peers.

    Args:
      partial_ptr: [num_devices * num_rows, width], this device's partial sums.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], this device's share, to which the sum is added.
      sum_bias_ptr: [width], added to the rounded sum, which is rounded again.
      scale_ptr: [width], the norm's scale.
      bias_ptr: [width], the norm's bias.
      sum_ptr: f32[num_rows, width], stream plus sum.
      normed_ptr: [num_devices * num_rows, width], the norm of all shares.
      num_rows: rows of a share.
      width: numbers of a row.
      block: `width` rounded up to a power of two.
      num_devices: number of devices.
      is_layer: whether the norm is a layer norm; otherwise it is an RMS norm.
      has_sum_bias: whether there is a bias of the sum; otherwise its array is not read.
      has_scale: whether the norm has a scale; otherwise its array is not read.
      has_bias: whether the norm has a bias; otherwise its array is not read.
      eps: epsilon of the norm.
      limit: polls of a flag before a peer counts as lost.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    rank = tl.load(table + RANK).to(tl.int32)
    launch = next_launch(table, HANDSHAKE_COUNTS + program)
    lost = is_lost(table)  # a device that no longer waits for peers must not lend them its arrays
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
    for step in tl.static_range(1, num_devices):  # around the ring of devices, as for few rows
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
    """Return where device `to` finds the two array addresses of device `sender`."""
    handshakes = words_of(table, to, num_devices) + FLAGS + 2 * MAX_PROGRAMS * num_devices
    return handshakes.to(tl.pointer_type(tl.int64)) + 2 * (program * num_devices + sender)


@triton.jit
def _lent_array(handshake: tl.tensor, own_ptr: tl.tensor) -> tl.tensor:
    """Return a peer's array, or the own array where the address is 0.

    It is 0 for a peer that lends none, for this device itself, and for all peers of a device that runs alone.
    """
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
    """Set this device's flag at all peers at once. A peer that sees the flag sees all earlier writes."""
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
    """Wait for all peers' flags; return whether a peer is lost. A loss is reported to all devices."""
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
    """Return all devices, padded with the last one to a power of two, and the mask of the peers."""
    peers = tl.arange(0, LANES)
    return tl.minimum(peers, num_devices - 1), (peers < num_devices) & (peers != rank)


@triton.jit
def _num_late(flags: tl.tensor, is_peer: tl.tensor, launch: tl.tensor) -> tl.tensor:
    """Return the number of peers that have not reached this launch."""
    seen = tl.atomic_add(flags, 0, mask=is_peer, sem="acquire", scope="sys")
    return tl.sum(((seen - launch < 0) & is_peer).to(tl.int32), axis=0)
