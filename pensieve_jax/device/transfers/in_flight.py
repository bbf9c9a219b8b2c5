"""Chunks on their way between tiers, in either direction.

Owns: the record of a copy until it has ended, how copies are started and awaited, and the host time they
take.
Does not know: pages, slots, or the order of copies relative to the steps.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.transfers.copy_batches import copy_arrays
from pensieve_jax.device.transfers.page_copies import Gathered
from pensieve_jax.runtime.errors import step_failed

_POLL_S = 5e-5
_sleep = time.sleep


@dataclass(eq=False)
class InFlight:
    """One copy; its arrays are one per group of layers.

    Attributes:
      copy: the page and the slot.
      source: source arrays, kept alive until the copy has ended.
      target: target arrays of the groups that were started.
      start_step: number of steps dispatched before the copy was started or, until then, gathered.
      gathered: for a copy to the host, the gathered chunk, which knows whether it is complete.
    """

    copy: ChunkCopy
    source: list[jax.Array]
    target: list[jax.Array] = field(default_factory=list)
    start_step: int = 0
    gathered: Gathered | None = None

    def is_ready(self) -> bool:
        """Return whether the copy was started and has ended, successfully or not."""
        return bool(self.target) and all(map(is_ready, self.target))


class CopyDispatcher:
    """Starts of copies and waits for them.

    Attributes:
      num_steps: number of steps dispatched so far; the caller that dispatches them increments it.
      dispatch_s: host seconds spent on dispatching copies, gathers and scatters.
      stall_s: host seconds blocked.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.dispatch_s = 0.0
        self.stall_s = 0.0

    def start(self, batch: Sequence[InFlight], sharding: NamedSharding, groups: range) -> None:
        """Copy the pieces of `groups`, the next groups of all copies in `batch`, to `sharding` in one call.

        Raises:
          StepFailedError: the copies could not be started.
        """
        if not batch:
            return
        sources = [transfer.source[group] for group in groups for transfer in batch]
        with self.dispatching():
            targets = copy_arrays(sources, sharding)
        for i, transfer in enumerate(batch):
            transfer.target += targets[i :: len(batch)]
            transfer.start_step = self.num_steps

    def wait_for(self, moving: Collection[InFlight], count: int) -> None:
        """Block until any `count` of the copies have ended; `check` tells whether they succeeded.

        It polls, because the runtime can only wait for a given array, and that may be the last to end.
        """
        assert count <= len(moving) and all(transfer.target for transfer in moving), "endless wait"
        start = time.perf_counter()
        try:
            while sum(transfer.is_ready() for transfer in moving) < count:
                _sleep(_POLL_S)
        finally:
            self.stall_s += time.perf_counter() - start

    def check(self, ended: Iterable[InFlight]) -> None:
        """Raise StepFailedError if one of the ended copies failed."""
        try:
            jax.block_until_ready([transfer.target for transfer in ended])
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a copy between tiers failed on the device", error) from error

    def is_lost(self, transfer: InFlight) -> bool:
        """Return whether an ended copy to the host brought an incomplete chunk. Raises StepFailedError."""
        try:
            return transfer.gathered is not None and transfer.gathered.is_lost
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a copy between tiers failed on the device", error) from error

    @contextlib.contextmanager
    def dispatching(self) -> Iterator[None]:
        """Count the host time of this block; turn an error of the device into a failed step."""
        start = time.perf_counter()
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a copy between tiers could not be started", error) from error
        finally:
            self.dispatch_s += time.perf_counter() - start


def is_ready(array: Any) -> bool:
    """Return whether `array` holds its value or an error. The published type of arrays has no such method."""
    return array is None or array.is_ready()


def partition(
    transfers: Iterable[InFlight], is_chosen: Callable[[InFlight], bool]
) -> tuple[deque[InFlight], deque[InFlight]]:
    """Return the chosen transfers and the others, both in order."""
    chosen: deque[InFlight] = deque()
    others: deque[InFlight] = deque()
    for transfer in transfers:
        (chosen if is_chosen(transfer) else others).append(transfer)
    return chosen, others
