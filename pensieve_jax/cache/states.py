"""The states of a chunk and the ONE table of what may happen to it.

A chunk has a page, a host slot, both or neither; a copy between them takes a while, so being in flight is a
state as well. Nothing else decides what is legal.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class ChunkState(Enum):
    """Where a chunk's KV is.

    Attributes:
      shelf: what it means to whoever needs room, by the table `SHELF`.
    """

    shelf: EvictionClass

    DROPPED = "dropped"  # nowhere: it must be recomputed from raw tokens
    RESERVED = "reserved"  # it owns a page whose KV no dispatched step has written yet
    ON_GPU = "on gpu"  # its page holds valid KV, as far as the sequence's computed length goes
    COPYING_OUT = "copying out"  # its page is valid, its slot will be
    LEAVING = "leaving"  # its page was given away behind the copy's back; its slot will be valid
    ON_BOTH = "on both"  # its page and its slot are valid
    ON_CPU = "on cpu"  # its slot is valid
    COPYING_IN = "copying in"  # its slot is valid, its page will be

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class ChunkEvent(Enum):
    """What happens to a chunk."""

    RESERVE = "be reserved"  # a page is set aside for it
    FILL = "be filled"  # a step that writes its KV was granted; program order makes it readable from then on
    CANCEL = "be cancelled"  # its page is freed before anything was written to it
    SWAP_OUT = "be swapped out"  # a slot is set aside, and the copy of its page begins
    SWAP_IN = "be swapped in"  # a page is set aside, and the copy of its slot begins
    ARRIVE = "arrive"  # the copy is complete
    LOSE = "be lost on its way"  # the copy to its slot has ended, and the slot holds nothing
    GIVE_PAGE = "give its page"  # its page is freed; a copy has read it, or is complete
    GIVE_SLOT = "give its slot"  # its slot is freed, or left to the copy in flight: lent, or out of date
    DROP = "be dropped"  # its KV is forgotten; what a copy in flight still uses is left to that copy

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
    """What a state means to whoever needs room; every state is on one shelf."""

    ABSENT = 0  # no KV anywhere
    DIRTY = 1  # readable by steps; its page is free to take once a copy has begun, or it is dropped
    CLEAN = 2  # readable by steps; its page is free to take
    HOST = 3  # its slot is free to take if it is dropped
    ARRIVING = 4  # nothing to take before the copy is complete
    DEPARTING = 5  # the same, and a request that needs it waits for the copy


SHELF: dict[ChunkState, EvictionClass] = {
    _S.DROPPED: EvictionClass.ABSENT,
    _S.RESERVED: EvictionClass.ABSENT,
    _S.ON_GPU: EvictionClass.DIRTY,
    _S.COPYING_OUT: EvictionClass.CLEAN,
    _S.ON_BOTH: EvictionClass.CLEAN,
    _S.ON_CPU: EvictionClass.HOST,
    _S.COPYING_IN: EvictionClass.ARRIVING,
    _S.LEAVING: EvictionClass.DEPARTING,
}


for _state, _shelf in SHELF.items():
    _state.shelf = _shelf  # asked for more often than anything else: a table takes longer


# Shelves that whoever needs room takes from.
CONTESTED = (EvictionClass.DIRTY, EvictionClass.CLEAN, EvictionClass.HOST)


class IllegalTransitionError(AssertionError):
    """A chunk was asked for what its state does not allow: a bug in the cache, never the caller's."""


def next_state(state: ChunkState, event: ChunkEvent) -> ChunkState:
    """The state that `event` leads to; `IllegalTransitionError` where the table has none."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"a chunk that is {state.value} cannot {event.value}") from None
