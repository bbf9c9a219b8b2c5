"""Explanations for users: where the KV cache of a conversation is, and why chunks were dropped.

Owns: the text of `Engine.explain` and `Engine.explain_turn`, the journal of drops that they use, and the
compact chunk map of an owner's branches, which is short enough to be sent several times a second.
Does not know: how victims are chosen (`cache.evictor`), or who asks.
Called by the engine.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pensieve_jax.cache import CachedSequence, CacheManager, ChunkDrop, ChunkState, DropReason, Role
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.history import ConversationRecord

_UNRECORDED = "not cached, for no recorded reason"
_NOT_IN_MEMORY = "not cached: not computed since this start, or dropped long ago; the history has its tokens"
_PLACES = {
    ChunkState.ON_GPU: ("gpu", "in device memory"),
    ChunkState.COPYING_OUT: ("gpu", "in device memory, being copied to host memory"),
    ChunkState.ON_BOTH: ("gpu", "in device memory, with a copy in host memory"),
    ChunkState.LEAVING: ("cpu", "being moved from device to host memory"),
    ChunkState.ON_CPU: ("cpu", "in host memory"),
    ChunkState.COPYING_IN: ("cpu", "being copied from host to device memory"),
    ChunkState.RESERVED: (None, "about to be computed"),
    ChunkState.DROPPED: (None, None),
}
_MAX_NUM_RECORDS = 200_000  # about 30 MB; beyond it, conversations with the oldest drops are forgotten first
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
"""Letters of a chunk map.

