"""A ghost cache: a simulation of one eviction order, with one integer per conversation and no KV.

Owns: for one order, the number of leading blocks that each conversation would have lost by now in a
single-tier memory of a given size.
Does not know: the cost of losses, other orders, or the real chunks.
Called by `PolicySelector`.

All these orders evict leading chunks first, so the blocks from that integer on are the kept ones. A block is
several chunks, because losses need no finer resolution and each block takes host time.
"""

from __future__ import annotations

from pensieve_jax.cache.order.policies import EvictionPolicy
from pensieve_jax.cache.order.victims import VictimOrder
from pensieve_jax.cache.sequence import NUM_EVICTION_CLASSES, Role
from pensieve_jax.cache.states import EvictionClass

_CLASS = EvictionClass.HOST  # the only eviction class of a ghost cache


class GhostEntry:
    """A conversation in a ghost cache; implements `policies.Candidate`.

    Attributes:
      conversation_id: id of the conversation.
      num_blocks: all blocks, including lost ones.
      num_shared: leading blocks that are shared and not its own.
      num_lost: leading own blocks that are lost.
    """

    __slots__ = (
        *(
            "bucket",
            "conversation_id",
            "last_active_s",
            "num_blocks",
            "num_lost",
            "num_by_class",
            "num_shared",
        ),
        *("role", "role_number"),
    )

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.role, self.role_number = Role.RUNNING, 0
        self.last_active_s, self.bucket = 0.0, 0
        self.num_blocks = self.num_shared = self.num_lost = 0
        self.num_by_class = [0] * NUM_EVICTION_CLASSES

    @property
    def num_held(self) -> int:
        """Own blocks that are kept."""
        return self.num_by_class[_CLASS]

    def first_of(self, eviction_class: EvictionClass) -> int:
        """Return the first kept block."""
        return self.num_shared + self.num_lost

    def last_of(self, eviction_class: EvictionClass) -> int:
        return self.num_blocks - 1

    def indices_of(self, eviction_class: EvictionClass) -> range:
        """Return the kept blocks."""
        return range(self.first_of(eviction_class), self.num_blocks)

    def set_size(self, num_blocks: int, num_shared: int, num_lost: int) -> None:
        """Set the number of blocks, and how many of them are shared and lost."""
        self.num_blocks, self.num_shared = num_blocks, min(num_shared, num_blocks)
        self.num_lost = min(num_lost, num_blocks - self.num_shared)
        self.num_by_class[_CLASS] = num_blocks - self.num_shared - self.num_lost


class GhostCache:
    """All conversations in a simulated cache with one eviction order.

    Attributes:
      num_held: kept blocks of all conversations.
    """

    def __init__(self, policy: EvictionPolicy, num_places: int) -> None:
        """Start empty, with room for `num_places` blocks; `policy` counts indices in blocks."""
        self.num_held = 0
        self._num_places = num_places
        self._slack = num_places // 64  # evicting for several turns at once takes less time
        self._entries: dict[str, GhostEntry] = {}
        self._noted: dict[GhostEntry, None] = {}  # changed entries, for `VictimOrder`
        self._order = VictimOrder(policy, _CLASS, self._noted)
        self._num_roles = 0

    def returned(self, conversation_id: str) -> int | None:
        """Restore a conversation's history for a turn; returns how many leading own blocks were lost.

        Returns None if all were lost or the conversation is unknown.
        """
        entry = self._entries.get(conversation_id)
        if entry is None:
            return None
        num_lost = entry.num_lost
        self._noted.pop(entry, None)
        entry.role = Role.RUNNING
        self._resize(entry, entry.num_blocks, entry.num_shared, 0)
        return num_lost

    def left(
        self, conversation_id: str, num_blocks: int, *, num_shared: int, bucket: int, now_s: float
    ) -> None:
        """Make a conversation idle with all of its blocks, and evict others for it."""
        entry = self._entries.get(conversation_id)
        if entry is None:
            entry = self._entries[conversation_id] = GhostEntry(conversation_id)
        self._num_roles += 1
        entry.role, entry.role_number = Role.IDLE, self._num_roles
        entry.last_active_s, entry.bucket = now_s, bucket
        self._resize(entry, num_blocks, num_shared, 0)
        if entry.num_held:
            self._noted[entry] = None
        else:  # without own blocks it would never be evicted, and so never be removed
            self.ended(conversation_id)
        self._make_room(now_s)

    def resized(self, conversation_id: str, num_shared: int) -> None:
        """Set the number of leading blocks of a conversation that are shared.

        Blocks that become its own count as kept, unless own blocks after them are lost.
        """
        entry = self._entries.get(conversation_id)
        if entry is None:
            return
        num_given = num_shared - entry.num_shared
        num_lost = max(entry.num_lost - num_given, 0) if entry.num_lost else 0
        self._resize(entry, entry.num_blocks, num_shared, num_lost)
        if entry.role is Role.IDLE:
            if entry.num_held:
                self._noted[entry] = None
            else:
                self.ended(conversation_id)

    def ended(self, conversation_id: str) -> None:
        """Forget a conversation and free the blocks that it holds."""
        entry = self._entries.pop(conversation_id, None)
        if entry is not None:
            self._noted.pop(entry, None)
            entry.role = Role.RUNNING  # orders evict idle entries only
            self._resize(entry, 0, 0, 0)

    def _resize(self, entry: GhostEntry, num_blocks: int, num_shared: int, num_lost: int) -> None:
        self.num_held -= entry.num_held
        entry.set_size(num_blocks, num_shared, num_lost)
        self.num_held += entry.num_held

    def _make_room(self, now_s: float) -> None:
        if self.num_held <= self._num_places + self._slack:
            return
        self._order.begin(now_s)
        while self.num_held > self._num_places:
            victim = self._order.peek()
            if victim is None:
                return  # running conversations fill the memory
            entry = victim.sequence
            self._resize(entry, entry.num_blocks, entry.num_shared, entry.num_lost + 1)
            if not entry.num_held:
                self.ended(entry.conversation_id)
