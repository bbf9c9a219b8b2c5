"""What the scheduler decides for one step: a frozen value, with no effect of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pensieve_jax.scheduler.request import Request


class Grant(NamedTuple):
    """One sub-request of a step: tokens [start, end) of a request are computed.

    `samples` is True where this empties what the request misses, so that its next token is sampled.
    """

    request: Request
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
      grants: the rows of the batch; rows of one request stand together, in ascending position.
      num_tokens: query tokens of all grants.
      admitted: requests that joined the batch.
      suspended: requests that were taken out of it for want of pages.
      drops: (conversation id, chunk index) of chunks that were evicted to make room.
    """

    grants: tuple[Grant, ...]
    num_tokens: int
    admitted: tuple[Request, ...]
    suspended: tuple[Request, ...]
    drops: tuple[tuple[str, int], ...]