g: on the GPU; b: in both tiers; c: on the CPU; l: loading; v: leaving for the CPU;
d: dropped or not computed yet.
"""


def explain(
    target: LiveConversation | ConversationRecord,
    prefixes: PrefixTable,
    cache: CacheManager,
    journal: DropJournal,
    config: EngineConfig,
) -> Explanation:
    """Explain the KV cache of a conversation that is in memory, or only in the history."""
    if isinstance(target, ConversationRecord):
        sequence, num_tokens = CachedSequence(target.conversation_id), len(target.token_ids)
        sequence.begin_with(prefixes.find(target.token_ids.tolist()))  # as loading it for a turn would do
        subject = _Subject(sequence.sequence_id, sequence, num_tokens, num_tokens - 1)
    else:
        conversation, sequence = target.conversation, target.sequence
        subject = _Subject(
            sequence.sequence_id,
            sequence,
            len(conversation.token_ids),
            max(sequence.num_kv_tokens, conversation.num_computed_tokens),
            live=target,
        )
    return _explained(subject, cache, journal, config)


def explain_turn(
    target: Branch | ConversationRecord,
    turn_id: str,
    beginning: tuple[Branch, int] | None,
    cache: CacheManager,
    journal: DropJournal,
    config: EngineConfig,
) -> Explanation:
    """Explain the KV cache of the path to a turn that a branch contains, or only the history.

    For a turn in the history only, `beginning` is a branch that begins with as many of its tokens.
    """
    if isinstance(target, Branch):
        conversation, sequence = target.conversation, target.sequence
        end = target.path[turn_id]
        num_tokens = end.num_shared + len(end.tail)
        num_shared = min(end.num_shared, conversation.num_history_tokens)
        if num_shared < num_tokens:  # a later turn replaces the rest
            num_chunks = min(num_shared // cache.chunk_tokens, len(sequence.chunks))
            subject = _Subject(turn_id, sequence, num_tokens, num_tokens - 1, num_borrowed=num_chunks)
        else:
            num_computed = min(num_tokens, max(sequence.num_kv_tokens, conversation.num_computed_tokens))
            is_tip = target.tip == turn_id
            subject = _Subject(turn_id, sequence, num_tokens, num_computed, live=target, is_extended=is_tip)
    else:
        num_tokens = len(target.token_ids)
        sequence, num_known = CachedSequence(turn_id), 0
        if beginning is not None:
            sequence, num_known = beginning[0].sequence, beginning[1] // cache.chunk_tokens
        subject = _Subject(turn_id, sequence, num_tokens, num_tokens - 1, num_borrowed=num_known)
    return _explained(subject, cache, journal, config)


class _Subject(NamedTuple):
    """The sequence that an explanation describes.

    Attributes:
      name: what the text calls it.
      sequence: holder of the chunks.
      num_tokens: its tokens.
      num_computed: those of its tokens that were computed once.
      live: its record in memory; None if it is only in the history.
      is_extended: whether its next turn continues the sequence; else the turn shares full chunks only.
      num_borrowed: for a subject that `sequence` does not belong to, its leading chunks that are the same.
    """

    name: str
    sequence: CachedSequence
    num_tokens: int
    num_computed: int
    live: LiveConversation | None = None
    is_extended: bool = True
    num_borrowed: int | None = None


def _explained(
    subject: _Subject, cache: CacheManager, journal: DropJournal, config: EngineConfig
) -> Explanation:
    now_s, live = journal.clock.now(), subject.live
    is_busy = live is not None and live.busy
    idle_s = None if live is None or is_busy else now_s - live.sequence.last_active_s
    keeps_state = config.stateful or is_busy
    chunks = tuple(_chunks(subject, cache, journal if keeps_state else None))
    lines = [_headline(subject.name, subject.num_tokens, config, idle_s, is_busy)]
    if (order := cache.turns.describe()) is not None:
        lines.append(f"  {order}")
    if keeps_state:
        lines += _lines(chunks, cache, now_s, _NOT_IN_MEMORY if live is None else _UNRECORDED)
    else:
        lines.append("This engine keeps no KV cache between turns (stateful=False).")
    if not is_busy:
        lines.append(_outlook(chunks, 1 if subject.is_extended else cache.chunk_tokens))
    name, policy = subject.name, config.cache.policy
    return Explanation(name, subject.num_tokens, policy, idle_s, chunks, tuple(lines))


class Explanation(NamedTuple):
    """The location of a conversation's KV cache; `str` returns the text for users.

    Attributes:
      conversation_id: id of the conversation.
      num_tokens: tokens of its history, and of its running turn so far.
      policy: eviction policy, as in `CacheConfig.policy`.
      idle_s: seconds since it was last active; None while a turn is in progress, or if it is not in memory.
      chunks: all chunks in order; tokens after the last chunk were not computed yet.
      lines: the explanation as text.
    """

    conversation_id: str
    num_tokens: int
    policy: str
    idle_s: float | None
    chunks: tuple[ChunkReport, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        """Return the text for users, with a line for every run of chunks of the same status."""
        return "\n".join(self.lines)


class ChunkReport(NamedTuple):
    """One chunk of a conversation.

    Attributes:
      start, end: range of its tokens.
      tier: tier that has its KV, "gpu" or "cpu"; None if a turn must compute it.
      place: its location in words, including copies in flight; None if it is in neither tier.
      worth: its current retention value; None if it cannot be evicted by that value now.
      drop: the recorded drop of a chunk in neither tier, if known.
      is_shared: whether other conversations share it.
    """

    start: int
    end: int
    tier: str | None
    place: str | None
    worth: float | None
    drop: DropRecord | None
    is_shared: bool


def _chunks(subject: _Subject, cache: CacheManager, journal: DropJournal | None) -> Iterator[ChunkReport]:
    """Yield a report on every chunk that was ever computed; without a journal, no reasons are given."""
    size, sequence = cache.chunk_tokens, subject.sequence
    num_known = len(sequence.chunks) if subject.num_borrowed is None else subject.num_borrowed
    for index in range(-(-max(subject.num_computed, 0) // size)):
        is_foreign = subject.num_borrowed is not None and index >= num_known
        owner = sequence.owner_of(index)
        chunk = sequence.chunks[index] if index < num_known else None
        tier, place = _PLACES[ChunkState.DROPPED if chunk is None else chunk.state]
        drops: Mapping[int, DropRecord] = {}
        if journal is not None and not is_foreign:
            drops = journal.of(owner.sequence_id)
        has_worth = place is not None and owner.role is Role.IDLE
        yield ChunkReport(
            index * size,
            min((index + 1) * size, subject.num_computed),
            tier,
            place,
            cache.worth_of(owner, index) if has_worth else None,
            drops.get(index) if place is None else None,
            not is_foreign and (owner is not sequence or subject.num_borrowed is not None),
        )


def _headline(
    conversation_id: str, num_tokens: int, config: EngineConfig, idle_s: float | None, is_busy: bool
) -> str:
    if is_busy:
        activity = "a turn of it is in progress"
    elif idle_s is None:
        activity = "not in memory"
    else:
        activity = f"idle for {idle_s:.1f} s"
    return f"{conversation_id!r}: {num_tokens} tokens, {activity}; eviction order {config.cache.policy!r}"


def _lines(chunks: Sequence[ChunkReport], cache: CacheManager, now_s: float, unknown: str) -> Iterator[str]:
    """Yield a line for every run of chunks of the same status; `unknown` is the text for unknown reasons."""
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


def _outlook(chunks: Sequence[ChunkReport], multiple: int) -> str:
    """Say what a turn would reuse now; it reuses a chunk if the end of the chunk is such a multiple."""
    sizes = Counter[str | None]()
    for chunk in chunks:
        sizes[None if chunk.end % multiple else chunk.tier] += chunk.end - chunk.start
    return (
        f"A turn sent now would reuse {sizes['gpu']} tokens in device memory, copy {sizes['cpu']} in, and "
        f"recompute {sizes[None]} of its history."
    )


class DropJournal:
    """The latest drop of every chunk, for the conversations with the most recent drops.

    Shared chunks are recorded under the id of their own sequence, like those of a conversation.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._drops: OrderedDict[str, dict[int, DropRecord]] = OrderedDict()
        self._num_records = 0

    def note(self, drop: ChunkDrop) -> None:
        """Record a drop at the current time."""
        of_conversation = self._drops.setdefault(drop.conversation_id, {})
        self._num_records += drop.index not in of_conversation
        of_conversation[drop.index] = DropRecord(self.clock.now(), drop.reason, drop.worth)
        self._drops.move_to_end(drop.conversation_id)
        while self._num_records > _MAX_NUM_RECORDS and len(self._drops) > 1:
            self._num_records -= len(self._drops.popitem(last=False)[1])

    def of(self, conversation_id: str) -> dict[int, DropRecord]:
        """Return the recorded drops of a conversation by chunk index."""
        return self._drops.get(conversation_id, {})

    def forget(self, conversation_id: str) -> None:
        """Forget the drops of a conversation that was changed or removed, because they are out of date."""
        self._num_records -= len(self._drops.pop(conversation_id, {}))

    def forget_from(self, conversation_id: str, index: int) -> None:
        """Forget the drops of a conversation's chunks from this one on, because other tokens replace them."""
        of_conversation = self._drops.get(conversation_id, {})
        for later in [one for one in of_conversation if one >= index]:
            del of_conversation[later]
            self._num_records -= 1

    def move(self, before: str, after: str | None, indices: range) -> None:
        """Move the records of chunks that change their owner; with `after` None, forget the first owner's."""
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
        """Record the drop of all of these chunks (conversation id, index) at the current time."""
        for conversation_id, index in held:
            self.note(ChunkDrop(conversation_id, index, reason, None))


class DropRecord(NamedTuple):
    """A drop and its time, in seconds of the engine's clock."""

    at_s: float
    reason: DropReason
    worth: float | None


def chunk_map(branches: Iterable[Branch]) -> list[BranchMap]:
    """Map the chunks of these branches; a shared chunk appears only in the first of them."""
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
      turn_id: its latest answered turn; None before the first one.
      num_tokens: tokens of its turns, and of the one in progress so far.
      busy: whether a turn of it is running or waiting.
      num_shared: number of leading chunks that it shares with other branches.
      first: number of leading chunks that an earlier branch shows already; `states` omits them.
      states: states of the other chunks as runs: "12g3d" means 12 on the GPU, then 3 dropped; see `LETTERS`.
    """

    turn_id: str | None
    num_tokens: int
    busy: bool
    num_shared: int
    first: int
    states: str
