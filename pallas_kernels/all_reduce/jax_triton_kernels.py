"""Sums over devices in plain Triton: each device writes to its peers' memory and adds up what came.

Owns: the kernel's body: push, tell, wait, add up; with it the residual addition and the root-mean-square norm
of the sum. Does not know: JAX, or who allocated the memory; a table of addresses says where it is.
Called by: `jax_triton`, which launches it. Needs Triton, which the extra `triton` installs.

Every launch has the same number of programs. Program p has rows p, p + number of programs, and so on; it
exchanges with the programs p of the peers alone. It counts launches by itself (`epoch`), in memory that
nothing else writes to, so that a replayed graph counts as well. Two inboxes take turns: a device writes to
one only after it has seen that its peer has begun the launch before, whose stream has then done with the
launch before that. Sums are made in the order of devices, so that all have the same bits.

A peer that does not come is not waited for for ever: after `limit` looks the program writes NaN, and a word
at every device that says so; from then on nobody waits. Who reads the word makes new memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.all_reduce import specs

RANK, STATUS, EPOCHS, ADDRESSES = map(tl.constexpr, (specs.RANK, specs.STATUS, specs.EPOCHS, specs.ADDRESSES))
FLAGS = tl.constexpr(specs.FLAGS)


@triton.jit
def sum_of_rows(
    partial_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    num_devices: tl.constexpr,
    norms: tl.constexpr,
    eps: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """The rows of one program; the grid is `specs.NUM_PROGRAMS`.

    Args:
      partial_ptr: [num_rows, width], this device's.
      table_ptr: i32, read as i64: see `specs`.
      stream_ptr: f32[num_rows, width], what the sum is added to; not read unless `norms`.
      scale_ptr: [width], of the norm; not read unless `norms`.
      sum_ptr: [num_rows, width], the sum as partial sums are, or, with `norms`, f32, the stream and the sum.
      normed_ptr: [num_rows, width], the stream's norm; not written unless `norms`.
      num_rows: of this launch, the same everywhere.
      capacity: numbers that a device may leave in an inbox.
      width: of a row.
      block: the power of two from there.
      num_devices: that add up.
      norms: whether the sum goes on to the stream and its norm.
      eps: of the norm.
      limit: looks at a flag before a peer counts as lost.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    rank = tl.load(table + RANK).to(tl.int32)
    epoch_ptr = tl.load(table + EPOCHS).to(tl.pointer_type(tl.int32)) + program
    epoch = tl.load(epoch_ptr) + 1
    tl.store(epoch_ptr, epoch)
    inbox = (epoch & 1) * num_devices
    columns = tl.arange(0, block)
    inside = columns < width

    for row in range(program, num_rows, num_programs):
        where = row * width + columns
        values = tl.load(partial_ptr + where, mask=inside)
        for peer in tl.static_range(num_devices):
            if peer != rank:
                base = tl.load(table + ADDRESSES + peer).to(partial_ptr.dtype)
                base = tl.multiple_of(base + (inbox + rank) * capacity, 16)
                tl.store(base + where, values, mask=inside)
    tl.debug_barrier()

    own_flags = tl.load(table + ADDRESSES + num_devices + rank).to(tl.pointer_type(tl.int32))
    own_status = tl.load(table + STATUS).to(tl.pointer_type(tl.int32))
    lost = tl.load(own_status) != 0
    if program < num_rows:
        for peer in tl.static_range(num_devices):
            if peer != rank:
                flags = tl.load(table + ADDRESSES + num_devices + peer).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(
                    flags + FLAGS + program * num_devices + rank, epoch, sem="release", scope="sys"
                )
        for peer in tl.static_range(num_devices):
            if peer != rank:
                flag = own_flags + FLAGS + program * num_devices + peer
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                num_looks = 0
                while (seen - epoch < 0) & (num_looks < limit) & (lost == 0):
                    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                    num_looks += 1
                lost = lost | (seen - epoch < 0)
        if lost:
            for peer in tl.static_range(num_devices):
                flags = tl.load(table + ADDRESSES + num_devices + peer).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(flags, 1, sem="release", scope="sys")
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
        # Rounded as a sum that is an array by itself would be.
        total = total.to(partial_ptr.dtype.element_ty).to(tl.float32)
        total = tl.where(lost, float("nan"), total)
        if norms:
            total += tl.load(stream_ptr + where, mask=inside, other=0.0)
            total = tl.where(inside, total, 0.0)
            inverse = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
            scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            normed = total * inverse * scale
            tl.store(normed_ptr + where, normed.to(normed_ptr.dtype.element_ty), mask=inside)
        tl.store(sum_ptr + where, total.to(sum_ptr.dtype.element_ty), mask=inside)
