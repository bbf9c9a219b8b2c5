"""The interface between the engine and the copies of chunks between device pages and host slots.

Owns: the `Transfers` protocol, the number of copies awaited together, and the number of copies to the device
beside a step. `device.transfers.device_transfers.DeviceTransfers` implements it with JAX, the simulator has
one with the same rules, and tests have one that delays and reorders.
Does not know: conversations, policies, or why a chunk moves.
Called by the engine loop, in this order:

    completed() -> schedule -> swap_out(), swap_in(), expedite() -> dispatch the step
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from pensieve_jax.cache.drops import ChunkCopy

MAX_HELD_STEPS = 4  # steps that copies to the host wait at most while copies to the device keep coming
# 9 ms of a PCIe 5 link, or 15 ms with copies in both directions; decode steps of a 13B model take 7 to 18 ms.
_BYTES_BESIDE_STEP = 42 * 10**7
_WINDOW = 16  # chunks per gather; few enough that the first copies start soon


def window(max_num_staged: int) -> int:
    """Return how many chunks are staged and awaited together when not all can be staged at once."""
    return min(_WINDOW, -(-max_num_staged // 2))


def num_beside_step(max_num_staged: int, chunk_bytes: int) -> int:
    """Return how many chunks are copied to a device beside a step.

    If the step ends before these copies do, all requests wait for the rest. `chunk_bytes` is the size of one
    device's share of a chunk.
    """
    return max(1, min(max_num_staged, _BYTES_BESIDE_STEP // chunk_bytes))


class Ended(NamedTuple):
    """Ids of copies that have ended.

    Attributes:
      arrived: copies that succeeded.
      lost: copies to slots that failed because the chunks cannot be packed. The slots hold no KV, and the
        pages have been read.
    """

    arrived: Sequence[int] = ()
    lost: Sequence[int] = ()


class Transfers(Protocol):
    """An executor of copies that overlap with the steps, in program order with them.

    A copy owns its page and its slot from the call that starts it until it is complete.
    """

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        """Start copying pages to slots; blocks only while there is no room to stage them. Called every step.

        On return the pages have been read in program order, so steps dispatched later may write them. A
        slot holds the chunk only after `completed` reports its copy as arrived.

        Raises:
          StepFailedError: the copies could not be started.
        """
        ...

    def swap_in(self, copies: Sequence[ChunkCopy]) -> None:
        """Start copying slots to pages, overlapping with the next steps; never waits.

        Called every step right after `swap_out`, since a page may be read by that and written by this.
        See `swap_out` for errors.
        """
        ...

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Make the next dispatched step wait on the device for these copies to pages.

        They count as complete immediately, and `completed` does not report them. The device waits for them in
        groups of layers; the host does not wait. The copies to pages in flight must all fit the staging room.
        """
        ...

    def completed(self) -> Ended:
        """Return the copies that have ended since the last call; never waits.

        Steps dispatched from here on can read the pages of completed copies to pages.

        Raises:
          StepFailedError: a copy failed on the device.
        """
        ...

    def wait(self) -> None:
        """Block until `completed` can report a copy; at least one must be in flight."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Return the bytes and arrays copied each way since the start, and the host time spent on it.

        `swapped_out_bytes` and `swapped_in_bytes` sum over all devices. `num_swap_out_copies` and
        `num_swap_in_copies` count arrays. `swap_dispatch_s` is the time to start copies; `transfer_stall_s`
        is the time blocked in `wait` or for staging room.
        """
        ...
