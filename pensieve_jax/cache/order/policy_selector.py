"""Which order to follow: the one that would have lost least of late, each carried along in shadow.

Owns: a shadow of every order at the cache's size, the seconds of recomputation that each would have paid,
with forgetting, and the rule by which another order is followed.
Does not know: how an order comes about, or the real cache.

The rule asks for evidence: losses of returning turns differ by orders of magnitude, so a sum that is a little
smaller says nothing. Another one is followed when the sum of the differences, turn by turn, is above its own
standard error and above 3% of what the present one lost. So nothing is followed for long that keeps losing.
More caution costs more where losses are few and large (lab/docs/learned_order.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pensieve_jax.cache.order.cost import CostModel
from pensieve_jax.cache.order.policies import EvictionPolicy
from pensieve_jax.cache.order.shadows import GhostCache

BLOCK_TOKENS = 256
_KEEP = 0.5 ** (1 / 500)  # a half-life in returning turns means the same under every load
_GAIN = 0.03
_STANDARD_ERRORS = 1.0
_ALIKE = 0.1  # measured costs, and pages that fit, are not the same at every start
_NUM_BLOCKS_COSTED = (4, 32)


class PolicyLosses(NamedTuple):
    """Losses of orders in the order of their names, with forgetting.

    Attributes:
      sums_s: seconds of recomputation.
      products: sums of the products of two orders' losses of one turn, by pair.
      counted_for: of what memory and costs: its tokens, and seconds to recompute a conversation's first
        tokens, for some lengths. Empty: not said, and taken for the present ones.
    """

    sums_s: tuple[float, ...]
    products: tuple[tuple[float, ...], ...]
    counted_for: tuple[float, ...] = ()

    def holds_for(self, counted_for: tuple[float, ...]) -> bool:
        """Whether they tell of a memory and costs; a page more or less changes next to nothing."""
        pairs = zip(self.counted_for, counted_for, strict=False)
        return len(self.counted_for) in (0, len(counted_for)) and all(
            math.isclose(before, now, rel_tol=_ALIKE) for before, now in pairs
        )


class PolicySelector:
    """Shadows of several orders, and which of them is best.

    Attributes:
      names: of the orders.
      followed: the one to follow.
      num_changes: how often that became another.
      lost_s: what each would have paid since the start, without forgetting.
    """

    def __init__(
        self,
        orders: Mapping[str, EvictionPolicy],
        cost_model: CostModel,
        *,
        followed: str,
        chunk_tokens: int,
        num_tokens: int,
        losses: PolicyLosses | None = None,
    ) -> None:
        """Of a memory of `num_tokens` tokens.

        Args:
          orders: by name; they count indices in blocks of `BLOCK_TOKENS`.
          cost_model: seconds for a chunk of `chunk_tokens` tokens.
          followed: the order to begin with; the first one where `losses` were counted for something else.
          chunk_tokens: at most `BLOCK_TOKENS`.
          num_tokens: what the cache holds.
          losses: of an insurance before this one; forgotten where they were counted for another memory or
            other costs, or a sum of many turns, or of slow ones, would outvote what is seen here.
        """
        self.names = tuple(orders)
        self.followed = followed
        self.num_changes = 0
        self.lost_s = dict.fromkeys(self.names, 0.0)
        num_places = max(num_tokens // BLOCK_TOKENS, 1)
        self._shadows = [GhostCache(order, num_places) for order in orders.values()]
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens
        self._costs_s = [0.0]  # of the first so many blocks
        seconds = (self._cost_s(num_blocks) for num_blocks in _NUM_BLOCKS_COSTED)
        self._counted_for = float(num_tokens), *seconds
        if losses is not None and not losses.holds_for(self._counted_for):
            losses, self.followed = None, self.names[0]
        size = len(self.names)
        self._sums_s = [0.0] * size if losses is None else list(losses.sums_s)
        self._products = [
            [0.0] * size if losses is None else list(losses.products[row]) for row in range(size)
        ]

    @property
    def losses(self) -> PolicyLosses:
        """What the rule goes by."""
        return PolicyLosses(tuple(self._sums_s), tuple(map(tuple, self._products)), self._counted_for)

    def returned(self, conversation_id: str, num_tokens: int, num_shared_tokens: int) -> None:
        """A turn was sent to a history of so many tokens, of which leading ones are a shared prefix's."""
        first, end = _num_blocks(num_shared_tokens), _num_blocks(num_tokens)
        paid_s = []
        for shadow in self._shadows:
            num_lost = shadow.returned(conversation_id)
            last = end if num_lost is None else min(first + num_lost, end)
            paid_s.append(self._cost_s(last) - self._cost_s(min(first, last)))
        for name, loss_s in zip(self.names, paid_s, strict=True):
            self.lost_s[name] += loss_s
        self._add(paid_s)

    def left(
        self, conversation_id: str, num_tokens: int, num_shared_tokens: int, *, bucket: int, now_s: float
    ) -> None:
        """A conversation is idle from now on."""
        num_blocks, num_shared = _num_blocks(num_tokens), _num_blocks(num_shared_tokens)
        for shadow in self._shadows:
            shadow.left(conversation_id, num_blocks, num_shared=num_shared, bucket=bucket, now_s=now_s)

    def resized(self, conversation_id: str, num_shared_tokens: int) -> None:
        """Others share so many leading tokens of a conversation from now on, or no more than these."""
        for shadow in self._shadows:
            shadow.resized(conversation_id, _num_blocks(num_shared_tokens))

    def ended(self, conversation_id: str) -> None:
        """A conversation is no more."""
        for shadow in self._shadows:
            shadow.ended(conversation_id)

    def _add(self, losses_s: Sequence[float]) -> None:
        """What the orders would have paid for one turn."""
        for row, loss_s in enumerate(losses_s):
            self._sums_s[row] = _KEEP * self._sums_s[row] + loss_s
            products = self._products[row]
            for column, other_s in enumerate(losses_s):
                products[column] = _KEEP * _KEEP * products[column] + loss_s * other_s
        self._choose()

    def _choose(self) -> None:
        """Follow another order, if the evidence is there: the one that is furthest beyond what is asked."""
        now, products = self.names.index(self.followed), self._products
        furthest_s, best = 0.0, now
        for other, sum_s in enumerate(self._sums_s):
            spread = products[now][now] + products[other][other] - 2 * products[now][other]
            asked_s = max(_STANDARD_ERRORS * math.sqrt(max(spread, 0.0)), _GAIN * self._sums_s[now])
            beyond_s = self._sums_s[now] - sum_s - asked_s
            if beyond_s > furthest_s:
                furthest_s, best = beyond_s, other
        if best != now:
            self.followed = self.names[best]
            self.num_changes += 1

    def _cost_s(self, num_blocks: int) -> float:
        """Seconds to recompute the first blocks of a conversation."""
        costs_s = self._costs_s
        while num_blocks >= len(costs_s):
            start = (len(costs_s) - 1) * BLOCK_TOKENS
            ends = range(start + self._chunk_tokens, start + BLOCK_TOKENS + 1, self._chunk_tokens)
            costs_s.append(costs_s[-1] + math.fsum(self._cost_model.chunk_cost_s(end) for end in ends))
        return costs_s[num_blocks]


def _num_blocks(num_tokens: int) -> int:
    """Nearest, but not nothing of something."""
    return max(round(num_tokens / BLOCK_TOKENS), 1) if num_tokens else 0
