"""The conversations that the engine has in memory, over those that the history store keeps.

Owns: which conversations exist and which are busy; loading one on first use; truncating, ending, and the
bound and time-to-live on idle ones.
Does not know: batches or text.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.errors import (
    ConversationBusyError,
    InvalidRequestError,
    UnknownConversationError,
)
from pensieve_jax.engine.drop_journal import DropJournal
from pensieve_jax.engine.loop import Sweep
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.history import ConversationInfo, ConversationRecord, HistoryStore


@dataclass(eq=False, slots=True)
class LiveConversation:
    """A conversation in memory: its tokens, its cached state, and whether a turn of it runs."""

    conversation: Conversation
    sequence: CachedSequence
    busy: bool = False


class ConversationTable:
    """Conversations by id. One-off ones are in nobody's listing and leave with their only turn."""

    def __init__(
        self,
        store: HistoryStore,
        cache: CacheManager,
        prefixes: PrefixTable,
        drops: DropJournal,
        clock: Clock,
        config: CacheConfig,
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
        self._sweep = Sweep()

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
        """Length of a conversation's history; 0 for one that does not exist. Creates nothing."""
        check_conversation_id(conversation_id)
        if conversation_id is None:
            return 0
        live = self._live.get(conversation_id)
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
        return self._live.get(conversation_id) or self._store.load(conversation_id)

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
        num_turns = self._store.truncate(conversation_id, num_tokens)
        num_tokens = int(num_tokens)  # the store takes numpy's ints as well
        self._cache.truncate(live.sequence, num_tokens)
        live.conversation.truncate(num_tokens, num_turns)
        self._drops.forget(conversation_id)

    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Have a new conversation begin as the first `num_tokens` committed tokens of another one.

        Raises UnknownConversationError, ConversationBusyError for a new id whose first turn is running, and
        InvalidRequestError for a new id that exists already or a length that the history does not have.
        """
        check_conversation_id(conversation_id)
        check_conversation_id(new_conversation_id, "new_conversation_id")
        self._check_idle(new_conversation_id)
        self._store.fork(conversation_id, new_conversation_id, num_tokens)

    def push_out(self, conversation_id: str, max_num_chunks: int | None = None) -> int:
        """Copy a conversation's state to host memory before anybody needs the room; returns how many chunks.

        Raises InvalidRequestError, UnknownConversationError or ConversationBusyError.
        """
        self._check_idle(conversation_id)
        number = max_num_chunks
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise InvalidRequestError("max_num_chunks", number, "None or an integer of at least 0")
        return self._cache.push_out(self.get(conversation_id).sequence, max_num_chunks)

    def forget_state(self, conversation_id: str) -> None:
        """Drop a conversation's state and keep its history; see `push_out` for errors."""
        self._check_idle(conversation_id)
        self._cache.truncate(self.get(conversation_id).sequence, 0)
        self._drops.forget(conversation_id)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation; raises UnknownConversationError or ConversationBusyError."""
        self._check_idle(conversation_id)
        self._store.delete(conversation_id)
        self._cache.turns.ended(conversation_id)
        self._drops.forget(conversation_id)
        live = self._live.get(conversation_id)
        if live is not None:
            self.forget(live)

    def forget(self, live: LiveConversation) -> None:
        """Take a conversation out of memory and free its state; the store keeps what it has."""
        del self._live[live.conversation.conversation_id]
        self._cache.close(live.sequence)
        if live.conversation.one_off or not live.conversation.num_turns:  # nobody can ask for it any more
            self._drops.forget(live.conversation.conversation_id)

    def expire_idle(self) -> None:
        """End conversations beyond the time-to-live, then the least recently active beyond the bound."""
        bound, ttl_s = self._config.max_idle_conversations, self._config.idle_ttl_s
        if bound is None and ttl_s is None:
            return
        idle = [info for info in self._store.conversations() if not self.is_busy(info.conversation_id)]
        now_s = self._clock.now()
        for position, info in enumerate(idle):
            too_many = bound is not None and position >= bound
            too_old = ttl_s is not None and now_s - info.last_active_s > ttl_s
            if too_many or too_old:
                self.end(info.conversation_id)

    def forget_stateless(self) -> None:
        """Take idle conversations without KV state out of memory; now and then, so that it costs little."""
        if not self._sweep.is_due(len(self._live)):
            return
        for live in list(self._live.values()):
            if not live.busy and not live.sequence.holds_state:
                self.forget(live)
        self._prefixes.forget_unused()
        self._sweep.done(len(self._live))

    def _check_idle(self, conversation_id: str) -> None:
        check_conversation_id(conversation_id)
        if self.is_busy(conversation_id):
            raise ConversationBusyError(conversation_id)

    def _load(self, record: ConversationRecord) -> LiveConversation:
        token_ids = record.token_ids.tolist()
        conversation = Conversation(record.conversation_id, token_ids, num_turns=len(record.turns))
        conversation.num_history_tokens = len(token_ids)
        conversation.num_computed_tokens = max(len(token_ids) - 1, 0)
        live = self._enter(conversation)
        self._prefixes.rejoin(live.sequence, token_ids)
        live.sequence.last_active_s = record.last_active_s
        return live

    def _enter(self, conversation: Conversation) -> LiveConversation:
        live = LiveConversation(conversation, self._cache.open(conversation.conversation_id))
        self._live[conversation.conversation_id] = live
        return live


def check_conversation_id(conversation_id: object, field: str = "conversation_id") -> None:
    """Raise InvalidRequestError unless it is None or a non-empty string of UTF-8 without NUL."""
    if conversation_id is None:
        return
    ok = isinstance(conversation_id, str) and conversation_id != "" and "\0" not in conversation_id
    if not ok or not _is_utf8(str(conversation_id)):
        limit = "None or a non-empty string that UTF-8 can hold, without NUL characters"
        raise InvalidRequestError(field, conversation_id, limit)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
