"""Selection of the eviction order with the lowest recent loss, estimated with one ghost cache per order.

Owns: a ghost cache per order at the size of the real cache, the recomputation time of each order with
exponential forgetting, and the rule for switching.
Does not know: how an order works, or the real cache.
Called by `learning`.

The rule requires evidence, because the losses of single turns differ by orders of magnitude and a slightly
smaller sum means nothing. The selector switches to another order when the sum of its advantages over all
turns is above its own standard error and above 3% of the losses of the order in use. So an order that keeps
losing is replaced soon.
A more cautious rule costs more where losses are few and large (lab/docs/learned_order.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pensieve_jax.cache.order.cost import CostModel
from pensieve_jax.cache.order.ghost_cache import GhostCache
from pensieve_jax.cache.order.policies import EvictionPolicy

BLOCK_TOKENS = 256
_KEEP = 0.5 ** (1 / 500)  # a half-life of 500 returning turns, which does not depend on the load
_GAIN = 0.03
_STANDARD_ERRORS = 1.0
_ALIKE = 0.1  # measured costs and the number of pages vary a little between starts
_NUM_BLOCKS_COSTED = (4, 32)


class PolicyLosses(NamedTuple):
    """Losses of each order with exponential forgetting, in the order of the names.

    Attributes:
      sums_s: seconds of recomputation.
      products: for each pair of orders, the sum over turns of the product of their losses.
      counted_for: the memory and costs that the losses apply to: its size in tokens, then the seconds to
        recompute a conversation's first tokens for some lengths. Empty: unknown, assumed to be the current
        ones.
    """

    sums_s: tuple[float, ...]
    products: tuple[tuple[float, ...], ...]
    counted_for: tuple[float, ...] = ()

    def holds_for(self, counted_for: tuple[float, ...]) -> bool:
        """Return whether the losses apply to this memory and these costs, within 10%."""
        pairs = zip(self.counted_for, counted_for, strict=False)
        return len(self.counted_for) in (0, len(counted_for)) and all(
            math.isclose(before, now, rel_tol=_ALIKE) for before, now in pairs
        )


class PolicySelector:
    """Ghost caches of several orders, and the best order.

    Attributes:
      names: names of the orders.
      followed: name of the order to use.
      num_changes: how often `selected` changed.
      lost_s: recomputation time of each order since the start, without forgetting.
    """

    def __init__(
        self,
        orders: Mapping[str, EvictionPolicy],
        cost_model: CostModel,
        *,
        selected: str,
        chunk_tokens: int,
        num_tokens: int,
        losses: PolicyLosses | None = None,
    ) -> None:
        """Start with empty ghost caches for a memory of `num_tokens` tokens.

        Args:
          orders: orders by name; their indices count blocks of `BLOCK_TOKENS`.
          cost_model: costs of chunks of `chunk_tokens` tokens.
          followed: the order to begin with; ignored in favor of the first one if `losses` do not apply.
          chunk_tokens: at most `BLOCK_TOKENS`.
          num_tokens: capacity of the cache.
          losses: losses of an earlier selector. They are ignored if they were counted for another memory or
            other costs, because a sum over many or slow turns would outweigh new observations.
        """
        self.names = tuple(orders)
        self.selected = selected
        self.num_changes = 0
        self.lost_s = dict.fromkeys(self.names, 0.0)
        num_places = max(num_tokens // BLOCK_TOKENS, 1)
        self._ghosts = [GhostCache(order, num_places) for order in orders.values()]
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens
        self._costs_s = [0.0]  # element n: cost of the first n blocks
        seconds = (self._cost_s(num_blocks) for num_blocks in _NUM_BLOCKS_COSTED)
        self._counted_for = float(num_tokens), *seconds
        if losses is not None and not losses.holds_for(self._counted_for):
            losses, self.selected = None, self.names[0]
        size = len(self.names)
        self._sums_s = [0.0] * size if losses is None else list(losses.sums_s)
        self._products = [
            [0.0] * size if losses is None else list(losses.products[row]) for row in range(size)
        ]

    @property
    def losses(self) -> PolicyLosses:
        """Losses that the rule compares."""
        return PolicyLosses(tuple(self._sums_s), tuple(map(tuple, self._products)), self._counted_for)

    def returned(self, conversation_id: str, num_tokens: int, num_shared_tokens: int) -> None:
        """Count the losses of a turn on a history of `num_tokens` tokens, the leading ones shared."""
        first, end = _num_blocks(num_shared_tokens), _num_blocks(num_tokens)
        losses_s = []
        for ghost in self._ghosts:
            num_lost = ghost.returned(conversation_id)
            last = end if num_lost is None else min(first + num_lost, end)
            losses_s.append(self._cost_s(last) - self._cost_s(min(first, last)))
        for name, loss_s in zip(self.names, losses_s, strict=True):
            self.lost_s[name] += loss_s
        self._add(losses_s)

    def left(
        self, conversation_id: str, num_tokens: int, num_shared_tokens: int, *, bucket: int, now_s: float
    ) -> None:
        """Record that a conversation became idle."""
        num_blocks, num_shared = _num_blocks(num_tokens), _num_blocks(num_shared_tokens)
        for ghost in self._ghosts:
            ghost.left(conversation_id, num_blocks, num_shared=num_shared, bucket=bucket, now_s=now_s)

    def resized(self, conversation_id: str, num_shared_tokens: int) -> None:
        """Set how many leading tokens of a conversation are shared."""
        for ghost in self._ghosts:
            ghost.resized(conversation_id, _num_blocks(num_shared_tokens))

    def ended(self, conversation_id: str) -> None:
        """Forget a conversation that was ended."""
        for ghost in self._ghosts:
            ghost.ended(conversation_id)

    def _add(self, losses_s: Sequence[float]) -> None:
        """Add the losses of each order for one turn, and select again."""
        for row, loss_s in enumerate(losses_s):
            self._sums_s[row] = _KEEP * self._sums_s[row] + loss_s
            products = self._products[row]
            for column, other_s in enumerate(losses_s):
                products[column] = _KEEP * _KEEP * products[column] + loss_s * other_s
        self._choose()

    def _choose(self) -> None:
        """Switch to the order that exceeds the required evidence by most, if one does."""
        now, products = self.names.index(self.selected), self._products
        furthest_s, best = 0.0, now
        for other, sum_s in enumerate(self._sums_s):
            spread = products[now][now] + products[other][other] - 2 * products[now][other]
            asked_s = max(_STANDARD_ERRORS * math.sqrt(max(spread, 0.0)), _GAIN * self._sums_s[now])
            beyond_s = self._sums_s[now] - sum_s - asked_s
            if beyond_s > furthest_s:
                furthest_s, best = beyond_s, other
        if best != now:
            self.selected = self.names[best]
            self.num_changes += 1

    def _cost_s(self, num_blocks: int) -> float:
        """Return the seconds to recompute the first `num_blocks` blocks of a conversation."""
        costs_s = self._costs_s
        while num_blocks >= len(costs_s):
            start = (len(costs_s) - 1) * BLOCK_TOKENS
            ends = range(start + self._chunk_tokens, start + BLOCK_TOKENS + 1, self._chunk_tokens)
            costs_s.append(costs_s[-1] + math.fsum(self._cost_model.chunk_cost_s(end) for end in ends))
        return costs_s[num_blocks]


def _num_blocks(num_tokens: int) -> int:
    """Round to the nearest number of blocks, but to at least 1 for 1 token or more."""
    return max(round(num_tokens / BLOCK_TOKENS), 1) if num_tokens else 0
