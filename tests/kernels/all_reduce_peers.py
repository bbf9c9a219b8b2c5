"""The all-reduce kernels in Triton's interpreter; devices are processes that share memory.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.all_reduce_peers 2

This is a separate program like `triton_interpreter`, which also explains why there is no bfloat16. Processes
wait for each other as devices do, each at its own pace.
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
import random
import sys
import time
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
from triton.runtime.interpreter import interpreter_builder

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.handshake_kernels import shares_by_handshake
from pallas_kernels.all_reduce.peer_buffer_kernels import shares_by_peer_buffer, sum_of_rows
from tests.kernels.triton_interpreter import HostTensor, patch_the_language_once

WIDTH, MAX_ROWS = 40, 12
NUM_DEVICES = int(sys.argv[1])
NUM_PROGRAMS = 8  # programs of a launch; the layout allows `specs.MAX_PROGRAMS`
CAPACITY = WIDTH * MAX_ROWS * 4  # bytes, in launches of either dtype
EPS = 1e-5
VECTORS = ("sum_bias", "scale", "bias")  # in the order of the kernels' arguments
MAX_SHARED = WIDTH * 36
DEADLINE_S = 600


class Memory:
    """Memory of one device: peer buffers, words, and the arrays of a launch that its peers access."""

    def __init__(self) -> None:
        """Allocate empty peer buffers and zeros, at the same addresses in all child processes."""
        self.peer_buffers = shared(specs.peer_buffers_len(NUM_DEVICES, CAPACITY), "int8")
        self.peer_buffers[:] = specs.EMPTY
        self.words = shared(specs.words_len(NUM_DEVICES), "int32")
        self.partial, self.normed = shared(MAX_SHARED, "float32"), shared(MAX_SHARED, "float32")


def shared(size: int, dtype: str) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size * np.dtype(dtype).itemsize), dtype)


def seen_by_peers(place: np.ndarray, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Return an array in the memory of `place`, which must be large enough."""
    return place.view(dtype)[: shape[0] * shape[1]].reshape(shape)


def values_of(launch: int, rank: int, num_rows: int, dtype: str) -> np.ndarray:
    """Draw partial sums; those of device 1 contain some NaN that look like empty places."""
    values = np.random.default_rng((launch, rank)).normal(size=(num_rows, WIDTH)).astype(dtype)
    if rank == 1 and launch % 3 == 2:
        values.view(f"int{8 * values.itemsize}")[-1, launch] = specs.EMPTY
    return values


class Norm(NamedTuple):
    """Norm after a sum; `arrays` names the present ones of `VECTORS`."""

    kind: str
    arrays: tuple[str, ...]


RMS, LAYER = Norm("rms", ("scale",)), Norm("layer", VECTORS)
OTHERS = Norm("layer", ()), Norm("rms", ("sum_bias",)), Norm("layer", ("bias",))
WHOLE, PEER_BUFFER, HANDSHAKE = "all rows everywhere", "shares by peer buffer", "shares by handshake"
# Rows, norm and kernel of each launch. There are fewer and more rows than programs, and more rows than peer
# buffers hold. Every norm runs in each kernel, also with a sum's bias in float16 (odd positions), which
# rounds. An odd number of handshake launches has fewer programs than the next peer-buffer launches receive
# with. If their counters were shared, these would look for normed rows in the other buffer.
LAUNCHES = (
    (1, None, WHOLE), (12, RMS, WHOLE), (3, None, WHOLE), (9, LAYER, WHOLE), (12, RMS, HANDSHAKE),
    (12, OTHERS[1], WHOLE), (11, LAYER, WHOLE), (36, LAYER, HANDSHAKE), (12, OTHERS[0], HANDSHAKE),
    (1, OTHERS[0], WHOLE), (8, OTHERS[2], WHOLE), (24, OTHERS[1], HANDSHAKE), (2, None, WHOLE),
    (12, OTHERS[2], HANDSHAKE), (12, LAYER, PEER_BUFFER), (12, RMS, WHOLE), (12, OTHERS[2], PEER_BUFFER),
    (12, OTHERS[1], PEER_BUFFER), (12, OTHERS[0], PEER_BUFFER), (12, LAYER, WHOLE), (12, RMS, PEER_BUFFER),
)  # fmt: skip


