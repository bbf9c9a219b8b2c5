"""What the engine asks of whatever moves chunks between device pages and host slots.

Owns: the `Transfers` protocol, how much of what is in transit is awaited at a time, and how much travels to
the device beside a step. The JAX one is `device.transfers.device_transfers.DeviceTransfers`; the simulator
has one with the same rules, tests one that delays and reorders.
Does not know: conversations, policies, or why a chunk moves.

    completed() -> schedule -> swap_out(), swap_in(), expedite() -> dispatch the step
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from pensieve_jax.cache.drops import Copy

MAX_HELD_STEPS = 4  # that copies to the host wait while others come from it all the time
# 9 ms of a PCIe 5 link, 15 where copies go the other way as well; decode steps of a 13B model take 7 to 18.
_BYTES_BESIDE_STEP = 42 * 10**7
_WINDOW = 16  # chunks: one gather, and few enough that the first are on their way soon


def window(max_num_staged: int) -> int:
    """Chunks that are awaited and staged together where there are more than can be staged."""
    return min(_WINDOW, -(-max_num_staged // 2))


def num_beside_step(max_num_staged: int, chunk_bytes: int) -> int:
    """Chunks that are copied to a device beside a step; what is left of them when it ends, everybody awaits.

    `chunk_bytes`: of a device's share of a chunk.
    """
    return max(1, min(max_num_staged, _BYTES_BESIDE_STEP // chunk_bytes))


class Ended(NamedTuple):
    """Ids of copies that have ended.

    Attributes:
      arrived: what they were to bring is where it was to go.
      lost: copies to slots, which hold nothing now: the chunks cannot be packed. The pages have been read.
    """

    arrived: Sequence[int] = ()
    lost: Sequence[int] = ()


class Transfers(Protocol):
    """Copies chunks beside the steps, in program order with them.

    A copy's page and slot belong to it from the call that starts it until it is complete.
    """

    def swap_out(self, copies: Sequence[Copy]) -> None:
        """Start copying pages to slots; blocks only while there is no room to stage them. Called every step.

        On return the pages have been read, in program order: steps dispatched later may write them. A
        slot holds the chunk once `completed` names its copy as arrived, and not before.

        Raises:
          StepFailedError: the copies could not be started.
        """
        ...

    def swap_in(self, copies: Sequence[Copy]) -> None:
        """Copy slots to pages, beside the steps to come; never waits. See `swap_out` for errors.

        Called every step, right after `swap_out`: a page may be read by that and written by this.
        """
        ...

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Let the step that is dispatched next read these copies to pages, whenever they arrive.

        No more copies to pages may be in flight than can be staged at once. They count as complete at
        once, and `completed` does not name them. The device waits for them, by groups of layers; the host
        does not.
        """
        ...

    def completed(self) -> Ended:
        """The copies that have ended since the last call; never waits.

        Steps dispatched from here on read the pages of completed copies to pages.

        Raises:
          StepFailedError: a copy failed on the device.
        """
        ...

    def wait(self) -> None:
        """Block until `completed` can name a copy, or several; there must be one in flight."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Since the start: bytes and arrays moved each way, and host seconds spent on it.

        `swapped_out_bytes`, `swapped_in_bytes`: all devices together. `num_swap_out_copies`,
        `num_swap_in_copies`: arrays. `swap_dispatch_s`: starting copies. `transfer_stall_s`: blocked in
        `wait`, or for room to stage.
        """
        ...
