"""The sum's kernel in Triton's interpreter: two devices are two processes that share memory.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.all_reduce_peers

A program of its own, as `triton_interpreter` is. Processes wait for each other as devices do, each at its own
pace, at their own addresses of the same memory. No bfloat16: see there.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from pallas_kernels.all_reduce import specs
from pallas_kernels.all_reduce.jax_triton_kernels import sum_of_rows
from tests.kernels.triton_interpreter import HostTensor

WIDTH, MAX_ROWS, NUM_DEVICES = 40, 12, 2
NUM_PROGRAMS = 8  # of a launch, as far as the layout is concerned at most `specs.NUM_PROGRAMS`
CAPACITY = WIDTH * MAX_ROWS
EPS = 1e-5
INBOX_BYTES = specs.NUM_INBOXES * NUM_DEVICES * CAPACITY * 4
WORDS_BYTES = 4 * specs.words_len(NUM_DEVICES)
ROWS = (1, 12, 3, 9, 8, 1, 11, 2, 12)  # fewer and more than there are programs


def values_of(launch: int, rank: int, num_rows: int, dtype: str) -> np.ndarray:
    return np.random.default_rng((launch, rank)).normal(size=(num_rows, WIDTH)).astype(dtype)


def launch(
    rank: int, table: np.ndarray, number: int, num_rows: int, dtype: str, *, norms: bool, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """One device's part of a launch: sums and normed rows."""
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


def check(rank: int, table: np.ndarray, number: int, num_rows: int, dtype: str, *, norms: bool) -> None:
    """A launch against numpy: the sum in the order of devices, rounded once."""
    total, normed = launch(rank, table, number, num_rows, dtype, norms=norms, limit=specs.LIMIT)
    parts = [values_of(number, peer, num_rows, dtype).astype("float32") for peer in range(NUM_DEVICES)]
    expected = sum(parts).astype(dtype)
    if not norms:
        np.testing.assert_array_equal(total, expected)
        return
    stream = expected.astype("float32") + values_of(number, 9, num_rows, "float32")
    np.testing.assert_array_equal(total, stream)
    inverse = 1 / np.sqrt((stream.astype("float64") ** 2).mean(axis=1, keepdims=True) + EPS)
    scaled = stream * inverse * values_of(number, 8, 1, "float32")
    np.testing.assert_allclose(normed, scaled, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-5)


def run_device(rank: int, names: list[str]) -> None:
    """All launches of one device, with pauses of its own; then one that its peer does not come to."""
    blocks = [SharedMemory(name) for name in names]
    addresses = [np.frombuffer(block.buf, np.uint8).ctypes.data for block in blocks]
    inboxes, words = addresses[:NUM_DEVICES], addresses[NUM_DEVICES:]
    table = np.array(specs.table_row(rank, inboxes, words), np.int64)
    pauses = random.Random(rank)
    for number, num_rows in enumerate(ROWS):
        time.sleep(pauses.choice((0, 0, 0.2)))
        dtype = ("float32", "float16")[number % 2]
        check(rank, table, number, num_rows, dtype, norms=number % 3 == 1)
    status = np.frombuffer(blocks[NUM_DEVICES + rank].buf, np.int32)[:1]
    assert status[0] == 0
    if rank == 0:
        start_s = time.monotonic()
        for _ in range(3):
            total, _ = launch(rank, table, 99, 11, "float32", norms=False, limit=20)
            assert np.isnan(total).all()
        assert time.monotonic() - start_s < 60
    while not status[0]:  # the other one is told, too
        time.sleep(0.05)
    print(f"device {rank}: {len(ROWS)} launches", flush=True)
    os._exit(0)  # memory that arrays point to cannot be closed


def main() -> None:
    sizes = [INBOX_BYTES] * NUM_DEVICES + [WORDS_BYTES] * NUM_DEVICES
    blocks = [SharedMemory(create=True, size=size) for size in sizes]
    names = [block.name for block in blocks]
    context = multiprocessing.get_context("spawn")
    devices = [context.Process(target=run_device, args=(rank, names)) for rank in range(NUM_DEVICES)]
    try:
        for device in devices:
            device.start()
        for device in devices:
            device.join(240)
        assert [device.exitcode for device in devices] == [0] * NUM_DEVICES
    finally:
        for device in devices:
            device.kill()
        for block in blocks:
            block.close()
            block.unlink()


if __name__ == "__main__":
    main()