def vectors_of(number: int, norm: Norm | None, dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays of a launch's norm; missing ones hold NaN, which a wrong read would show."""
    found = {name: np.full(WIDTH, np.nan, dtype) for name in VECTORS}
    for name in () if norm is None else norm.arrays:
        found[name] = values_of(number, 7 + VECTORS.index(name), 1, dtype)[0]
    return found


def flags_of(norm: Norm | None) -> dict[str, Any]:
    """Return a kernel's arguments that describe the norm."""
    has = {f"has_{name}": norm is not None and name in norm.arrays for name in VECTORS}
    return has | {"is_layer": norm is not None and norm.kind == "layer", "eps": EPS}


def launch(
    rank: int, table: np.ndarray, number: int, num_rows: int, dtype: str, *, norm: Norm | None, limit: int,
    num_programs: int = NUM_PROGRAMS,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run one device's part of a launch for few rows; return sums and normed rows."""
    assert num_rows <= MAX_ROWS, "more than peer buffers hold"
    partial = values_of(number, rank, num_rows, dtype)
    stream = values_of(number, 6, num_rows, "float32")
    total = np.full(partial.shape, -7, dtype if norm is None else "float32")
    normed = np.full(1 if norm is None else partial.shape, -7, dtype)
    vectors = vectors_of(number, norm, dtype).values()
    sum_of_rows[(num_programs,)](
        *map(HostTensor, (partial, table.view(np.int32), stream, *vectors, total, normed)),
        num_rows=num_rows, capacity=CAPACITY // partial.itemsize, width=WIDTH, block=64,
        num_devices=NUM_DEVICES, norms=norm is not None, limit=limit, **flags_of(norm),
    )  # fmt: skip
    return total, normed


def launch_shares(
    rank: int, memory: Memory, table: np.ndarray, number: int, num_rows: int, dtype: str, *, norm: Norm,
    by: str, limit: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run one device's part of a launch in shares; return its share of sums, and all normed rows."""
    partial = seen_by_peers(memory.partial, (num_rows, WIDTH), dtype)
    normed = seen_by_peers(memory.normed, (num_rows, WIDTH), dtype)
    # This overwrites what a peer wrote before this device started, so an early write would show.
    partial[:], normed[:] = values_of(number, rank, num_rows, dtype), -7
    share = np.array_split(values_of(number, 6, num_rows, "float32"), NUM_DEVICES)[rank]
    total = np.full(share.shape, -7, "float32")
    vectors = vectors_of(number, norm, dtype).values()
    num_programs = min(NUM_PROGRAMS, num_rows // NUM_DEVICES)  # so that counts of programs differ
    run: Any = shares_by_handshake[(num_programs,)]
    if by == PEER_BUFFER:
        assert num_rows <= MAX_ROWS, "more than peer buffers hold"
        run = functools.partial(shares_by_peer_buffer[(NUM_PROGRAMS,)], capacity=CAPACITY // partial.itemsize)
    run(
        *map(HostTensor, (partial, table.view(np.int32), share, *vectors, total, normed)),
        num_rows=num_rows // NUM_DEVICES, width=WIDTH, block=64, num_devices=NUM_DEVICES, limit=limit,
        **flags_of(norm),
    )  # fmt: skip
    normed = normed.copy()
    partial[:] = -9  # a late read by a peer would show, too
    return total, normed


def expected_of(
    number: int, num_rows: int, dtype: str, norm: Norm | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Compute with numpy the sum in device order, rounded once; or stream plus sum, and its norm."""
    total = sum(values_of(number, peer, num_rows, dtype).astype("float32") for peer in range(NUM_DEVICES))
    total = total.astype(dtype)
    if norm is None:
        return total, None
    vectors = {name: vectors_of(number, norm, dtype)[name] for name in norm.arrays}
    total = total + vectors.get("sum_bias", np.zeros(WIDTH, dtype))
    stream = total.astype("float32") + values_of(number, 6, num_rows, "float32")
    wide = stream.astype("float64")
    if norm.kind == "layer":
        wide = wide - wide.mean(axis=1, keepdims=True)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS)
    return stream, normed * vectors.get("scale", 1) + vectors.get("bias", 0)


def launch_any(
    rank: int, memory: Memory, table: np.ndarray, number: int, num_rows: int, dtype: str, *, by: str,
    **arguments: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run `launch` or `launch_shares`."""
    if by == WHOLE:
        return launch(rank, table, number, num_rows, dtype, **arguments)
    return launch_shares(rank, memory, table, number, num_rows, dtype, by=by, **arguments)


def dtype_of(number: int) -> str:
    return ("float32", "float16")[number % 2]


def check(
    rank: int, memory: Memory, table: np.ndarray, number: int, num_rows: int, norm: Norm | None, by: str,
    **arguments: Any,
) -> None:  # fmt: skip
    """Compare a launch with numpy."""
    dtype = dtype_of(number)
    expected, normed = expected_of(number, num_rows, dtype, norm)
    if by != WHOLE:
        expected = np.array_split(expected, NUM_DEVICES)[rank]
    arguments |= {"norm": norm, "by": by, "limit": specs.LIMIT}
    found = launch_any(rank, memory, table, number, num_rows, dtype, **arguments)
    np.testing.assert_array_equal(found[0], expected)
    if norm is not None:
        np.testing.assert_allclose(found[1], normed, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-5)


class Looks:
    """Volatile loads of the interpreter: polls of one device's numbers of a row.

    Attributes:
      count: number of polls.
      pauses: random source of pauses; None means no pauses.
    """

    def __init__(self) -> None:
        """Start to count polls."""
        self.count = 0
        self.pauses: random.Random | None = None
        load = interpreter_builder.create_masked_load

        def count_and_load(*arguments: Any) -> Any:
            if arguments[-1]:
                self.count += 1
                if self.pauses is not None:
                    time.sleep(self.pauses.choice((0,) * 15 + (0.1,)))
            return load(*arguments)

        interpreter_builder.create_masked_load = count_and_load


def pause_between_programs(pauses: random.Random) -> None:
    """Let a peer start the next launch while this device is in the middle of one."""
    begin = interpreter_builder.set_grid_idx

    def pause_and_begin(*place: int) -> None:
        time.sleep(pauses.choice((0, 0, 0, 0.1)))
        begin(*place)

    interpreter_builder.set_grid_idx = pause_and_begin


def table_of(rank: int, memories: list[Memory]) -> np.ndarray:
    """Return a device's table of all devices' memory."""
    peer_buffers = [memory.peer_buffers.ctypes.data for memory in memories]
    words = [memory.words.ctypes.data for memory in memories]
    return np.array(specs.table_row(rank, peer_buffers, words), np.int64)


def assert_nothing_is_left(memory: Memory) -> None:
    """Check that no device is lost, and that all received data was consumed."""
    assert memory.words[0] == 0
    assert (memory.peer_buffers == specs.EMPTY).all()


def run_alone(rank: int) -> None:
    """Run all launches of a device that is its own peer, as in initial memory: none waits."""
    memory = Memory()
    memory.words[specs.FLAGS : specs.handshakes_index(NUM_DEVICES)] = 1 << 30
    table = table_of(rank, [memory] * NUM_DEVICES)
    for number, (num_rows, norm, by) in enumerate(LAUNCHES):
        launch_any(rank, memory, table, number, num_rows, dtype_of(number), norm=norm, by=by, limit=1)
    assert_nothing_is_left(memory)


def run_overtaken(rank: int, memories: list[Memory], looks: Looks, pauses: random.Random) -> None:
    """Run a launch whose only program pauses while it polls, so that its peers are in the next launch."""
    table, looks.pauses = table_of(rank, memories), pauses
    for number in range(24):
        check(rank, memories[rank], table, number, 1 + number % 3, None, WHOLE, num_programs=1)
    looks.pauses = None


def run_in_vain(rank: int, memory: Memory, table: np.ndarray, looks: Looks) -> None:
    """Run launches without a peer, which left only a part of each row, as if it had stopped in the middle."""
    memory.peer_buffers.view("float32").reshape(-1, WIDTH)[:, : WIDTH // 4] = 1.5
    for num_looks in (20 + 10, 11):  # the first row is polled until it is given up, the others once
        looks.count = 0
        total, _ = launch(rank, table, 99, 11, "float32", norm=None, limit=20)
        assert np.isnan(total).all()
        assert looks.count == num_looks * NUM_DEVICES, looks.count
        for by in (PEER_BUFFER, HANDSHAKE):
            looks.count = 0
            arguments: dict[str, Any] = {"norm": LAYER, "by": by, "limit": 20}
            total, normed = launch_shares(rank, memory, table, 99, 12, "float32", **arguments)
            assert np.isnan(total).all() and np.isnan(normed).all()
            # Polls of partial sums and of normed rows: of all devices, for each row of a share.
            assert looks.count == (2 * 12 if by == PEER_BUFFER else 0), looks.count


def run_device(rank: int, memories: list[Memory], others: list[Memory], all_are_done: Any) -> None:
    """Run all launches of one device with its own pauses; then some that its peer does not join."""
    looks, pauses = Looks(), random.Random(rank)
    run_alone(rank)
    run_overtaken(rank, others, looks, pauses)
    pause_between_programs(pauses)
    table = table_of(rank, memories)
    for number, one in enumerate(LAUNCHES):
        time.sleep(pauses.choice((0, 0, 0.2)))
        check(rank, memories[rank], table, number, *one)
    all_are_done.wait()
    for memory in (memories[rank], others[rank]):
        assert_nothing_is_left(memory)
    all_are_done.wait()
    if rank == 0:
        run_in_vain(rank, memories[0], table, looks)
    while not memories[rank].words[0]:  # the other devices are notified, too
        time.sleep(0.05)
    print(f"device {rank}: {len(LAUNCHES)} launches", flush=True)
    os._exit(0)


def main() -> None:
    patch_the_language_once()
    memories, others = ([Memory() for _ in range(NUM_DEVICES)] for _ in range(2))
    context = multiprocessing.get_context("fork")  # children keep the addresses of memory
    arguments = memories, others, context.Barrier(NUM_DEVICES)
    devices = [context.Process(target=run_device, args=(rank, *arguments)) for rank in range(NUM_DEVICES)]
    end_s = time.monotonic() + DEADLINE_S
    try:
        for device in devices:
            device.start()
        running = {device.sentinel: device for device in devices}
        while running:  # peers of a process that has died would wait for it
            ended = connection.wait(list(running), max(end_s - time.monotonic(), 0))
            assert ended, f"devices run for more than {DEADLINE_S} s"
            for device in map(running.pop, ended):
                device.join()
                assert device.exitcode == 0, f"{device.name} ended with {device.exitcode}"
    finally:
        for device in devices:
            device.kill()


if __name__ == "__main__":
    main()
