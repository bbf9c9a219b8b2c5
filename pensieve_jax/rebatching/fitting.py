"""Who fits into the ring: which shape it takes for whom, and who would have to leave.

Owns: the arithmetic of columns and rows for somebody who is not there yet. It changes nothing.
Does not know: launches, or rows beside the ring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.lattice import Lattice, RingShape
from pensieve_jax.rebatching.prefilling import is_ready
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.ring import Ring


class Fitting:
    """Computes whether a query fits into one ring, in which shape, and which queries must leave."""

    def __init__(self, config: RebatchingConfig, lattice: Lattice, ring: Ring[Query]) -> None:
        """`ring` is looked at only."""
        self._config, self._lattice, self._ring = config, lattice, ring

    def is_shaped(self, query: Query) -> bool:
        """It joins by vector shaping; with nobody to be padded to it, it is prefilled as any other."""
        is_first = not self._ring.num_held
        return self._config.insertion == "shape" and query.place is KVLocation.NOWHERE and not is_first

    def num_columns(self, query: Query) -> int:
        """Columns that it needs behind its prefill: one more than it has tokens, if it goes on then."""
        is_last = query.place is KVLocation.NOWHERE and query.num_sampled + 1 == query.max_num_tokens
        return num_tokens(query) + (not is_last)

    def shape_with(self, query: Query, without: Collection[Query] = ()) -> RingShape | None:
        """The ring's shape if `query` joins now; None if it has to wait.

        Args:
          query: who joins.
          without: of those in the ring, who leaves first.
        """
        held = [(row, owner) for row, owner in self._ring.held if owner not in without]
        span = max((self._ring.row_span(row) for row, _ in held), default=0)
        is_shaped = self.is_shaped(query)
        needed = span + num_tokens(query) if is_shaped else max(span + 1, self.num_columns(query))
        found = self._lattice.shape_for(needed)
        if found is None or len(held) >= found.batch:
            return None
        current = self._ring.shape
        if current is None or not held or found.length > current.length:
            return found
        if len(held) < current.batch:
            return current
        # Shorter and wider, but not if it would soon be too short again.
        return found if 4 * needed <= 3 * found.length else None

    def victims_for(self, query: Query) -> list[Query] | None:
        """Whom a more urgent query takes the place of; None if that would not help."""
        if not self._config.preemptive:
            return None
        held = [owner for _, owner in self._ring.held if owner.priority < query.priority]
        held.sort(key=standing, reverse=True)
        for num in range(1, len(held) + 1):
            if self.shape_with(query, held[:num]) is not None:
                return self._needed(query, held[:num])
        return None

    def _needed(self, query: Query, victims: list[Query]) -> list[Query]:
        """Those of `victims`, all of whom are enough, without whom it would not be; the last is one.

        None is spared of a lower priority than the last, who would then wait for his place.
        """
        needed = victims
        for victim in victims[-2::-1]:  # who stands higher is spared first
            if victim.priority < victims[-1].priority:
                break
            fewer = [one for one in needed if one is not victim]
            if self.shape_with(query, fewer) is not None:
                needed = fewer
        return needed

    def batch_of(self, waiting: Iterable[Query]) -> tuple[list[Query], RingShape | None]:
        """Of those who wait, in order, as many as fit into an empty ring, and its shape; None for nobody."""
        batch: list[Query] = []
        num_columns = 0
        shape: RingShape | None = None
        for query in waiting:
            num_columns = max(num_columns, self.num_columns(query))
            found = self._lattice.shape_for(num_columns)
            is_known = query.place is not KVLocation.NOWHERE or is_ready(query)
            if found is None or len(batch) >= found.batch or not is_known:
                break
            batch, shape = [*batch, query], found
        return batch, shape


def num_tokens(query: Query) -> int:
    """Columns that it has when it joins."""
    return query.num_to_prefill if query.place is KVLocation.NOWHERE else query.num_kv_tokens


def standing(query: Query) -> tuple[int, int]:
    """The largest leaves first: of the lowest priority, and of those who came last."""
    return -query.priority, query.serial
