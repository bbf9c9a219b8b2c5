"""What an order would have kept, carried along beside the cache: one integer a conversation, and no state.

Owns: for one order, how many leading blocks each conversation would have lost by now, in a memory of one tier
and a given size.
Does not know: what the losses cost, which other orders there are, or the real chunks.

All these orders give way from a conversation's leading end, so what is kept is what lies behind that integer.
A block is several chunks: losses need not be counted to the chunk, and each takes time of the host.
"""

from __future__ import annotations

from pensieve_jax.cache.order.policies import EvictionPolicy
from pensieve_jax.cache.order.victims import VictimOrder
from pensieve_jax.cache.sequence import NUM_SHELVES, Role
from pensieve_jax.cache.states import EvictionClass

_SHELF = EvictionClass.HOST  # one shelf is all that there is here


class GhostEntry:
    """A conversation as an order would have it; see `policies.Candidate`.

    Attributes:
      conversation_id: whose.
      num_blocks: that it has, the lost ones included.
      num_shared: leading ones that belong to others.
      num_lost: leading ones of its own that are lost.
    """

    __slots__ = (
        *("bucket", "conversation_id", "last_active_s", "num_blocks", "num_lost", "num_on", "num_shared"),
        *("role", "role_number"),
    )

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.role, self.role_number = Role.RUNNING, 0
        self.last_active_s, self.bucket = 0.0, 0
        self.num_blocks = self.num_shared = self.num_lost = 0
        self.num_on = [0] * NUM_SHELVES

    @property
    def num_held(self) -> int:
        """Blocks of its own that are there."""
        return self.num_on[_SHELF]

    def first_on(self, shelf: EvictionClass) -> int:
        """The leading block that is there."""
        return self.num_shared + self.num_lost

    def last_on(self, shelf: EvictionClass) -> int:
        return self.num_blocks - 1

    def indices_on(self, shelf: EvictionClass) -> range:
        """Blocks that are there."""
        return range(self.first_on(shelf), self.num_blocks)

    def set_size(self, num_blocks: int, num_shared: int, num_lost: int) -> None:
        """How much it has, and what of it is lost."""
        self.num_blocks, self.num_shared = num_blocks, min(num_shared, num_blocks)
        self.num_lost = min(num_lost, num_blocks - self.num_shared)
        self.num_on[_SHELF] = num_blocks - self.num_shared - self.num_lost


class GhostCache:
    """All conversations as one order would have them.

    Attributes:
      num_held: blocks that are there, of all of them.
    """

    def __init__(self, policy: EvictionPolicy, num_places: int) -> None:
        """Empty, with room for `num_places` blocks; `policy` counts indices in blocks."""
        self.num_held = 0
        self._num_places = num_places
        self._slack = num_places // 64  # room is made for several turns at once, which takes less time
        self._shadows: dict[str, GhostEntry] = {}
        self._noted: dict[GhostEntry, None] = {}  # for the order to look at
        self._order = VictimOrder(policy, _SHELF, self._noted)
        self._num_roles = 0

    def returned(self, conversation_id: str) -> int | None:
        """A turn was sent: all of the history is needed. Returns how many leading blocks of its own are lost.

        None: everything is, or nothing is known of it.
        """
        shadow = self._shadows.get(conversation_id)
        if shadow is None:
            return None
        num_lost = shadow.num_lost
        self._noted.pop(shadow, None)
        shadow.role = Role.RUNNING
        self._resize(shadow, shadow.num_blocks, shadow.num_shared, 0)
        return num_lost

    def left(
        self, conversation_id: str, num_blocks: int, *, num_shared: int, bucket: int, now_s: float
    ) -> None:
        """A conversation is idle from now on, with all of its blocks; somebody gives way to it."""
        shadow = self._shadows.get(conversation_id)
        if shadow is None:
            shadow = self._shadows[conversation_id] = GhostEntry(conversation_id)
        self._num_roles += 1
        shadow.role, shadow.role_number = Role.IDLE, self._num_roles
        shadow.last_active_s, shadow.bucket = now_s, bucket
        self._resize(shadow, num_blocks, num_shared, 0)
        if shadow.num_held:
            self._noted[shadow] = None
        else:  # nothing to lose, and nobody would ever take it away
            self.ended(conversation_id)
        self._make_room(now_s)

    def resized(self, conversation_id: str, num_shared: int) -> None:
        """So many leading blocks of a conversation belong to others from now on.

        Those that it gets back are there, unless it has lost some that come after them.
        """
        shadow = self._shadows.get(conversation_id)
        if shadow is None:
            return
        num_given = num_shared - shadow.num_shared
        num_lost = max(shadow.num_lost - num_given, 0) if shadow.num_lost else 0
        self._resize(shadow, shadow.num_blocks, num_shared, num_lost)
        if shadow.role is Role.IDLE:
            if shadow.num_held:
                self._noted[shadow] = None
            else:
                self.ended(conversation_id)

    def ended(self, conversation_id: str) -> None:
        """Forget a conversation and free the blocks that it holds."""
        shadow = self._shadows.pop(conversation_id, None)
        if shadow is not None:
            self._noted.pop(shadow, None)
            shadow.role = Role.RUNNING  # of which orders take nothing
            self._resize(shadow, 0, 0, 0)

    def _resize(self, shadow: GhostEntry, num_blocks: int, num_shared: int, num_lost: int) -> None:
        self.num_held -= shadow.num_held
        shadow.set_size(num_blocks, num_shared, num_lost)
        self.num_held += shadow.num_held

    def _make_room(self, now_s: float) -> None:
        if self.num_held <= self._num_places + self._slack:
            return
        self._order.begin(now_s)
        while self.num_held > self._num_places:
            victim = self._order.peek()
            if victim is None:
                return  # what runs takes all
            shadow = victim.sequence
            self._resize(shadow, shadow.num_blocks, shadow.num_shared, shadow.num_lost + 1)
            if not shadow.num_held:
                self.ended(shadow.conversation_id)
