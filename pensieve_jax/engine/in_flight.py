"""A chunk on its way between tiers, as the transfers' queues hold it.

Owns: what is kept until the copy has ended, and how that is seen without waiting.
Does not know: directions, steps or queues.
Called by: `device_transfers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax

from pensieve_jax.cache.copies import Copy


@dataclass(eq=False)
class InFlight:
    """One copy; arrays are one per group of layers.

    Attributes:
      copy: the page and the slot.
      source: kept alive until the copy has ended.
      target: what it is copied to; empty before it is started.
      start_step: the number of steps that were dispatched before it was started, or was gathered.
    """

    copy: Copy
    source: list[jax.Array]
    target: list[jax.Array] = field(default_factory=list)
    start_step: int = 0

    def is_ready(self) -> bool:
        """Whether the copy was started and has ended, well or badly."""
        return bool(self.target) and all(map(is_ready, self.target))


def is_ready(array: Any) -> bool:
    """Whether `array` holds its value, or the error instead; the published type of arrays cannot say."""
    return array is None or array.is_ready()


def part(
    transfers: Iterable[InFlight], is_chosen: Callable[[InFlight], bool]
) -> tuple[deque[InFlight], deque[InFlight]]:
    """Those that are chosen, and the others, both in order."""
    chosen: deque[InFlight] = deque()
    others: deque[InFlight] = deque()
    for transfer in transfers:
        (chosen if is_chosen(transfer) else others).append(transfer)
    return chosen, others
