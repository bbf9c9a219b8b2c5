"""What an engine of padded batches has done: counters that only grow, and what it is told of every step.

Owns: what is counted, and why a row was idle.
Does not know: how anything is decided, or seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pensieve_jax.rebatching.launches import (
    Decode,
    Insert,
    Launch,
    Park,
    Prefill,
    Resize,
    Return,
    Shape,
    Suspend,
)
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.scheduler import Scheduled


class StepSeen(NamedTuple):
    """What an observer is told when a step was launched.

    Attributes:
      launches: in program order.
      ring: as it is behind them; to be read at once.
      kv_bytes: of device memory that the ring and rows beside it take.
      ended: queries whose last token came with this call of `step`.
    """

    launches: Sequence[Launch]
    ring: Ring[Query]
    kv_bytes: int
    ended: Sequence[Query]


Observe = Callable[[StepSeen], None]


def unobserved(_: StepSeen) -> None:
    """Nobody wants to know."""


@dataclass
class RebatchingMetrics:
    """Since the start.

    Attributes:
      num_steps: steps of the ring, shaped ones included.
      num_shaped_steps: of them, those in which a prompt ran.
      row_steps: rows of the ring in all steps.
      read_columns: columns times rows of the ring in all steps: keys that attention reads by its layout.
      live_columns: of them, those that hold a token of the row that reads them.
      computed_tokens: tokens that steps computed, padding included.
      idle_tail: idle rows while nobody waited; they cannot be helped.
      idle_waiting: idle rows while somebody waited who did not fit, or was not to join a running batch.
      idle_late: rows whose query had ended with a token that was not seen yet, or was cancelled meanwhile.
      num_prefills: programs of prompts.
      prefill_tokens: of prompts.
      padded_prefill_tokens: the same with padding.
      num_insertions, num_suspensions, num_parked, num_returned, num_resizes: launches of these kinds.
      num_failed_steps: steps that failed on the device.
      max_kv_bytes: the most that ring and rows beside it took of device memory.
    """

    num_steps: int = 0
    num_shaped_steps: int = 0
    row_steps: int = 0
    read_columns: int = 0
    live_columns: int = 0
    computed_tokens: int = 0
    idle_tail: int = 0
    idle_waiting: int = 0
    idle_late: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    padded_prefill_tokens: int = 0
    num_insertions: int = 0
    num_suspensions: int = 0
    num_parked: int = 0
    num_returned: int = 0
    num_resizes: int = 0
    num_failed_steps: int = 0
    max_kv_bytes: int = 0

    def count(self, scheduled: Scheduled, ring: Ring[Query], max_kv_bytes: int) -> None:
        """A step's launches, and the most memory so far."""
        self.max_kv_bytes = max(self.max_kv_bytes, max_kv_bytes)
        for launch in scheduled.launches:
            self._count(launch, ring)
        if scheduled.is_tail:
            self.idle_tail += scheduled.num_idle
        else:
            self.idle_waiting += scheduled.num_idle

    def as_dict(self) -> dict[str, int | float]:
        """All of them, and the share of idle row-steps."""
        idle = self.idle_tail + self.idle_waiting + self.idle_late
        return {
            **dataclasses.asdict(self),
            "idle_row_share": idle / self.row_steps if self.row_steps else 0.0,
        }

    def _count(self, launch: Launch, ring: Ring[Query]) -> None:
        match launch:
            case Decode() | Shape():
                assert ring.shape is not None
                num_tokens = launch.num_tokens if isinstance(launch, Shape) else 1
                self.num_steps += 1
                self.num_shaped_steps += isinstance(launch, Shape)
                self.row_steps += ring.shape.batch
                self.read_columns += ring.shape.batch * ring.shape.length
                self.live_columns += sum(query.num_kv_tokens for query, _ in launch.samples)
                self.computed_tokens += ring.shape.batch * num_tokens
            case Prefill():
                self.num_prefills += 1
                self.prefill_tokens += launch.num_tokens
                self.padded_prefill_tokens += launch.num_rows * launch.length
            case Insert():
                self.num_insertions += 1
            case Suspend():
                self.num_suspensions += 1
            case Park(waits=False):
                self.num_parked += 1
            case Return():
                self.num_returned += 1
            case Resize():
                self.num_resizes += 1
            case _:
                pass
