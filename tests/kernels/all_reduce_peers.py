"""The sum's kernel in Triton's interpreter: devices are processes that share memory.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.all_reduce_peers 2

A program of its own, as `triton_interpreter` is. Processes wait for each other as devices do, each at its own
pace. No bfloat16: see there.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import sys
import time

import numpy as np

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.jax_triton_kernels import shares_of_rows, sum_of_rows
from tests.kernels.triton_interpreter import HostTensor

WIDTH, MAX_ROWS = 40, 12
NUM_DEVICES = int(sys.argv[1])
NUM_PROGRAMS = 8  # of a launch, as far as the layout is concerned at most `specs.MAX_PROGRAMS`
CAPACITY = WIDTH * MAX_ROWS
EPS = 1e-5
ROWS = (1, 12, 3, 9, 8, 1, 11, 2, 12, 30, 2, 18)  # fewer and more than there are programs; more than inboxes
MAX_SHARED = WIDTH * max(ROWS)


class Memory:
    """Of one device: inboxes and words, and the arrays of a launch that its peers see."""

    def __init__(self) -> None:
        """All zero; children of this process see it where this process does."""
        self.inboxes = shared(specs.NUM_INBOXES * NUM_DEVICES * CAPACITY, "float32")
        self.words = shared(specs.words_len(NUM_DEVICES), "int32")
        self.partial, self.normed = shared(MAX_SHARED, "float32"), shared(MAX_SHARED, "float32")


def shared(size: int, dtype: str) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size * np.dtype(dtype).itemsize), dtype)


def seen_by_peers(place: np.ndarray, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """An array in `place`, which has room for it."""
    return place.view(dtype)[: shape[0] * shape[1]].reshape(shape)


def values_of(launch: int, rank: int, num_rows: int, dtype: str) -> np.ndarray:
    return np.random.default_rng((launch, rank)).normal(size=(num_rows, WIDTH)).astype(dtype)


def launch(
    rank: int, table: np.ndarray, number: int, num_rows: int, dtype: str, *, norms: bool, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """One device's part of a launch for few rows: sums and normed rows."""
    assert num_rows <= MAX_ROWS, "more than inboxes hold"
    partial = values_of(number, rank, num_rows, dtype)
    stream = values_of(number, 9, num_rows, "float32")
    scale = values_of(number, 8, 1, "float32")[0]
    total = np.full(partial.shape, -7, "float32" if norms else dtype)
    normed = np.full(partial.shape if norms else 1, -7, dtype)
    arrays = (partial, table.view(np.int32), stream, scale, total, normed)
    sum_of_rows[(NUM_PROGRAMS,)](
        *map(HostTensor, arrays), num_rows=num_rows, capacity=CAPACITY, width=WIDTH, block=64,
        num_devices=NUM_DEVICES, norms=norms, eps=EPS, limit=limit,
    )  # fmt: skip
    return total, normed


def launch_shares(
    rank: int, memory: Memory, table: np.ndarray, number: int, num_rows: int, dtype: str, *, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """One device's part of a launch for many rows: its share of sums, and everybody's normed rows."""
    partial = seen_by_peers(memory.partial, (num_rows, WIDTH), dtype)
    normed = seen_by_peers(memory.normed, (num_rows, WIDTH), dtype)
    # What a peer has written before this device begins would be lost, and so would be found out.
    partial[:], normed[:] = values_of(number, rank, num_rows, dtype), -7
    share = np.array_split(values_of(number, 9, num_rows, "float32"), NUM_DEVICES)[rank]
    scale = values_of(number, 8, 1, "float32")[0]
    total = np.full(share.shape, -7, "float32")
    arrays = (partial, table.view(np.int32), share, scale, total, normed)
    shares_of_rows[(NUM_PROGRAMS,)](
        *map(HostTensor, arrays), num_rows=num_rows // NUM_DEVICES, width=WIDTH, block=64,
        num_devices=NUM_DEVICES, eps=EPS, limit=limit,
    )  # fmt: skip
    normed = normed.copy()
    partial[:] = -9  # a peer that still read it would be found out, too
    return total, normed


def expected_of(number: int, num_rows: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By numpy: the sum in the order of devices, rounded once, with the stream, and its norm."""
    total = sum(values_of(number, peer, num_rows, dtype).astype("float32") for peer in range(NUM_DEVICES))
    stream = total.astype(dtype).astype("float32") + values_of(number, 9, num_rows, "float32")
    inverse = 1 / np.sqrt((stream.astype("float64") ** 2).mean(axis=1, keepdims=True) + EPS)
    return total.astype(dtype), stream, stream * inverse * values_of(number, 8, 1, "float32")


def check(rank: int, memory: Memory, table: np.ndarray, number: int, num_rows: int, dtype: str) -> None:
    """A launch against numpy."""
    expected, stream, normed = expected_of(number, num_rows, dtype)
    close = {"rtol": 2e-3 if dtype == "float16" else 1e-5, "atol": 1e-5}
    if num_rows % NUM_DEVICES == 0 and (number % 4 != 1 or num_rows > MAX_ROWS):
        found = launch_shares(rank, memory, table, number, num_rows, dtype, limit=specs.LIMIT)
        np.testing.assert_array_equal(found[0], np.array_split(stream, NUM_DEVICES)[rank])
        np.testing.assert_allclose(found[1], normed, **close)
        return
    norms = number % 3 == 1
    found = launch(rank, table, number, num_rows, dtype, norms=norms, limit=specs.LIMIT)
    np.testing.assert_array_equal(found[0], stream if norms else expected)
    if norms:
        np.testing.assert_allclose(found[1], normed, **close)


def run_device(rank: int, memories: list[Memory]) -> None:
    """All launches of one device, with pauses of its own; then some that its peer does not come to."""
    inboxes, words = (
        [each.ctypes.data for each in kind]
        for kind in zip(*((m.inboxes, m.words) for m in memories), strict=True)
    )
    table = np.array(specs.table_row(rank, inboxes, words), np.int64)
    pauses = random.Random(rank)
    for number, num_rows in enumerate(ROWS):
        time.sleep(pauses.choice((0, 0, 0.2)))
        check(rank, memories[rank], table, number, num_rows, ("float32", "float16")[number % 2])
    status = memories[rank].words[:1]
    assert status[0] == 0
    if rank == 0:
        start_s = time.monotonic()
        for _ in range(2):
            total, _ = launch(rank, table, 99, 11, "float32", norms=False, limit=20)
            assert np.isnan(total).all()
            total, normed = launch_shares(rank, memories[0], table, 99, 12, "float32", limit=20)
            assert np.isnan(total).all() and np.isnan(normed).all()
        assert time.monotonic() - start_s < 60
    while not status[0]:  # the other one is told, too
        time.sleep(0.05)
    print(f"device {rank}: {len(ROWS)} launches", flush=True)
    os._exit(0)


def main() -> None:
    memories = [Memory() for _ in range(NUM_DEVICES)]
    context = multiprocessing.get_context("fork")  # memory stays where it is
    devices = [context.Process(target=run_device, args=(rank, memories)) for rank in range(NUM_DEVICES)]
    try:
        for device in devices:
            device.start()
        for device in devices:
            device.join(240)
        assert [device.exitcode for device in devices] == [0] * NUM_DEVICES
    finally:
        for device in devices:
            device.kill()


if __name__ == "__main__":
    main()
