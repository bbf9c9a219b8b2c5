"""The scheduler's decision for one step, as an immutable value.

Owns: the record types.
Does not know: how the decision is made, or how it is carried out.
Called by the scheduler, the planner, the engine and observers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pensieve_jax.cache import ChunkCopy, ChunkDrop
from pensieve_jax.scheduler.request import Request


class Grant(NamedTuple):
    """One sub-request of a step: it computes tokens [start, end) of a request.

    Attributes:
      request: the request.
      start, end: positions of its tokens.
      samples: True if the request then misses no token, so that the step samples its next one.
      draft: the last tokens of a grant that samples, which are not the request's yet. The step also samples
        the token after each of them. They become the request's as far as they equal what is sampled.
    """

    request: Request
    start: int
    end: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Number of ids that the step samples for it."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The decision for one step.

    Attributes:
      grants: the rows of the batch; rows of one request are adjacent, in ascending position.
      num_tokens: query tokens of all grants.
      admitted: requests that joined the batch.
      suspended: requests that left the batch because an earlier one needed their pages or places.
      drops: chunks that were dropped, with the reasons.
      swap_outs: copies of pages to slots that begin before the step.
      swap_ins: copies of slots to pages that begin before the step.
      expedited: ids of copies to pages, begun for this step or earlier ones, that the step must wait for.
    """

    grants: tuple[Grant, ...]
    num_tokens: int
    admitted: tuple[Request, ...]
    suspended: tuple[Request, ...]
    drops: tuple[ChunkDrop, ...]
    swap_outs: tuple[ChunkCopy, ...]
    swap_ins: tuple[ChunkCopy, ...]
    expedited: tuple[int, ...]
