"""Values that the cache reports: a dropped chunk with its reason, and a copy between tiers.

Owns: the reasons for a drop with their text for users, the record that tells the transfer engine to copy a
chunk, and the record of a copy whose chunk was dropped or freed meanwhile.
Does not know: when something happened.
Called by the cache, the scheduler and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ChunkDrop:
    """A chunk that was dropped.

    Attributes:
      conversation_id: the conversation that owned it; a shared prefix has an id of its own.
      index: its index in the conversation.
      reason: why it was dropped.
      worth: its retention value to the eviction policy (`EvictionPolicy.worth`); infinite for chunks of
        queued requests, None if the retention value did not decide the drop.
    """

    conversation_id: str
    index: int
    reason: DropReason
    worth: float | None


class DropReason(Enum):
    """Why a chunk was dropped; the value is the explanation for users."""

    NO_HOST_MEMORY = "its page was needed, and there is no host memory to copy it to"
    HOST_MEMORY_WORTH_MORE = "its page was needed, and every evictable chunk in host memory was worth more"
    NO_SLOT = "its page was needed, and no chunk in host memory could be evicted"
    FITS_NO_SLOT = "its page was needed, and its values do not fit the packed format of host memory"
    SLOT_NEEDED = "its slot in host memory was needed for a chunk that was worth at least as much"
    EARLIER_REQUEST = "its slot in host memory was needed by a request that had arrived earlier"
    DEVICE_LOST = "a step failed on the device, and the device's KV cache was lost"
    NOT_FINITE = "a turn that used it got logits that are not finite, so its values are not trusted"
    INTERRUPTED = "the engine was interrupted in the middle of a change, and discarded its whole KV cache"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class ChunkCopy(NamedTuple):
    """A chunk's copy between a device page and a host slot.

    The list that contains it gives the direction. A `copy_id` is never reused.
    """

    copy_id: int
    page: int
    slot: int


class DetachedCopy(NamedTuple):
    """A copy in flight that no chunk refers to any more.

    It keeps its page and its slot until it completes, because no other chunk may use them before. 0 means
    that it keeps none.
    """

    is_in: bool
    page: int
    slot: int
