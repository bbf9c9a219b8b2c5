"""The conversations that the engine has in memory, over those that the history store keeps.

Owns: which conversations exist and which are busy; loading one on first use; truncating, ending, and the
bound and time-to-live on idle ones. Branches of trees are among those in memory.
Does not know: batches or text.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
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
from pensieve_jax.core.turn_node import check_owner, check_turn_id
from pensieve_jax.engine.branches import BranchTable
from pensieve_jax.engine.explanation import DropJournal
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.loop import PeriodicSweep
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.history import ConversationInfo, ConversationRecord, Cut, HistoryStore

# Of those that have no state but what one sequence shares with them, the latest active: a template may be
# forked for every user there ever is.
_MAX_SHARERS: Final = 64


class ConversationTable:
    """Conversations by id. One-off ones are in nobody's listing and leave with their only turn.

    Attributes:
      branches: those whose turns are placed by their caller.
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
        """Nothing in memory; `store` decides which conversations exist."""
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
        """Conversations in memory, one-off ones included."""
        return len(self._live)

    def get(self, conversation_id: str) -> LiveConversation:
        """An existing conversation, loaded if need be; raises UnknownConversationError."""
        live = self._live.get(conversation_id)
        return live if live is not None else self._load(self._store.load(conversation_id))

    def get_or_create(self, conversation_id: str | None) -> LiveConversation:
        """An existing conversation or a new one; None makes a one-off one."""
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
        """Length of a conversation's history; 0 for one that does not exist. Creates nothing.

        Whoever makes a prompt asks this first: what somebody else has changed leaves memory here.
        """
        check_conversation_id(conversation_id)
        if conversation_id is None:
            return 0
        live = self._current(conversation_id)
        if live is not None:
            return live.conversation.num_history_tokens
        try:
            return self._store.info(conversation_id).num_tokens
        except UnknownConversationError:
            return 0

    def look_up(self, conversation_id: str) -> LiveConversation | ConversationRecord:
        """What is in memory of a conversation, or else its history; loads nothing.

        Raises UnknownConversationError or InvalidRequestError.
        """
        check_conversation_id(conversation_id)
        if conversation_id is None:
            raise InvalidRequestError("conversation_id", None, "the id of a conversation")
        return self._current(conversation_id) or self._store.load(conversation_id)

    def is_busy(self, conversation_id: str) -> bool:
        """A turn of it runs."""
        live = self._live.get(conversation_id)
        return live is not None and live.busy

    def listing(self) -> list[ConversationInfo]:
        """Every conversation with at least one committed turn, the most recently active first."""
        return self._store.conversations()

    def record(self, conversation_id: str) -> ConversationRecord:
        """Its committed turns; raises UnknownConversationError."""
        check_conversation_id(conversation_id)
        return self._store.load(conversation_id)

    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of the history and of the KV state.

        Raises UnknownConversationError, ConversationBusyError, or InvalidRequestError for a length that the
        history does not have.
        """
        self._check_idle(conversation_id)
        live = self.get(conversation_id)
        cut = self._store.truncate(conversation_id, num_tokens)
        num_tokens = int(num_tokens)  # the store takes numpy's ints as well
        if cut.head_before != live.conversation.head:  # somebody else has changed it since
            self.forget(live)
            return
        self._cache.truncate(live.sequence, num_tokens)
        live.conversation.truncate(num_tokens, cut.num_turns)
        live.conversation.head = cut.head
        self._drops.forget(conversation_id)

    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Have a new conversation begin as the first `num_tokens` committed tokens of another one.

        Raises UnknownConversationError, ConversationBusyError for a new id whose first turn is running, and
        InvalidRequestError for a new id that exists already or a length that the history does not have.
        """
        check_conversation_id(conversation_id)
        check_conversation_id(new_conversation_id, "new_conversation_id")
        self._check_idle(new_conversation_id)
        # As if a turn had ended just now, or the next rule on idle ones could end it before its first turn.
        cut = self._store.fork(conversation_id, new_conversation_id, num_tokens, at_s=self._clock.now())
        self._forget_ended(new_conversation_id)  # one of that name, if another replica has ended it
        source = self._live.get(conversation_id)
        if self._stateful and source is not None and source.conversation.head == cut.head_before:
            num_known = source.conversation.num_history_tokens if num_tokens is None else int(num_tokens)
            self._fork_state(source, new_conversation_id, num_known, cut)

    def push_out(self, conversation_id: str, max_num_chunks: int | None = None) -> int:
        """Copy a conversation's state to host memory before anybody needs the room; returns how many chunks.

        Raises InvalidRequestError, UnknownConversationError or ConversationBusyError.
        """
        self._check_idle(conversation_id)
        number = max_num_chunks
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise InvalidRequestError("max_num_chunks", number, "None or an integer of at least 0")
        return self._cache.push_out(self.get(conversation_id).sequence, max_num_chunks)

    def push_out_turn(self, owner: str, turn_id: str) -> int:
        """Copy the state of the path to a turn to host memory, as `push_out`; returns how many chunks.

        What running turns begin with stays. Raises UnknownTurnError.
        """
        return sum(
            self._cache.push_out(own)
            for branch in self._idle_at(owner, turn_id)
            for own in reversed(list(branch.sequence.lineage()))
            if own.role is Role.IDLE
        )

    def forget_turn_state(self, owner: str, turn_id: str) -> None:
        """Drop the state of the path to a turn, but for what other branches begin with.

        Raises UnknownTurnError.
        """
        for branch in self._idle_at(owner, turn_id):
            self._cache.truncate(branch.sequence, 0)
            self._drops.forget(branch.conversation.conversation_id)

    def forget_state(self, conversation_id: str) -> None:
        """Drop a conversation's state and keep its history; see `push_out` for errors."""
        self._check_idle(conversation_id)
        self._cache.truncate(self.get(conversation_id).sequence, 0)
        self._drops.forget(conversation_id)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation; raises UnknownConversationError or ConversationBusyError."""
        self._check_idle(conversation_id)
        try:
            self._store.delete(conversation_id)
        except UnknownConversationError:  # another replica was first
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
        """Take a conversation out of memory and free its state; the store keeps what it has."""
        conversation = live.conversation
        del self._live[conversation.conversation_id]
        is_branch = isinstance(live, Branch)
        if isinstance(live, Branch):
            self.branches.forget(live)
            self._cache.turns.ended(conversation.conversation_id)
        self._cache.close(live.sequence)
        if is_branch or conversation.one_off or not conversation.num_turns:  # nobody can ask for it any more
            self._drops.forget(conversation.conversation_id)

    def expire_idle(self) -> None:
        """End conversations beyond the time-to-live, then the least recently active beyond the bound.

        Branches leave memory by the same rules: what the history has of them stays there.
        """
        bound, ttl_s = self._config.max_idle_conversations, self._config.idle_ttl_s
        if bound is None and ttl_s is None:
            return
        before_s = None if ttl_s is None else self._clock.now() - ttl_s
        busy = {name for name, live in self._live.items() if live.busy and "\0" not in name}  # callers' names
        for conversation_id in self._store.idle(before_s, bound, busy):
            with contextlib.suppress(UnknownConversationError):  # another replica was first
                self.end(conversation_id)
        branches = [live for live in self._live.values() if isinstance(live, Branch) and not live.busy]
        branches.sort(key=lambda branch: -branch.sequence.last_active_s)
        for position, branch in enumerate(branches):
            is_old = before_s is not None and branch.sequence.last_active_s < before_s
            if is_old or (bound is not None and position >= bound):
                self.forget(branch)

    def forget_stateless(self) -> None:
        """Take idle conversations without KV state out of memory; now and then, so that it costs little."""
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
        for sharing in sharers.values():  # what they share stays with any one of them
            sharing.sort(key=lambda live: -live.sequence.last_active_s)
            for live in sharing[_MAX_SHARERS:]:
                self.forget(live)
        self._prefixes.forget_unused()
        self._sweep.done(len(self._live))

    def _idle_at(self, owner: str, turn_id: str) -> list[Branch]:
        """Idle branches that end with a turn, or have it on their path; none: it is in the history only."""
        check_owner(owner)
        check_turn_id("turn_id", turn_id)
        branches = self.branches.at(owner, turn_id)
        if not branches:
            self._store.load_turn(owner, turn_id)  # or there is no such turn
        return [branch for branch in branches if not branch.busy]

    def _current(self, conversation_id: str) -> LiveConversation | None:
        """What is in memory of a conversation, unless another replica has changed it since."""
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
        live.sequence.last_active_s = record.last_active_s
        return live

    def _enter(self, conversation: Conversation) -> LiveConversation:
        live = LiveConversation(conversation, self._cache.open(conversation.conversation_id))
        self._add(live)
        return live

    def _fork_state(self, source: LiveConversation, new_id: str, num_tokens: int, cut: Cut) -> None:
        """A conversation begins with what another one has in memory, which may be running.

        Both are active, with what they share: the new one waits for its first turn, and of a template the
        next fork may come.
        """
        token_ids = source.conversation.token_ids[:num_tokens]
        fork = Conversation(new_id, token_ids, num_history_tokens=num_tokens, num_turns=cut.num_turns)
        fork.head = cut.head
        fork.num_computed_tokens = min(source.conversation.num_computed_tokens, num_tokens)
        self._cache.touch(source.sequence)
        self._add(LiveConversation(fork, self._cache.fork(source.sequence, num_tokens, new_id)))

    def _add(self, live: LiveConversation) -> None:
        self._live[live.conversation.conversation_id] = live


def _holder_of_state(live: LiveConversation) -> CachedSequence | None:
    """Who has some of what it begins with, itself or shared, in some tier, which loading it would not find.

    A prefix that is still given to turns would be (`PrefixTable.rejoin`), with what that begins with; other
    shared chunks are reached from memory only.
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
