"""The states of a chunk and the table of its legal transitions.

A chunk has a page, a host slot, both or neither. A copy between them takes time, so being in flight is also a
state. `TRANSITIONS` alone decides which transitions are legal.

Owns: the states, the transitions and the eviction class of each state.
Does not know: pages, slots or sequences.
Called by every module of the cache.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class ChunkState(Enum):
    """Where a chunk's KV is.

    Attributes:
      eviction_class: its eviction class, from the table `EVICTION_CLASS_OF`.
    """

    eviction_class: EvictionClass

    DROPPED = "dropped"  # in neither tier: it must be recomputed from raw tokens
    RESERVED = "reserved"  # it owns a page whose KV no dispatched step has written yet
    ON_GPU = "on gpu"  # its page holds valid KV up to the sequence's computed length
    COPYING_OUT = "copying out"  # its page is valid; its slot will be valid after the copy
    LEAVING = "leaving"  # its page was freed before the copy completed; its slot will be valid
    ON_BOTH = "on both"  # its page and its slot are valid
    ON_CPU = "on cpu"  # its slot is valid
    COPYING_IN = "copying in"  # its slot is valid; its page will be valid after the copy

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class ChunkEvent(Enum):
    """An event in the life of a chunk."""

    RESERVE = "be reserved"  # a page is allocated for it
    FILL = "be filled"  # a step that writes its KV was granted; program order makes it readable from then on
    CANCEL = "be cancelled"  # its page is freed before anything was written to it
    SWAP_OUT = "be swapped out"  # a slot is allocated, and the copy of its page begins
    SWAP_IN = "be swapped in"  # a page is allocated, and the copy of its slot begins
    ARRIVE = "arrive"  # the copy is complete
    LOSE = "lose its copy"  # the copy to its slot ended, but the slot holds no KV
    GIVE_PAGE = "free its page"  # its page is freed; its copy to the host has begun or is complete
    GIVE_SLOT = "free its slot"  # its slot is stale or needed elsewhere: freed, or left to the copy in flight
    DROP = "be dropped"  # its KV is dropped; a copy in flight keeps the place that it still uses

    __hash__ = object.__hash__


_S, _E = ChunkState, ChunkEvent
TRANSITIONS: dict[tuple[ChunkState, ChunkEvent], ChunkState] = {
    (_S.DROPPED, _E.RESERVE): _S.RESERVED,
    (_S.RESERVED, _E.FILL): _S.ON_GPU,
    (_S.RESERVED, _E.CANCEL): _S.DROPPED,
    (_S.ON_GPU, _E.SWAP_OUT): _S.COPYING_OUT,
    (_S.ON_GPU, _E.DROP): _S.DROPPED,
    (_S.COPYING_OUT, _E.ARRIVE): _S.ON_BOTH,
    (_S.COPYING_OUT, _E.LOSE): _S.ON_GPU,
    (_S.COPYING_OUT, _E.GIVE_PAGE): _S.LEAVING,
    (_S.COPYING_OUT, _E.GIVE_SLOT): _S.ON_GPU,
    (_S.COPYING_OUT, _E.DROP): _S.DROPPED,
    (_S.LEAVING, _E.ARRIVE): _S.ON_CPU,
    (_S.LEAVING, _E.LOSE): _S.DROPPED,
    (_S.LEAVING, _E.DROP): _S.DROPPED,
    (_S.ON_BOTH, _E.GIVE_PAGE): _S.ON_CPU,
    (_S.ON_BOTH, _E.GIVE_SLOT): _S.ON_GPU,
    (_S.ON_BOTH, _E.DROP): _S.DROPPED,
    (_S.ON_CPU, _E.SWAP_IN): _S.COPYING_IN,
    (_S.ON_CPU, _E.DROP): _S.DROPPED,
    (_S.COPYING_IN, _E.ARRIVE): _S.ON_BOTH,
    (_S.COPYING_IN, _E.CANCEL): _S.ON_CPU,
    (_S.COPYING_IN, _E.DROP): _S.DROPPED,
}

WITH_PAGE = frozenset({_S.RESERVED, _S.ON_GPU, _S.COPYING_OUT, _S.ON_BOTH, _S.COPYING_IN})
WITH_SLOT = frozenset({_S.COPYING_OUT, _S.LEAVING, _S.ON_BOTH, _S.ON_CPU, _S.COPYING_IN})
IN_FLIGHT = frozenset({_S.COPYING_OUT, _S.LEAVING, _S.COPYING_IN})


class EvictionClass(IntEnum):
    """What evicting a chunk takes; every state has one class."""

    ABSENT = 0  # it has no KV in either tier
    DIRTY = 1  # steps can read it; its page can be freed after a copy begins, or by dropping the chunk
    CLEAN = 2  # steps can read it; its page can be freed at no cost
    HOST = 3  # its slot can be freed by dropping the chunk
    ARRIVING = 4  # nothing can be freed before its copy is complete
    DEPARTING = 5  # nothing can be freed either, and a request that needs it must wait for the copy


EVICTION_CLASS_OF: dict[ChunkState, EvictionClass] = {
    _S.DROPPED: EvictionClass.ABSENT,
    _S.RESERVED: EvictionClass.ABSENT,
    _S.ON_GPU: EvictionClass.DIRTY,
    _S.COPYING_OUT: EvictionClass.CLEAN,
    _S.ON_BOTH: EvictionClass.CLEAN,
    _S.ON_CPU: EvictionClass.HOST,
    _S.COPYING_IN: EvictionClass.ARRIVING,
    _S.LEAVING: EvictionClass.DEPARTING,
}


for _state, _eviction_class in EVICTION_CLASS_OF.items():
    _state.eviction_class = (
        _eviction_class  # the hottest read of the cache: an attribute is faster than a dict lookup
    )


# Classes with pages or slots that the evictor can free.
CONTESTED = (EvictionClass.DIRTY, EvictionClass.CLEAN, EvictionClass.HOST)


class IllegalTransitionError(AssertionError):
    """A transition that the chunk's state does not allow: always a bug in the cache, never in its caller."""


def next_state(state: ChunkState, event: ChunkEvent) -> ChunkState:
    """Return the state after `event`; raises IllegalTransitionError if the table has no entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"a chunk that is {state.value} cannot {event.value}") from None
