"""Whether a query fits into the ring, in which shape, and which queries would have to leave for it.

Owns: the arithmetic of columns and rows for a query that is not in the ring yet. It changes nothing.
Does not know: launches, or parked rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.prefilling import is_ready
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes


class Fitting:
    """Fit of queries into one ring: shapes, and victims."""

    def __init__(self, config: RebatchingConfig, ring_shapes: RingShapes, ring: Ring[Query]) -> None:
        """Store the ring, which this class only reads."""
        self._config, self._ring_shapes, self._ring = config, ring_shapes, ring

    def is_shaped(self, query: Query) -> bool:
        """Whether the query joins by vector shaping. In an empty ring it is prefilled separately instead."""
        is_first = not self._ring.num_held
        return (
            self._config.insertion == "shape" and query.location is KVLocation.NOT_COMPUTED and not is_first
        )

    def num_columns(self, query: Query) -> int:
        """Return the columns the query needs after its prefill: its tokens, and one more if it continues."""
        is_last = query.location is KVLocation.NOT_COMPUTED and query.num_sampled + 1 == query.max_num_tokens
        return num_tokens(query) + (not is_last)

    def shape_with(self, query: Query, without: Collection[Query] = ()) -> RingShape | None:
        """Return the ring's shape if `query` joins now; None if it has to wait.

        Args:
          query: the query that joins.
          without: queries in the ring that leave first.
        """
        held = [(row, owner) for row, owner in self._ring.held if owner not in without]
        span = max((self._ring.row_span(row) for row, _ in held), default=0)
        is_shaped = self.is_shaped(query)
        needed = span + num_tokens(query) if is_shaped else max(span + 1, self.num_columns(query))
        found = self._ring_shapes.shape_for(needed)
        if found is None or len(held) >= found.batch:
            return None
        current = self._ring.shape
        if current is None or not held or found.length > current.length:
            return found
        if len(held) < current.batch:
            return current
        # A shorter ring is wider. Do not take it if it would soon be too short again.
        return found if 4 * needed <= 3 * found.length else None

    def victims_for(self, query: Query) -> list[Query] | None:
        """Return the queries to suspend for a more urgent `query`; None if that would not help."""
        if not self._config.preemptive:
            return None
        held = [owner for _, owner in self._ring.held if owner.priority < query.priority]
        held.sort(key=suspension_key, reverse=True)
        for num in range(1, len(held) + 1):
            if self.shape_with(query, held[:num]) is not None:
                return self._minimal_victims(query, held[:num])
        return None

    def _minimal_victims(self, query: Query, victims: list[Query]) -> list[Query]:
        """Return those of `victims` that must leave. All of them suffice; the last is always needed.

        A victim of lower priority than the last is not spared: the last would then wait for that row.
        """
        needed = victims
        for victim in victims[-2::-1]:  # spare higher-ranked queries first
            if victim.priority < victims[-1].priority:
                break
            fewer = [one for one in needed if one is not victim]
            if self.shape_with(query, fewer) is not None:
                needed = fewer
        return needed

    def batch_of(self, waiting: Iterable[Query]) -> tuple[list[Query], RingShape | None]:
        """Return the first queries of `waiting` that fit into an empty ring, and its shape, if any fits."""
        batch: list[Query] = []
        num_columns = 0
        shape: RingShape | None = None
        for query in waiting:
            num_columns = max(num_columns, self.num_columns(query))
            found = self._ring_shapes.shape_for(num_columns)
            is_known = query.location is not KVLocation.NOT_COMPUTED or is_ready(query)
            if found is None or len(batch) >= found.batch or not is_known:
                break
            batch, shape = [*batch, query], found
        return batch, shape


def num_tokens(query: Query) -> int:
    """Return the columns that the query occupies when it joins."""
    return query.num_to_prefill if query.location is KVLocation.NOT_COMPUTED else query.num_kv_tokens


def suspension_key(query: Query) -> tuple[int, int]:
    """Return a sort key; the largest is suspended first: the lowest priority, then the latest arrival."""
    return -query.priority, query.serial
