"""The conversations in the engine's memory, as a cache of those in the history store.

Owns: which conversations exist and which are busy, loading on first use, truncating, forking, ending, and the
bound and time-to-live on idle conversations. Branches of trees count as conversations in memory.
Does not know: batches or text.
Called by the engine, the submission of turns, and the ledger.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection
from typing import Final

from pensieve_jax.cache import CachedSequence, CacheManager, Role
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.conversation import Conversation, is_conversation_id
from pensieve_jax.core.errors import (
    ConversationBusyError,
    InvalidRequestError,
    UnknownConversationError,
)
from pensieve_jax.core.token_ids import num_equal
from pensieve_jax.core.turn_node import check_owner, check_turn_id
from pensieve_jax.engine.branches import BranchTable
from pensieve_jax.engine.explanation import DropJournal
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.loop import PeriodicSweep
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.history import ConversationInfo, ConversationRecord, Cut, HistoryStore
from pensieve_jax.history.store import TurnKey

# The most idle conversations to keep that have no KV cache except what they share from one sequence; the
# latest active stay. Without a limit, a template with a fork per user would keep all forks in memory.
_MAX_SHARERS: Final = 64


class ConversationTable:
    """Conversations in memory by id. One-off conversations are never listed and leave after their only turn.

    Attributes:
      branches: conversations whose turns are placed in a tree by their caller.
    """

    def __init__(
        self,
        store: HistoryStore,
        cache: CacheManager,
        prefixes: PrefixTable,
        drops: DropJournal,
        clock: Clock,
        config: CacheConfig,
        *,
        stateful: bool,
    ) -> None:
        """Start with nothing in memory; `store` decides which conversations exist."""
        self._store = store
        self._cache = cache
        self._prefixes = prefixes
        self._drops = drops
        self._clock = clock
        self._config = config
        self._live: dict[str, LiveConversation] = {}
        self._num_one_off = 0
        self._stateful = stateful
        self._sweep = PeriodicSweep()
        self.branches = BranchTable(store, cache, self._add, shares_state=stateful)

    def __len__(self) -> int:
        """Return the number of conversations in memory, including one-off ones."""
        return len(self._live)

    def get(self, conversation_id: str) -> LiveConversation:
        """Return an existing conversation, loaded if needed; raises UnknownConversationError."""
        live = self._live.get(conversation_id)
        return live if live is not None else self._load(self._store.load(conversation_id))

    def get_or_create(self, conversation_id: str | None) -> LiveConversation:
        """Return an existing conversation or create one; None creates a one-off conversation."""
        if conversation_id is None:
            self._num_one_off += 1
            # Never a caller's id: those have no NUL.
            one_off = Conversation(f"\0one-off-{self._num_one_off}", one_off=True)
            return self._enter(one_off)
        try:
            return self.get(conversation_id)
        except UnknownConversationError:
            return self._enter(Conversation(conversation_id))

    def num_tokens(self, conversation_id: str | None) -> int:
        """Return the length of a conversation's history, or 0 if it does not exist.

        Callers do this before they make a prompt. It removes a conversation that another replica has changed
        from memory, and creates nothing.
        """
        check_conversation_id(conversation_id)
        if conversation_id is None:
            return 0
        live = self._current(conversation_id)
        if live is not None:
            return live.conversation.num_committed_tokens
        try:
            return self._store.info(conversation_id).num_tokens
        except UnknownConversationError:
            return 0

    def look_up(self, conversation_id: str) -> LiveConversation | ConversationRecord:
        """Return a conversation in memory, or else its record from the history, without loading it.

        Raises UnknownConversationError or InvalidRequestError.
        """
        check_conversation_id(conversation_id)
        if conversation_id is None:
            raise InvalidRequestError("conversation_id", None, "the id of a conversation")
        return self._current(conversation_id) or self._store.load(conversation_id)

    def look_up_turn(
        self, owner: str, turn_id: str
    ) -> tuple[Branch | ConversationRecord, tuple[Branch, int] | None]:
        """Return a branch with a turn, or else the path to it from the history, without loading it.

        With a path comes the branch that begins with the most of its tokens, if any, and their number.
        Raises UnknownTurnError or InvalidRequestError.
        """
        branches = self._branches_at(owner, turn_id)
        if branches:
            return branches[0], None
        record = self._store.load_turn(owner, turn_id)
        return record, self.branches.longest(owner, record.token_ids.tolist())

    def is_busy(self, conversation_id: str) -> bool:
        """Return whether a turn of the conversation is in progress."""
        live = self._live.get(conversation_id)
        return live is not None and live.busy

    def listing(self) -> list[ConversationInfo]:
        """Return every conversation with at least one committed turn, the most recently active first."""
        return self._store.conversations()

    def record(self, conversation_id: str) -> ConversationRecord:
        """Return the committed turns of a conversation; raises UnknownConversationError."""
        check_conversation_id(conversation_id)
        return self._store.load(conversation_id)

    def truncate(
        self, conversation_id: str, num_tokens: int | None = None, *, num_turns: int | None = None
    ) -> None:
        """Keep the first `num_tokens` tokens, or `num_turns` turns, of the history and of the KV cache.

        Raises UnknownConversationError, ConversationBusyError, or InvalidRequestError unless exactly one of
        the two is given and the history has as many.
        """
        self._check_idle(conversation_id)
        if (num_tokens is None) == (num_turns is None):
            raise InvalidRequestError("num_tokens", num_tokens, "given if num_turns is not, and only then")
        live = self.get(conversation_id)
        if num_tokens is not None:
            cut = self._store.truncate(conversation_id, num_tokens)
        else:
            assert num_turns is not None
            cut = self._store.truncate_turns(conversation_id, num_turns)
        if cut.head_before != live.conversation.head:  # another replica has changed it since
            self.forget(live)
            return
        token_ids = live.conversation.token_ids[: cut.num_tokens]
        if num_turns is not None and cut.head is not None:
            # A later turn may have replaced some of the ids in memory.
            token_ids = self._store.load(conversation_id).token_ids.tolist()
        num_same = num_equal(token_ids, live.conversation.token_ids)
        self._cache.truncate(live.sequence, num_same)
        live.conversation.truncate(num_same, cut.num_turns)
        live.conversation.extend_history(token_ids[num_same:])
        live.conversation.head = cut.head
        self._drops.forget(conversation_id)

    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Create a conversation from the first `num_tokens` committed tokens of another one.

        Raises UnknownConversationError, ConversationBusyError for a new id whose first turn is running, and
        InvalidRequestError for a new id that exists already or a length that the history does not have.
        """
        check_conversation_id(conversation_id)
        check_conversation_id(new_conversation_id, "new_conversation_id")
        self._check_idle(new_conversation_id)
        # The fork counts as active now, or `expire_idle` could end it before its first turn.
        cut = self._store.fork(conversation_id, new_conversation_id, num_tokens, at_s=self._clock.now())
        self._forget_ended(new_conversation_id)  # an old one of that id, if another replica has ended it
        source = self._live.get(conversation_id)
        if self._stateful and source is not None and source.conversation.head == cut.head_before:
            num_known = source.conversation.num_committed_tokens if num_tokens is None else int(num_tokens)
            self._fork_state(source, new_conversation_id, num_known, cut)

    def replace_from(self, live: LiveConversation, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of an idle conversation for a turn that replaces the others.

        The KV cache of the others is dropped. The tokens return if the turn is not committed; see
        `Conversation.replace_from`.
        """
        live.conversation.replace_from(num_tokens)
        self._cache.truncate(live.sequence, num_tokens)
        name = live.conversation.conversation_id
        self._drops.forget_from(name, num_tokens // self._cache.chunk_tokens)
        if isinstance(live, Branch):
            self.branches.replace_from(live, num_tokens)

    def push_out(self, conversation_id: str, max_num_chunks: int | None = None) -> int:
        """Move a conversation's KV cache to host memory ahead of need; returns the number of chunks.

        Raises InvalidRequestError, UnknownConversationError or ConversationBusyError.
        """
        self._check_idle(conversation_id)
        number = max_num_chunks
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise InvalidRequestError("max_num_chunks", number, "None or an integer of at least 0")
        return self._cache.push_out(self.get(conversation_id).sequence, max_num_chunks)

    def push_out_turn(self, owner: str, turn_id: str) -> int:
        """Move the KV cache of the path to a turn to host memory; returns the number of chunks.

        Chunks that running turns share stay on the device. Raises UnknownTurnError.
        """
        return sum(
            self._cache.push_out(own)
            for branch in self._idle_at(owner, turn_id)
            for own in reversed(list(branch.sequence.lineage()))
            if own.role is Role.IDLE
        )

    def forget_turn_state(self, owner: str, turn_id: str) -> None:
        """Drop the KV cache of the path to a turn, except chunks that other branches share.

        Raises UnknownTurnError.
        """
        for branch in self._idle_at(owner, turn_id):
            self._cache.truncate(branch.sequence, 0)
            self._drops.forget(branch.conversation.conversation_id)

    def forget_removed(self, removed: Collection[TurnKey]) -> None:
        """Cut removed turns off the ends of idle branches, with their KV cache.

        A branch with a later turn keeps their tokens, since they are its context. Chunks that other branches
        share stay with those.
        """
        gone = frozenset(removed)
        ending = {branch: None for turn in removed for branch in self.branches.containing(*turn)}
        for branch in ending:
            if branch.busy:
                continue
            kept = [turn_id for turn_id in branch.path if (branch.owner, turn_id) not in gone]
            last = kept[-1] if kept else None
            if last is None:
                self.forget(branch)
            elif last != branch.tip:
                self.branches.cut(branch, last)
                self._drops.forget(branch.conversation.conversation_id)

    def forget_state(self, conversation_id: str) -> None:
        """Drop a conversation's KV cache and keep its history; see `push_out` for errors."""
        self._check_idle(conversation_id)
        self._cache.truncate(self.get(conversation_id).sequence, 0)
        self._drops.forget(conversation_id)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation; raises UnknownConversationError or ConversationBusyError."""
        self._check_idle(conversation_id)
        try:
            self._store.delete(conversation_id)
        except UnknownConversationError:  # another replica ended it first
            self._forget_ended(conversation_id)
            raise
        self._forget_ended(conversation_id)

    def _forget_ended(self, conversation_id: str) -> None:
        self._cache.turns.ended(conversation_id)
        self._drops.forget(conversation_id)
        live = self._live.get(conversation_id)
        if live is not None:
            self.forget(live)

    def forget(self, live: LiveConversation) -> None:
        """Remove a conversation from memory and free its KV cache; its history stays in the store."""
        conversation = live.conversation
        del self._live[conversation.conversation_id]
        is_branch = isinstance(live, Branch)
        if isinstance(live, Branch):
            self.branches.forget(live)
            self._cache.turns.ended(conversation.conversation_id)
        self._cache.close(live.sequence)
        if is_branch or conversation.one_off or not conversation.num_turns:  # its id is never used again
            self._drops.forget(conversation.conversation_id)

    def expire_idle(self) -> None:
        """End conversations beyond the time-to-live, then the least recently active beyond the bound.

        Branches leave memory by the same rules; their turns stay in the history.
        """
        bound, ttl_s = self._config.max_idle_conversations, self._config.idle_ttl_s
        if bound is None and ttl_s is None:
            return
        before_s = None if ttl_s is None else self._clock.now() - ttl_s
        branch_before_s = None if ttl_s is None else self._drops.clock.now() - ttl_s
        busy = {name for name, live in self._live.items() if live.busy and "\0" not in name}  # callers' ids
        for conversation_id in self._store.idle(before_s, bound, busy):
            with contextlib.suppress(UnknownConversationError):  # another replica ended it first
                self.end(conversation_id)
        branches = [live for live in self._live.values() if isinstance(live, Branch) and not live.busy]
        branches.sort(key=lambda branch: -branch.sequence.last_active_s)
        for position, branch in enumerate(branches):
            is_old = branch_before_s is not None and branch.sequence.last_active_s < branch_before_s
            if is_old or (bound is not None and position >= bound):
                self.forget(branch)

    def forget_stateless(self) -> None:
        """Remove idle conversations without KV cache from memory; periodic, so that it costs little."""
        if not self._sweep.is_due(len(self._live)):
            return
        sharers: defaultdict[CachedSequence, list[LiveConversation]] = defaultdict(list)
        for live in list(self._live.values()):
            if not live.busy:
                holder = _holder_of_state(live)
                if holder is None:
                    self.forget(live)
                elif holder is not live.sequence:
                    sharers[holder].append(live)
        for sharing in sharers.values():  # the shared chunks stay as long as one of them does
            sharing.sort(key=lambda live: -live.sequence.last_active_s)
            for live in sharing[_MAX_SHARERS:]:
                self.forget(live)
        self._prefixes.forget_unused()
        self._sweep.done(len(self._live))

    def _idle_at(self, owner: str, turn_id: str) -> list[Branch]:
        """Return the idle branches whose tip is a turn, or else those that contain it.

        Empty if only the history has the turn; raises UnknownTurnError.
        """
        branches = self._branches_at(owner, turn_id)
        if not branches:
            self._store.load_turn(owner, turn_id)  # raises if the turn does not exist
        return [branch for branch in branches if not branch.busy]

    def _branches_at(self, owner: str, turn_id: str) -> list[Branch]:
        check_owner(owner)
        check_turn_id("turn_id", turn_id)
        return self.branches.at(owner, turn_id)

    def _current(self, conversation_id: str) -> LiveConversation | None:
        """Return a conversation in memory, but forget it if another replica has changed it since."""
        live = self._live.get(conversation_id)
        if live is None or live.busy or not self._store.is_shared:
            return live
        try:
            if self._store.head(conversation_id) == live.conversation.head:
                return live
        except UnknownConversationError:
            pass
        self.forget(live)
        return None

    def _check_idle(self, conversation_id: str) -> None:
        check_conversation_id(conversation_id)
        if self.is_busy(conversation_id):
            raise ConversationBusyError(conversation_id)

    def _load(self, record: ConversationRecord) -> LiveConversation:
        token_ids = record.token_ids.tolist()
        conversation = Conversation(record.conversation_id, token_ids, num_turns=len(record.turns))
        conversation.head = record.turns[-1].turn_id if record.turns else None
        conversation.num_history_tokens = len(token_ids)
        conversation.num_computed_tokens = max(len(token_ids) - 1, 0)
        live = self._enter(conversation)
        self._prefixes.rejoin(live.sequence, token_ids)
        # A clock that was ahead may have dated it in the future, where it would stay the most recent one.
        live.sequence.last_active_s = min(record.last_active_s, self._drops.clock.now())
        return live

    def _enter(self, conversation: Conversation) -> LiveConversation:
        live = LiveConversation(conversation, self._cache.open(conversation.conversation_id))
        self._add(live)
        return live

    def _fork_state(self, source: LiveConversation, new_id: str, num_tokens: int, cut: Cut) -> None:
        """Make a new conversation share the KV cache of `source`, which may be running.

        Both count as active now: the fork's first turn is expected, and a template may be forked again.
        """
        conversation = source.conversation
        token_ids = conversation.committed_token_ids[:num_tokens]
        fork = Conversation(new_id, token_ids, num_history_tokens=num_tokens, num_turns=cut.num_turns)
        fork.head = cut.head
        num_computed = conversation.num_computed_tokens + conversation.num_replaced_computed
        fork.num_computed_tokens = min(num_computed, num_tokens)
        self._cache.touch(source.sequence)
        # A running turn may have replaced what the fork still has.
        num_shared = min(num_tokens, conversation.num_history_tokens)
        self._add(LiveConversation(fork, self._cache.fork(source.sequence, num_shared, new_id)))

    def _add(self, live: LiveConversation) -> None:
        self._live[live.conversation.conversation_id] = live


def _holder_of_state(live: LiveConversation) -> CachedSequence | None:
    """Return the first sequence of the lineage that has KV which would be lost if `live` left memory.

    Stop at a shared prefix that is still in use: a loaded conversation finds it again (`PrefixTable.rejoin`),
    with everything before it. Other shared chunks can only be reached from conversations in memory.
    """
    for own in live.sequence.lineage():
        if own.is_held:
            return None
        if own.holds_state:
            return own
    return None


def check_conversation_id(conversation_id: object, field: str = "conversation_id") -> None:
    """Raise InvalidRequestError unless it is None or a non-empty string of UTF-8 without NUL."""
    if conversation_id is not None and not is_conversation_id(conversation_id):
        limit = "None or a non-empty string that UTF-8 can hold, without NUL characters"
        raise InvalidRequestError(field, conversation_id, limit)
