"""Sums over devices in plain Triton: devices write to their peers' memory, or read it, and add up.

Owns: the kernels' bodies, for few rows and for many; with both the residual addition of the sum and its norm.
Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Called by: `jax_triton`, which launches them. Needs Triton, which the extra `triton` installs.

Program p exchanges with the programs p of the peers alone. It counts launches by itself (`epoch`), in memory
that nothing else writes to, so that a replayed graph counts as well. Sums are made in the order of devices,
so that all have the same bits. Programs that are more than run at once begin in the order of their numbers on
every device, and so those that wait for each other run.

Few rows: every device pushes its partial sums to all inboxes, and adds up all rows. Two inboxes take turns: a
device writes to one only after its launch before has seen that the peer's has begun, whose stream has then
done with the launch before that. A launch for many rows may have fewer programs, so that counts differ from
program to program; but a row of few is always the same program's, on every device. And all of this takes for
granted that kernels of a stream do not overlap.

Many rows: every device adds up its own share of them, which it reads where its peers have it, and writes the
normed rows to where the peers want them. So launches tell each other their arrays' addresses as they begin,
and none ends before its peers have done with its arrays.

A peer that does not come is not waited for for ever: after `limit` looks the program writes NaN, and a word
at every device that says so; from then on nobody waits. Who reads the word makes new memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs

RANK, STATUS, EPOCHS, ADDRESSES = map(tl.constexpr, (specs.RANK, specs.STATUS, specs.EPOCHS, specs.ADDRESSES))
FLAGS = tl.constexpr(specs.FLAGS)
MAX_PROGRAMS = tl.constexpr(specs.MAX_PROGRAMS)
LANES = tl.constexpr(specs.MAX_DEVICES)  # a power of two


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
    """Few rows, of which program p has p, p + number of programs, and so on.

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
      block: the power of two from there.
      num_devices: that add up.
      norms: whether the sum goes on to the stream and its norm.
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
    epoch = _begin(table, program)
    inbox = (epoch & 1) * num_devices
    columns = tl.arange(0, block)
    inside = columns < width

    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        values = tl.load(partial_ptr + where, mask=inside)
        for step in tl.static_range(1, num_devices):  # in a circle: in step, all write to different ones
            peer = (rank + step) % num_devices
            base = tl.load(table + ADDRESSES + peer).to(partial_ptr.dtype)
            base = tl.multiple_of(base + (inbox + rank) * capacity, 16)
            tl.store(base + where, values, mask=inside)
    tl.debug_barrier()
    lost = _is_lost(table)
    if program < num_rows:
        _tell(table, FLAGS, program, rank, epoch, num_devices)
        lost = _wait(table, FLAGS, program, rank, epoch, lost, num_devices, limit)
    tl.debug_barrier()

    own_inbox = tl.load(table + ADDRESSES + rank)
    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        total = tl.zeros((block,), tl.float32)
        for peer in tl.static_range(num_devices):
            came = own_inbox.to(partial_ptr.dtype) + (inbox + peer) * capacity
            source = tl.where(peer == rank, partial_ptr.to(tl.int64), came.to(tl.int64)).to(partial_ptr.dtype)
            source = tl.multiple_of(source, 16)
            values = tl.load(source + where, mask=inside, other=0.0, cache_modifier=".cg")
            total += values.to(tl.float32)
        total = _rounded(total, partial_ptr, lost)
        if norms:
            if has_sum_bias:
                total = _rounded(total + _vector(sum_bias_ptr, columns, inside), partial_ptr, lost)
            total += tl.load(stream_ptr + where, mask=inside, other=0.0)
            normed = _normed(
                total, scale_ptr, bias_ptr, columns, inside, width, is_layer, has_scale, has_bias, eps
            )
            tl.store(normed_ptr + where, normed.to(normed_ptr.dtype.element_ty), mask=inside)
        tl.store(sum_ptr + where, total.to(sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def shares_of_rows(
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
    epoch = _begin(table, program)
    lost = _is_lost(table)  # a device that waits for nobody lends its arrays to nobody
    for peer in tl.static_range(num_devices):
        if peer != rank:
            letter = _letter(table, peer, program, rank, num_devices)
            tl.store(letter, tl.where(lost, 0, partial_ptr.to(tl.int64)))
            tl.store(letter + 1, tl.where(lost, 0, normed_ptr.to(tl.int64)))
    tl.debug_barrier()
    _tell(table, FLAGS, program, rank, epoch, num_devices)
    lost = _wait(table, FLAGS, program, rank, epoch, lost, num_devices, limit)
    tl.debug_barrier()

    sources, targets = (), ()
    for peer in tl.static_range(num_devices):
        letter = _letter(table, rank, program, peer, num_devices)
        sources += (_told(letter, partial_ptr),)  # type: ignore[assignment]
    for step in tl.static_range(1, num_devices):  # in a circle, as of few rows
        letter = _letter(table, rank, program, (rank + step) % num_devices, num_devices)
        targets += (_told(letter + 1, normed_ptr),)  # type: ignore[assignment]
    columns = tl.arange(0, block)
    inside = columns < width
    reached = columns < tl.where(lost, 0, width)
    for row in range(program, num_rows, num_programs):
        whole = (rank * num_rows + row) * width + columns
        total = tl.zeros((block,), tl.float32)
        for peer in tl.static_range(num_devices):
            values = tl.load(sources[peer] + whole, mask=reached, other=0.0, cache_modifier=".cg")
            total += values.to(tl.float32)
        total = _rounded(total, partial_ptr, lost)
        if has_sum_bias:
            total = _rounded(total + _vector(sum_bias_ptr, columns, inside), partial_ptr, lost)
        share = row * width + columns
        total += tl.load(stream_ptr + share, mask=inside, other=0.0)
        normed = _normed(
            total, scale_ptr, bias_ptr, columns, inside, width, is_layer, has_scale, has_bias, eps
        ).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + whole, normed, mask=inside)
        for target in tl.static_range(num_devices - 1):
            tl.store(targets[target] + whole, normed, mask=reached)
        tl.store(sum_ptr + share, total, mask=inside)
    tl.debug_barrier()
    done = FLAGS + MAX_PROGRAMS * num_devices
    _tell(table, done, program, rank, epoch, num_devices)
    if _wait(
        table, done, program, rank, epoch, lost, num_devices, limit
    ):  # also what peers should have written
        for row in range(program, num_devices * num_rows, num_programs):
            nothing = tl.full((block,), float("nan"), normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + row * width + columns, nothing, mask=inside)


@triton.jit
def _begin(table: tl.tensor, program: tl.tensor) -> tl.tensor:
    """The number of this launch, which the program counts."""
    epoch_ptr = tl.load(table + EPOCHS).to(tl.pointer_type(tl.int32)) + program
    epoch = tl.load(epoch_ptr) + 1
    tl.debug_barrier()  # one thread counts, and only when all have read
    tl.store(epoch_ptr, epoch)
    return epoch


@triton.jit
def _words(table: tl.tensor, device: tl.tensor, num_devices: tl.constexpr) -> tl.tensor:
    return tl.load(table + ADDRESSES + num_devices + device).to(tl.pointer_type(tl.int32))


@triton.jit
def _letter(
    table: tl.tensor, to: tl.tensor, program: tl.tensor, sender: tl.tensor, num_devices: tl.constexpr
) -> tl.tensor:
    """Where device `to` finds the two addresses of the arrays of device `sender`."""
    letters = _words(table, to, num_devices) + FLAGS + MAX_PROGRAMS * (2 * num_devices + 1)
    return letters.to(tl.pointer_type(tl.int64)) + 2 * (program * num_devices + sender)


@triton.jit
def _told(letter: tl.tensor, own_ptr: tl.tensor) -> tl.tensor:
    """A peer's array; the own one for a peer that lends none, for itself, and for all where it is alone."""
    own, told = own_ptr.to(tl.int64), tl.load(letter, cache_modifier=".cg")
    return tl.multiple_of(tl.where(told == 0, own, told).to(own_ptr.dtype), 16)


@triton.jit
def _is_lost(table: tl.tensor) -> tl.tensor:
    return tl.load(tl.load(table + STATUS).to(tl.pointer_type(tl.int32))) != 0


@triton.jit
def _tell(
    table: tl.tensor,
    place: tl.constexpr,
    program: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    num_devices: tl.constexpr,
) -> None:
    """Set this device's flag at all peers at once; what it wrote before is seen by who sees the flag."""
    peers, is_peer = _peers(rank, num_devices)
    flags = _words(table, peers, num_devices) + place + program * num_devices + rank
    tl.atomic_xchg(flags, epoch, mask=is_peer, sem="release", scope="sys")


@triton.jit
def _wait(
    table: tl.tensor,
    place: tl.constexpr,
    program: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    lost: tl.tensor,
    num_devices: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """For all peers' flags; whether one is lost, which everybody is told then."""
    peers, is_peer = _peers(rank, num_devices)
    flags = _words(table, rank, num_devices) + place + program * num_devices + peers
    num_late = _num_late(flags, is_peer, epoch)
    num_looks = 0
    while (num_late > 0) & (num_looks < limit) & (lost == 0):
        num_late = _num_late(flags, is_peer, epoch)
        num_looks += 1
    lost = lost | (num_late > 0)
    if lost:
        for peer in tl.static_range(num_devices):
            tl.atomic_xchg(_words(table, peer, num_devices), 1, sem="release", scope="sys")
    return lost


@triton.jit
def _peers(rank: tl.tensor, num_devices: tl.constexpr) -> tl.tensor:
    """Devices, padded with the last one to a power of two, and which of them are others."""
    peers = tl.arange(0, LANES)
    return tl.minimum(peers, num_devices - 1), (peers < num_devices) & (peers != rank)


@triton.jit
def _num_late(flags: tl.tensor, is_peer: tl.tensor, epoch: tl.tensor) -> tl.tensor:
    """How many of the peers have not come to this launch."""
    seen = tl.atomic_add(flags, 0, mask=is_peer, sem="acquire", scope="sys")
    return tl.sum(((seen - epoch < 0) & is_peer).to(tl.int32), axis=0)


@triton.jit
def _rounded(total: tl.tensor, partial_ptr: tl.tensor, lost: tl.tensor) -> tl.tensor:
    """As a sum that is an array by itself would be."""
    total = total.to(partial_ptr.dtype.element_ty).to(tl.float32)
    return tl.where(lost, float("nan"), total)


@triton.jit
def _vector(vector_ptr: tl.tensor, columns: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(vector_ptr + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(
    total: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    columns: tl.tensor,
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
        normed *= _vector(scale_ptr, columns, inside)
    if has_bias:
        normed += _vector(bias_ptr, columns, inside)
    return normed
