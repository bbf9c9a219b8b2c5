"""What the scheduler decides for one step: a frozen value, with no effect of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pensieve_jax.cache import Copy, Drop
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
      drops: chunks that were dropped, and why.
      swap_outs: copies of pages to slots that begin before the step.
      swap_ins: copies of slots to pages that begin before the step.
      expedited: ids of copies to pages, of this step or earlier ones, that the step itself waits for.
    """

    grants: tuple[Grant, ...]
    num_tokens: int
    admitted: tuple[Request, ...]
    suspended: tuple[Request, ...]
    drops: tuple[Drop, ...]
    swap_outs: tuple[Copy, ...]
    swap_ins: tuple[Copy, ...]
    expedited: tuple[int, ...]
