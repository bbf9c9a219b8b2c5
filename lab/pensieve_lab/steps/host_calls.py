"""Host time of the calls that copy chunks, by the number of chunks.

Owns: the calls to a runner's transfers, in the order in which an engine makes them.
Does not know: engines, or how long copies take.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_lab.common.spread import Spread

_NUM_WARM_UPS = 2


def host_calls(runner: ModelRunner, nums_chunks: Sequence[int], repeats: int) -> dict[str, dict[str, Any]]:
    """Return spreads by number of chunks: host time to start and end a swap-out, to start and land a swap-in.

    No engine may use the runner; pages and slots up to the largest number are overwritten.
    """
    return {f"{number} chunks": _calls(runner, number, repeats) for number in nums_chunks}


def _calls(runner: ModelRunner, num_chunks: int, repeats: int) -> dict[str, Any]:
    transfers = runner.transfers
    assert isinstance(transfers, DeviceTransfers)
    ids = itertools.count()
    samples: dict[str, list[float]] = {}

    def timed[T](name: str, call: Callable[..., T], *args: object) -> T:
        start_s = time.perf_counter()
        result = call(*args)
        samples[name][-1] += time.perf_counter() - start_s
        return result

    def copies() -> list[ChunkCopy]:
        return [ChunkCopy(next(ids), index, index) for index in range(1, num_chunks + 1)]

    def end(name: str, moving: list[ChunkCopy]) -> None:
        left = {copy.copy_id for copy in moving}
        while left:
            transfers.wait()
            left.difference_update(*timed(name, transfers.completed))

    for _ in range(_NUM_WARM_UPS + repeats):
        for name in ("swap_out_s", "swap_out_end_s", "swap_in_s", "swap_in_land_s"):
            samples.setdefault(name, []).append(0.0)
        outs, ins = copies(), copies()
        timed("swap_out_s", transfers.swap_out, outs)
        timed("swap_out_s", transfers.swap_in, [])  # this call copies what was gathered
        end("swap_out_end_s", outs)
        transfers.swap_out([])
        timed("swap_in_s", transfers.swap_in, ins)
        timed("swap_in_s", transfers.start)
        end("swap_in_land_s", ins)
        jax.block_until_ready(runner.pools)
    return {name: Spread.of(found[_NUM_WARM_UPS:]).as_dict() for name, found in samples.items()}
