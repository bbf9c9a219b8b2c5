"""Scheduler of a padded batch: insertion, preemption, and the shape of the batch.

Owns: the rules (Baton, sections 4.1 to 4.3), and the order of launches within a step. The paper's baselines
are settings of it: with insertion "none" a batch runs until all its queries finish.
Does not know: devices, tokens, text, or time.

Queries are served in the order of their rank (`queue`). No query overtakes one that does not fit, so a long
query waits until the batch is narrow enough, but never starves. Every query fits when it is alone, which is
checked at submission, so the first query always advances.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.fitting import Fitting, num_tokens, suspension_key
from pensieve_jax.rebatching.launches import (
    Decode,
    Insert,
    Launch,
    PackedStep,
    Resize,
    Shape,
    Suspend,
    WordsLayout,
)
from pensieve_jax.rebatching.parked_rows import ParkedRows
from pensieve_jax.rebatching.prefilling import Prefilling, is_ready
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import QueryQueue, rank
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes

# A ring is too long if its span is at most 1 / _SPARSE of its length for half its length in steps.
_SPARSE = 3


class Scheduled(NamedTuple):
    """Launches of one step, and its idle rows.

    Attributes:
      launches: launches in program order.
      num_idle: rows of the batch without a query.
      is_tail: whether the queue was empty, so that the idle rows are unavoidable.
    """

    launches: list[Launch]
    num_idle: int
    is_tail: bool


class RebatchingScheduler:
    """Scheduler of one engine.

    Attributes:
      ring: rows of running queries.
      queue: queue of waiting queries.
      parked: parked rows.
      layout: layout of a step's words.
    """

    def __init__(self, config: RebatchingConfig, ring_shapes: RingShapes) -> None:
        self._config, self._ring_shapes = config, ring_shapes
        self.layout = WordsLayout(config.max_batch, config.max_banned_ids)
        self.ring: Ring[Query] = Ring()
        self._fitting = Fitting(config, ring_shapes, self.ring)
        self.queue = QueryQueue()
        self.parked = ParkedRows(ring_shapes, config.host_bytes)
        self._prefilling = Prefilling(config, ring_shapes, self.layout, self.parked)
        self._launches: list[Launch] = []
        self._num_sparse_steps = 0
        self._was_empty = True  # whether the ring was empty when the step began, so a prefill delays no query
        self._prefilled = self._shaped = False  # in this step

    # Submission, removal and recovery

    def add(self, query: Query) -> None:
        """Add a query to the queue."""
        self.queue.add(query)

    def remove(self, query: Query) -> None:
        """Remove a query that finished or was cancelled."""
        if query.location is KVLocation.RING:
            if self._config.insertion != "none":  # with "none", rows are freed when the whole batch finishes
                self.ring.release(query.row)
        elif query.location is not KVLocation.RELEASED:
            self.queue.remove(query)
            if query in self.parked.sizes:
                self.parked.drop(query, self._launches)
        query.location = KVLocation.RELEASED

    def lose_device(self, flying: Collection[Query], has_left: Callable[[int], bool]) -> list[Query]:
        """Requeue the queries that lost their KV cache, or a token in flight (`flying`), with the device.

        Returns:
          The requeued queries, which are recomputed from their tokens. Rows in host memory stay valid.
        """
        lost = {query for _, query in self.ring.held if not query.done and query.location is KVLocation.RING}
        # Some launches of the last schedule may not have begun, so `location` alone does not tell.
        parked = self.parked.sizes
        lost |= {
            query for query in parked if query.location is not KVLocation.HOST or not has_left(query.serial)
        }
        lost |= {query for query in flying if not query.done}
        for query in lost:
            if query.location not in (KVLocation.RING, KVLocation.RELEASED):
                self.queue.remove(query)
            self.parked.sizes.pop(query, None)
            query.location, query.num_sampled = KVLocation.NOT_COMPUTED, len(query.token_ids)
        for query in lost:
            self.queue.add(query)
        self.ring.clear()
        self.parked.room_bytes = self._ring_shapes.kv_bytes
        self._launches = []
        return sorted(lost, key=rank)

    def take_drops(self) -> list[Launch]:
        """Return the pending launches, which free rows, without waiting for the next step."""
        launches, self._launches = self._launches, []
        return launches

    # One step

    def schedule(self, has_left: Callable[[int], bool]) -> Scheduled:
        """Return the launches of the next step; none without queries.

        Args:
          has_left: tells whether the copy to host memory of a query's row, by serial, is done.
        """
        self.parked.settle(has_left)
        self._prefilled = self._shaped = False
        self._release()
        self._was_empty = not self.ring.num_held
        self._keep_in_length()
        if self._config.insertion == "none":
            if not self.ring.num_held:
                self._begin_batch()
        else:
            self._admit()
        self._shrink_if_sparse()
        num_idle, is_tail = self._step()
        self._bring_back()  # before prefills, since a prompt that is served later would take the room
        self._prefill_ahead()
        launches, self._launches = self._launches, []
        return Scheduled(launches, num_idle, is_tail)

    def _release(self) -> None:
        """Free the rows of queries whose last token is launched; with insertion "none", all rows at once."""
        ended = []
        for row, query in self.ring.held:
            if query.is_launched:
                query.location = KVLocation.RELEASED
            if query.location is KVLocation.RELEASED:
                ended.append(row)
        if self._config.insertion == "none" and len(ended) < self.ring.num_held:
            return
        for row in ended:
            self.ring.release(row)

    def _admit(self) -> None:
        """Let waiting queries that fit join, in order."""
        while len(self.queue) and not self._shaped:
            query = self.queue.head
            victims: list[Query] = []
            if self._fitting.shape_with(query) is None:
                found = self._fitting.victims_for(query)
                if found is None:
                    return
                victims = found
            if not self._can_join(query):
                return
            for victim in victims:
                self._suspend(victim)
            shape = self._fitting.shape_with(query)
            # Making room for a victim may have dropped the row of `query`.
            if shape is None or not self._can_join(query):
                return
            self._join(query, shape)

    def _can_join(self, query: Query) -> bool:
        """Return whether the query's KV cache exists or can be computed in this step."""
        if query.location is not KVLocation.NOT_COMPUTED:
            return True
        return is_ready(query) and (self._fitting.is_shaped(query) or self._may_prefill)

    @property
    def _may_prefill(self) -> bool:
        """Whether a prefill may run in this step. Running queries wait for at most one per step."""
        return self._was_empty or not self._prefilled

    def _join(self, query: Query, shape: RingShape) -> None:
        """Put a query into the ring, which changes to `shape`."""
        self._resize(shape, keep=query)  # first, since a shorter, wider ring may leave no room for its row
        if self._fitting.is_shaped(query):
            self.queue.remove(query)
            self._shape_step(query)
            return
        if query.location is KVLocation.NOT_COMPUTED:
            self._prefill(query)
            if query.is_launched:  # its only token
                return
        self._enter(query)

    def _enter(self, query: Query) -> None:
        """Move a parked row into the ring."""
        if query.location is KVLocation.HOST:
            self.parked.make_room(self.parked.sizes[query], self._launches, keep=query)
            self.parked.bring(query, self._launches)
        self.queue.remove(query)
        self.parked.take(query)
        self._embed(query)

    def _embed(self, query: Query) -> None:
        """Launch the copy of a row into the ring, where it ends at the cursor."""
        num = query.num_kv_tokens
        query.row = self.ring.insert(query, num)
        query.location = KVLocation.RING
        is_known = len(query.token_ids) == query.num_sampled
        last_id = query.token_ids[-1] if is_known else -1
        place = self.ring.place(self.ring.cursor - num)
        self._launches.append(Insert(query.serial, query.row, place, num, last_id))

    def _begin_batch(self) -> None:
        """Start a batch that runs until all its queries finish, with the first waiting queries that fit."""
        batch, shape = self._fitting.batch_of(self.queue.window(self._config.max_batch))
        if shape is None:
            return
        self._resize(shape)
        is_together = self._config.prefill == "together"
        length = self._ring_shapes.length_for(max(map(num_tokens, batch))) if is_together else None
        for query in batch:
            if query.location is KVLocation.NOT_COMPUTED:
                # Its row may have been dropped for another query's, and the next one is a token longer.
                if not is_ready(query) or self._fitting.num_columns(query) > shape.length:
                    return
                others = [one for one in batch if is_ready(one) and one is not query]
                self._prefill(query, others if is_together else None, length)
            if not query.is_launched:
                self._enter(query)

    # Suspension and the shape of the ring

    def _suspend(self, query: Query) -> None:
        """Move a query from the ring into a parked row, to resume later."""
        length = self._ring_shapes.length_for(query.num_kv_tokens)
        row, num_tokens = query.row, query.num_kv_tokens
        query.note_suspended()
        has_room = self.parked.make_room(self._ring_shapes.row_bytes(length), self._launches)
        assert has_room, "the length of one row is kept free"
        places = np.zeros(length, np.int32)
        places[:num_tokens] = self.ring.places(row)
        self._launches.append(Suspend(query.serial, row, places, num_tokens))
        self.parked.put(query, length)
        self.ring.release(row)
        self.queue.add(query)

    def _keep_in_length(self) -> None:
        """Make room for the next step's column: lengthen the ring; if it gets too narrow, suspend queries."""
        while self.ring.num_held:
            current, needed = self.ring.shape, self.ring.span + 1
            assert current is not None
            if needed <= current.length:
                return
            target = self._ring_shapes.shape_for(needed)
            held = self.ring.held
            if target is not None and target.batch >= len(held):
                self._resize(target)
                return
            gone = [row for row, owner in held if owner.location is KVLocation.RELEASED]
            if gone:
                self.ring.release(max(gone, key=self.ring.row_span))
            elif target is None:  # holes make the row too long; it will come back without them
                self._suspend(max(held, key=lambda one: self.ring.row_span(one[0]))[1])
            else:
                self._suspend(max((owner for _, owner in held), key=suspension_key))

    def _shrink_if_sparse(self) -> None:
        """Shorten a ring that has been sparse for long, since a shorter ring is read faster."""
        current, span = self.ring.shape, self.ring.span
        if current is None or not span or _SPARSE * span >= current.length:
            self._num_sparse_steps = 0
            return
        self._num_sparse_steps += 1
        if 2 * self._num_sparse_steps >= current.length:
            target = self._ring_shapes.shape_for(span + span // 2 + 1)
            if target is not None and target.length < current.length:
                self._resize(target)

    def _resize(self, shape: RingShape, keep: Query | None = None) -> None:
        if shape == self.ring.shape:
            return
        room_bytes = self._ring_shapes.room_bytes(shape)
        has_room = self.parked.make_room(0, self._launches, room_bytes=room_bytes, keep=keep)
        assert has_room, "the length of one row is kept free"
        self._launches.append(Resize(shape, self.ring.resize(shape)))
        for row, query in self.ring.held:
            query.row = row
        self.parked.room_bytes = room_bytes
        self.parked.note()
        self._num_sparse_steps = 0

    # Steps and prefills

    def _step(self) -> tuple[int, bool]:
        """Launch a decode step, unless a shaped step ran.

        Returns:
          The number of idle rows, and whether the queue is empty.
        """
        shape = self.ring.shape
        served = [(row, query) for row, query in self.ring.held if query.location is KVLocation.RING]
        if shape is None or not served:
            return 0, False
        num_idle = shape.batch - len(served)
        if not self._shaped:
            words = PackedStep(self.layout, self.ring.place(self.ring.cursor))
            for row, query in served:
                self._add_row(words, row, query, 1)
            self._launches.append(Decode(words.words, words.sampler_mode, _samples(served)))
            self.ring.advance()
        return num_idle, not len(self.queue)

    def _shape_step(self, query: Query) -> None:
        """Launch a step in which `query` joins with all its tokens (vector shaping)."""
        token_ids = query.all_token_ids
        num_tokens = len(token_ids)
        row = query.row = self.ring.insert(query, 0)
        query.location = KVLocation.RING
        words = PackedStep(self.layout, self.ring.place(self.ring.cursor), num_tokens, row)
        served = [(index, owner) for index, owner in self.ring.held]
        for index, owner in served:
            if owner is query:
                words.add(row, query, 0, num_tokens, query.num_to_prefill)
                query.note_prefilled()
            else:
                self._add_row(words, index, owner, num_tokens)
        padded = np.zeros(self._ring_shapes.length_for(num_tokens), np.int32)
        padded[:num_tokens] = token_ids
        self._launches.append(
            Shape(query.serial, padded, words.words, words.sampler_mode, _samples(served), num_tokens)
        )
        self.ring.advance(num_tokens, filled_row=row)
        self._shaped = True

    def _add_row(self, words: PackedStep, row: int, query: Query, num_new: int) -> None:
        """Add a row that takes one token, in a step of `num_new` columns."""
        num_columns = self.ring.row_span(row) + num_new
        num_tokens = query.num_kv_tokens
        words.add(row, query, num_tokens, num_columns, num_tokens + 1)
        query.num_sampled += 1

    def _prefill(self, query: Query, others: list[Query] | None = None, length: int | None = None) -> None:
        """Prefill a query, together with others. There must be room for its row if parked rows leave.

        Args:
          query: the first query.
          others: queries that may share the prefill; None means the next ones of similar length.
          length: length of the rows; None means the length that `query` needs.
        """
        if others is None:
            most = max(self._config.num_ahead - len(self.parked) - 1, 0)
            others = self._prefilling.similar_to(query, self.queue, most)
        for one in self._prefilling.launch([query, *others], self._launches, length):
            if one.is_launched:  # its only token
                self.queue.remove(one)
                self.parked.drop(one, self._launches)
                one.location = KVLocation.RELEASED
        self._prefilled = True

    def _prefill_ahead(self) -> None:
        """Prefill waiting queries, in at most one program per step, to limit the delay of running queries."""
        config = self._config
        if config.insertion == "shape" or config.prefill == "together" or self._prefilled:
            return
        if not self.ring.num_held or len(self.parked) >= config.num_ahead:
            return
        for query in self.queue.window(config.num_ahead + 1):
            if is_ready(query):
                num_bytes = self._ring_shapes.row_bytes(self._ring_shapes.length_for(query.num_to_prefill))
                if self.parked.has_room(num_bytes):
                    self._prefill(query)
                else:
                    self.parked.begin_to_make_room(num_bytes, query, self._launches)
                return

    def _bring_back(self) -> None:
        """Copy the first waiting query's row back from host memory ahead of need, if there is room."""
        for query in self.queue.window(1):
            if query.location is KVLocation.HOST and self.parked.has_room(self.parked.sizes[query]):
                self.parked.bring(query, self._launches)


def _samples(served: list[tuple[int, Query]]) -> tuple[tuple[Query, int], ...]:
    return tuple((query, row) for row, query in served)
