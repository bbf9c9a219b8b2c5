"""Counters of a re-batching engine, which only grow, and the report of each step to an observer.

Owns: the counters, and the reasons why a row was idle.
Does not know: scheduling decisions, or time.
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
    """Report of one step to an observer.

    Attributes:
      launches: launches in program order.
      ring: the ring after these launches. Read it at once, since the next step changes it.
      kv_bytes: device memory of the ring and the parked rows.
      ended: queries that finished in this call of `step`.
    """

    launches: Sequence[Launch]
    ring: Ring[Query]
    kv_bytes: int
    ended: Sequence[Query]


Observe = Callable[[StepSeen], None]


def unobserved(_: StepSeen) -> None:
    """Ignore the report of a step."""


@dataclass
class RebatchingMetrics:
    """Counters since the start.

    Attributes:
      num_steps: steps of the ring, shaped steps included.
      num_shaped_steps: steps in which a prompt ran.
      row_steps: rows of the ring, summed over steps.
      read_columns: rows times columns of the ring, summed over steps: keys that attention's layout spans.
      live_columns: read columns that hold a token of the row that reads them.
      computed_tokens: tokens that steps computed, padding included.
      idle_tail: row-steps without a query while the queue was empty, which are unavoidable.
      idle_waiting: row-steps without a query while a query waited that did not fit or could not join.
      idle_late: row-steps of a query whose last token was not fetched yet, or that was cancelled meanwhile.
      num_prefills: prefill programs.
      prefill_tokens: prefilled tokens, without padding.
      padded_prefill_tokens: prefilled tokens, with padding.
      num_insertions, num_suspensions, num_parked, num_returned, num_resizes: launches of these kinds.
      num_logits_errors: queries that ended because their logits were not finite.
      num_failed_steps: steps that failed on the device.
      max_kv_bytes: peak device memory of the ring and the parked rows.
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
    num_logits_errors: int = 0
    num_failed_steps: int = 0
    max_kv_bytes: int = 0

    def count(self, scheduled: Scheduled, ring: Ring[Query], max_kv_bytes: int) -> None:
        """Count the launches of a step, and record the peak memory."""
        self.max_kv_bytes = max(self.max_kv_bytes, max_kv_bytes)
        for launch in scheduled.launches:
            self._count(launch, ring)
        if scheduled.is_tail:
            self.idle_tail += scheduled.num_idle
        else:
            self.idle_waiting += scheduled.num_idle

    def as_dict(self) -> dict[str, int | float]:
        """Return all counters, and the share of idle row-steps."""
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
