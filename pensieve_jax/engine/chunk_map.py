"""Where the state of an owner's branches is, chunk by chunk, short enough to be sent several times a second.

Owns: the letters. Does not know: who looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from pensieve_jax.cache import CachedSequence, ChunkState
from pensieve_jax.engine.live import Branch

LETTERS = {
    ChunkState.ON_GPU: "g",
    ChunkState.COPYING_OUT: "g",
    ChunkState.ON_BOTH: "b",
    ChunkState.ON_CPU: "c",
    ChunkState.COPYING_IN: "l",
    ChunkState.LEAVING: "v",
    ChunkState.RESERVED: "d",
    ChunkState.DROPPED: "d",
}
"""On the gpu, on both tiers, on the cpu, loading, leaving for the cpu, dropped or not computed yet."""


class BranchMap(NamedTuple):
    """The chunks of one branch.

    Attributes:
      turn_id: its latest turn that was answered; None before the first one.
      num_tokens: of its turns, and of the one in progress so far.
      busy: a turn of it runs or waits.
      num_shared: so many of its leading chunks are another branch's as well.
      first: so many of these are shown with a branch before this one, and are left out of `states`.
      states: of the chunks from there on, as runs: "12g3d" are 12 on the gpu and 3 dropped; see `LETTERS`.
    """

    turn_id: str | None
    num_tokens: int
    busy: bool
    num_shared: int
    first: int
    states: str


def chunk_map(branches: Iterable[Branch]) -> list[BranchMap]:
    """Every chunk of these branches once."""
    shown: set[CachedSequence] = set()
    maps = []
    for branch in branches:
        sequence, first = branch.sequence, 0
        for trunk in sequence.lineage():
            if trunk in shown:
                first = max(first, len(trunk.chunks))
            elif trunk.is_trunk:
                shown.add(trunk)
        letters = [LETTERS[chunk.state] for chunk in sequence.chunks[first:]]
        runs = "".join(f"{len(list(run))}{letter}" for letter, run in groupby(letters))
        num_tokens = len(branch.conversation.token_ids)
        maps.append(BranchMap(branch.tip, num_tokens, branch.busy, sequence.num_shared, first, runs))
    return maps
