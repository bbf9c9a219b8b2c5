"""The states of a chunk and the ONE table of what may happen to it.

With device memory as the only tier a chunk is dropped, reserved or on the gpu. The states of a host tier
(on both, on cpu, copying out, copying in) extend this table when that tier exists; nothing else decides
what is legal.
"""

from __future__ import annotations

from enum import Enum


class ChunkState(Enum):
    """Where a chunk's KV is."""

    DROPPED = "dropped"  # nowhere: it must be recomputed from raw tokens
    RESERVED = "reserved"  # it owns a page whose KV no dispatched step has written yet
    ON_GPU = "on gpu"  # its page holds valid KV, as far as the sequence's computed length goes

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class ChunkEvent(Enum):
    """What happens to a chunk."""

    RESERVE = "reserve"  # a page is set aside for it
    FILL = "fill"  # a step that writes its KV was granted; program order makes it readable from then on
    DROP = "drop"  # its KV is forgotten and its page freed
    CANCEL = "cancel"  # its page is freed before anything was written

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[ChunkState, ChunkEvent], ChunkState] = {
    (ChunkState.DROPPED, ChunkEvent.RESERVE): ChunkState.RESERVED,
    (ChunkState.RESERVED, ChunkEvent.FILL): ChunkState.ON_GPU,
    (ChunkState.RESERVED, ChunkEvent.CANCEL): ChunkState.DROPPED,
    (ChunkState.ON_GPU, ChunkEvent.DROP): ChunkState.DROPPED,
}


class IllegalTransitionError(AssertionError):
    """A chunk was asked for what its state does not allow: a bug in the cache, never the caller's."""


def next_state(state: ChunkState, event: ChunkEvent) -> ChunkState:
    """The state that `event` leads to; `IllegalTransitionError` where the table has none."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"a chunk that is {state.value} cannot {event.value}") from None
