"""Values that the cache makes: why a chunk was forgotten, and a chunk on its way between tiers.

Owns: the reasons for a drop there are, and how a person is told; what a copy says to whoever moves bytes, and
what the cache keeps of one whose chunk is gone.
Does not know: when it happened, or who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Drop:
    """A chunk that was dropped.

    Attributes:
      conversation_id: whose; a shared prefix has an id of its own.
      index: of the chunk in the conversation.
      reason: what for.
      worth: what keeping it was worth to the eviction policy (`EvictionPolicy.worth`); infinite for chunks of
        requests that wait, None where worth decided nothing.
    """

    conversation_id: str
    index: int
    reason: DropReason
    worth: float | None


class DropReason(Enum):
    """What a chunk had to make room for; the value says it in words."""

    NO_HOST_MEMORY = "its page was needed, and there is no host memory to copy it to"
    HOST_MEMORY_WORTH_MORE = "its page was needed, and everything that could leave host memory was worth more"
    NO_SLOT = "its page was taken, and every place in host memory was held by what could not give way"
    FITS_NO_SLOT = "its page was needed, and its numbers do not fit the packed form that host memory keeps"
    SLOT_NEEDED = "its place in host memory was needed for a chunk that was worth at least as much"
    EARLIER_REQUEST = "its place in host memory was needed by a request that had arrived earlier"
    DEVICE_LOST = "a step failed on the device, and what was there was lost"
    INTERRUPTED = "the engine was interrupted in the middle of a change, and gave up all state that it had"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class Copy(NamedTuple):
    """A chunk's copy between a device page and a host slot; the direction is that of the list it is in.

    `copy_id` is never used twice.
    """

    copy_id: int
    page: int
    slot: int


class DetachedCopy(NamedTuple):
    """A copy in flight whose chunk has gone on without it.

    It keeps the page and the slot that nobody else may use yet, 0 where there is none.
    """

    is_in: bool
    page: int
    slot: int
