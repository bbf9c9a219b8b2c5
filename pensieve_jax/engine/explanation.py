"""Where the state of conversations is, and why some of it is nowhere: answers for people who ask.

Owns: the words of `Engine.explain`, the record of drops that it speaks of, and the letters of a map of an
owner's branches, which is short enough to be sent several times a second.
Does not know: how chunks are chosen (`cache.evictor`), or who asks.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pensieve_jax.cache import CachedSequence, CacheManager, ChunkState, Drop, DropReason, Role
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.history import ConversationRecord

_UNRECORDED = "nowhere; nothing is recorded of why"
_NOT_IN_MEMORY = "nowhere: not computed since this start, or lost long ago; its tokens are in the history"
_PLACES = {
    ChunkState.ON_GPU: ("gpu", "in device memory"),
    ChunkState.COPYING_OUT: ("gpu", "in device memory, being copied to host memory"),
    ChunkState.ON_BOTH: ("gpu", "in device memory, with a copy in host memory"),
    ChunkState.LEAVING: ("cpu", "on its way from device to host memory"),
    ChunkState.ON_CPU: ("cpu", "in host memory"),
    ChunkState.COPYING_IN: ("cpu", "on its way from host to device memory"),
    ChunkState.RESERVED: (None, "about to be computed"),
    ChunkState.DROPPED: (None, None),
}
_MAX_NUM_RECORDS = 200_000  # some 30 MB; conversations that lost something longest ago are forgotten first
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


def explain(
    found: LiveConversation | ConversationRecord,
    prefixes: PrefixTable,
    cache: CacheManager,
    journal: DropJournal,
    config: EngineConfig,
) -> Explanation:
    """What is known of a conversation, which is in memory or in the history only."""
    now_s, idle_s, is_busy = journal.clock.now(), None, False
    if isinstance(found, ConversationRecord):
        sequence, num_tokens = CachedSequence(found.conversation_id), len(found.token_ids)
        sequence.begin_with(prefixes.find(found.token_ids.tolist()))  # as its next turn will
        num_computed = num_tokens - 1
    else:
        conversation, sequence, is_busy = found.conversation, found.sequence, found.busy
        num_tokens = len(conversation.token_ids)
        num_computed = max(sequence.num_kv_tokens, conversation.num_computed_tokens)
        idle_s = None if is_busy else now_s - sequence.last_active_s
    keeps_state = config.stateful or is_busy
    chunks = tuple(_chunks(sequence, max(num_computed, 0), cache, journal if keeps_state else None))
    lines = [_headline(sequence.sequence_id, num_tokens, config, idle_s, is_busy)]
    if (order := cache.turns.describe()) is not None:
        lines.append(f"  {order}")
    if keeps_state:
        is_unread = isinstance(found, ConversationRecord)
        lines += _lines(chunks, cache, now_s, _NOT_IN_MEMORY if is_unread else _UNRECORDED)
    else:
        lines.append("This engine keeps no state between turns (stateful=False).")
    if not is_busy:
        lines.append(_outlook(chunks))
    return Explanation(sequence.sequence_id, num_tokens, config.cache.policy, idle_s, chunks, tuple(lines))


class Explanation(NamedTuple):
    """Where the state of a conversation is; `str` of it is for people.

    Attributes:
      conversation_id: whose.
      num_tokens: of its history, and of its running turn so far.
      policy: the eviction order, as `CacheConfig.policy` names it.
      idle_s: seconds since it was last active; None while a turn of it is in progress, or where nothing of it
        is in memory.
      chunks: in order; the tokens behind the last one were not computed yet.
      lines: the same in words.
    """

    conversation_id: str
    num_tokens: int
    policy: str
    idle_s: float | None
    chunks: tuple[ChunkReport, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        """For people: a line for every run of chunks that have the same fate."""
        return "\n".join(self.lines)


class ChunkReport(NamedTuple):
    """One chunk of a conversation.

    Attributes:
      start, end: its tokens.
      tier: "gpu" or "cpu": what has its state; None: nobody, so a turn computes it.
      place: the same in words, copies under way included; None: nowhere.
      worth: what keeping it is worth to the eviction policy now; None where nothing depends on that.
      drop: why it is nowhere, where that is known.
      is_shared: others begin with it as well.
    """

    start: int
    end: int
    tier: str | None
    place: str | None
    worth: float | None
    drop: DropRecord | None
    is_shared: bool


def _chunks(
    sequence: CachedSequence, num_computed: int, cache: CacheManager, journal: DropJournal | None
) -> Iterator[ChunkReport]:
    """Every chunk of the tokens that were computed once; without a journal no reasons are given."""
    size = cache.chunk_tokens
    for index in range(-(-num_computed // size)):
        owner = sequence.owner_of(index)
        chunk = sequence.chunks[index] if index < len(sequence.chunks) else None
        tier, place = _PLACES[ChunkState.DROPPED if chunk is None else chunk.state]
        drops: Mapping[int, DropRecord] = {} if journal is None else journal.of(owner.sequence_id)
        has_worth = place is not None and owner.role is Role.IDLE
        yield ChunkReport(
            index * size,
            min((index + 1) * size, num_computed),
            tier,
            place,
            cache.worth_of(owner, index) if has_worth else None,
            drops.get(index) if place is None else None,
            owner is not sequence,
        )


def _headline(
    conversation_id: str, num_tokens: int, config: EngineConfig, idle_s: float | None, is_busy: bool
) -> str:
    if is_busy:
        activity = "a turn of it is in progress"
    elif idle_s is None:
        activity = "nothing of it is in memory"
    else:
        activity = f"idle for {idle_s:.1f} s"
    return f"{conversation_id!r}: {num_tokens} tokens, {activity}; eviction order {config.cache.policy!r}"


def _lines(chunks: Sequence[ChunkReport], cache: CacheManager, now_s: float, unknown: str) -> Iterator[str]:
    """A line for every run of chunks that have the same fate; `unknown` is said where no reason is known."""
    numbered = enumerate(chunks)
    for (place, is_shared, reason), run in itertools.groupby(
        numbered, lambda pair: (pair[1].place, pair[1].is_shared, pair[1].drop and pair[1].drop.reason)
    ):
        pairs = list(run)
        (first, one), (last, other) = pairs[0], pairs[-1]
        tokens = f"tokens {one.start}-{other.end - 1} ({_span('chunk', first, last)}"
        where = f"  {tokens}{', shared with others' if is_shared else ''}): "
        if place is not None:
            worths = [(chunk.worth, now_s) for _, chunk in pairs if chunk.worth is not None]
            yield where + place + (f"; {cache.describe_worths(worths)}" if worths else "")
        elif reason is None:
            yield where + unknown
        else:
            drops = [chunk.drop for _, chunk in pairs if chunk.drop is not None]
            yield where + _dropped(drops, cache, now_s)


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first}-{last}"


def _dropped(drops: Sequence[DropRecord], cache: CacheManager, now_s: float) -> str:
    ago_s = [f"{now_s - at_s:.1f}" for at_s in (min(d.at_s for d in drops), max(d.at_s for d in drops))]
    when = f"{ago_s[0]} s ago" if ago_s[0] == ago_s[1] else f"between {ago_s[0]} and {ago_s[1]} s ago"
    worths = [(d.worth, d.at_s) for d in drops if d.worth is not None and d.worth < math.inf]
    worth = f"; {cache.describe_worths(worths)}" if worths else ""
    return f"dropped {when}: {drops[0].reason.value}{worth}"


def _outlook(chunks: Sequence[ChunkReport]) -> str:
    """What a turn would find."""
    on_gpu, on_cpu, num_lost = (
        sum(chunk.end - chunk.start for chunk in chunks if chunk.tier == tier)
        for tier in ("gpu", "cpu", None)
    )
    return (
        f"A turn that came now would find {on_gpu} tokens in device memory, copy {on_cpu} in, and compute "
        f"{num_lost} of its history again."
    )


class DropJournal:
    """The latest drop of every chunk, of the conversations that lost something most recently.

    What is said of a conversation goes for what several share as well, by the id of its sequence.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._drops: OrderedDict[str, dict[int, DropRecord]] = OrderedDict()
        self._num_records = 0

    def note(self, drop: Drop) -> None:
        """It was dropped just now."""
        of_conversation = self._drops.setdefault(drop.conversation_id, {})
        self._num_records += drop.index not in of_conversation
        of_conversation[drop.index] = DropRecord(self.clock.now(), drop.reason, drop.worth)
        self._drops.move_to_end(drop.conversation_id)
        while self._num_records > _MAX_NUM_RECORDS and len(self._drops) > 1:
            self._num_records -= len(self._drops.popitem(last=False)[1])

    def of(self, conversation_id: str) -> dict[int, DropRecord]:
        """By chunk, of what is still known."""
        return self._drops.get(conversation_id, {})

    def forget(self, conversation_id: str) -> None:
        """Its owner changed it, or it is gone: what was dropped before explains nothing any more."""
        self._num_records -= len(self._drops.pop(conversation_id, {}))

    def move(self, before: str, after: str | None, indices: range) -> None:
        """These chunks of one are another's from here on; None: the one is no more."""
        if after is None:
            self.forget(before)
            return
        of_before = self._drops.get(before, {})
        moved = {index: of_before.pop(index) for index in list(of_before) if index in indices}
        if moved:
            of_after = self._drops.setdefault(after, {})
            self._num_records -= len(moved.keys() & of_after.keys())
            of_after.update(moved)

    def lose(self, held: Iterable[tuple[str, int]], reason: DropReason) -> None:
        """All of these, (conversation, chunk), were given up just now."""
        for conversation_id, index in held:
            self.note(Drop(conversation_id, index, reason, None))


class DropRecord(NamedTuple):
    """A drop, and when it was decided, in seconds of the engine's clock."""

    at_s: float
    reason: DropReason
    worth: float | None


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
