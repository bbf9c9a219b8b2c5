"""Who is in the batch, and what is launched for it: insertion, preemption, and the size of the batch.

Owns: the rules (Baton, sections 4.1 to 4.3), and the order of what one step launches. Settings of it are the
paper's rivals: with insertion "none" a batch runs to its end.
Does not know: devices, tokens, text, or time.

A query is served in the order of its rank (`queue`); nobody passes one that does not fit, so a long query
waits for the batch to become narrow enough, and not for ever. What a query needs it can have alone: that was
checked when it was submitted, so the first one always advances.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.fitting import Fitting, num_tokens, standing
from pensieve_jax.rebatching.lattice import Lattice, RingShape
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

_SPARSE = 3  # a ring is too long if no more than one of so many parts is used, for half its length in steps


class Scheduled(NamedTuple):
    """A step's launches, and why rows were idle in it.

    Attributes:
      launches: in program order.
      num_idle: rows of the batch that got no token of any query.
      is_tail: because nobody waited.
    """

    launches: list[Launch]
    num_idle: int
    is_tail: bool


class RebatchingScheduler:
    """Of one engine.

    Attributes:
      ring, line, shelf: who is where; for checks.
      layout: of the words of a step.
    """

    def __init__(self, config: RebatchingConfig, lattice: Lattice) -> None:
        self._config, self._lattice = config, lattice
        self.layout = WordsLayout(config.max_batch, config.max_banned_ids)
        self.ring: Ring[Query] = Ring()
        self._fitting = Fitting(config, lattice, self.ring)
        self.line = QueryQueue()
        self.shelf = ParkedRows(lattice, config.host_bytes)
        self._prefilling = Prefilling(config, lattice, self.layout, self.shelf)
        self._launches: list[Launch] = []
        self._num_sparse_steps = 0
        self._was_empty = True  # when the step began: nobody waits for a prefill
        self._prefilled = self._shaped = False  # in this step

    # Who comes and goes

    def add(self, query: Query) -> None:
        """It waits to be served."""
        self.line.add(query)

    def remove(self, query: Query) -> None:
        """Nobody waits for it any more: it has ended, or was cancelled."""
        if query.place is KVLocation.RING:
            if self._config.insertion != "none":  # where a batch runs to its end, so does its row
                self.ring.release(query.row)
        elif query.place is not KVLocation.GONE:
            self.line.remove(query)
            if query in self.shelf.sizes:
                self.shelf.drop(query, self._launches)
        query.place = KVLocation.GONE

    def lose_device(self, flying: Collection[Query], has_left: Callable[[int], bool]) -> list[Query]:
        """All on the device is lost, with the tokens in flight of `flying`; returns whom that concerns.

        They wait again, to be computed from their tokens. What host memory has stays.
        """
        lost = {query for _, query in self.ring.held if not query.done and query.place is KVLocation.RING}
        # Of the launches of the last schedule some may not have begun, so the runner is asked.
        shelved = self.shelf.sizes
        lost |= {
            query for query in shelved if query.place is not KVLocation.HOST or not has_left(query.serial)
        }
        lost |= {query for query in flying if not query.done}
        for query in lost:
            if query.place not in (KVLocation.RING, KVLocation.GONE):
                self.line.remove(query)
            self.shelf.sizes.pop(query, None)
            query.place, query.num_sampled = KVLocation.NOWHERE, len(query.token_ids)
        for query in lost:
            self.line.add(query)
        self.ring.clear()
        self.shelf.room_bytes = self._lattice.kv_bytes
        self._launches = []
        return sorted(lost, key=rank)

    def take_drops(self) -> list[Launch]:
        """Rows that are to be forgotten, without waiting for the next step."""
        launches, self._launches = self._launches, []
        return launches

    # One step

    def schedule(self, has_left: Callable[[int], bool]) -> Scheduled:
        """What is launched next; nothing if nobody is there.

        Args:
          has_left: whether the copy of a row, by its query's serial, to host memory is done.
        """
        self.shelf.settle(has_left)
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
        self._bring_back()  # first, as a prompt that is served later would take the room
        self._prefill_ahead()
        launches, self._launches = self._launches, []
        return Scheduled(launches, num_idle, is_tail)

    def _release(self) -> None:
        """Free the rows of those whose last token is launched; where a batch runs to its end, all at once."""
        ended = []
        for row, query in self.ring.held:
            if query.is_launched:
                query.place = KVLocation.GONE
            if query.place is KVLocation.GONE:
                ended.append(row)
        if self._config.insertion == "none" and len(ended) < self.ring.num_held:
            return
        for row in ended:
            self.ring.release(row)

    def _admit(self) -> None:
        """Let those join that fit, in order."""
        while len(self.line) and not self._shaped:
            query = self.line.head
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
            # Its own row may have been given up for that of a victim.
            if shape is None or not self._can_join(query):
                return
            self._join(query, shape)

    def _can_join(self, query: Query) -> bool:
        """Its KV state is there, or can be computed in this step."""
        if query.place is not KVLocation.NOWHERE:
            return True
        return is_ready(query) and (self._fitting.is_shaped(query) or self._may_prefill)

    @property
    def _may_prefill(self) -> bool:
        """A program of prompts may run in this step: those in the ring wait for no more than one."""
        return self._was_empty or not self._prefilled

    def _join(self, query: Query, shape: RingShape) -> None:
        """Put a query into the ring, which takes this shape."""
        self._resize(shape, keep=query)  # first, as a shorter ring may leave no room for its row
        if self._fitting.is_shaped(query):
            self.line.remove(query)
            self._shape_step(query)
            return
        if query.place is KVLocation.NOWHERE:
            self._prefill(query)
            if query.is_launched:  # that was its only token
                return
        self._enter(query)

    def _enter(self, query: Query) -> None:
        """A row of its own becomes a row of the ring."""
        if query.place is KVLocation.HOST:
            self.shelf.make_room(self.shelf.sizes[query], self._launches, keep=query)
            self.shelf.bring(query, self._launches)
        self.line.remove(query)
        self.shelf.take(query)
        self._embed(query)

    def _embed(self, query: Query) -> None:
        """Its row is copied to where it ends at the cursor."""
        num = query.num_kv_tokens
        query.row = self.ring.insert(query, num)
        query.place = KVLocation.RING
        is_known = len(query.token_ids) == query.num_sampled
        last_id = query.token_ids[-1] if is_known else -1
        place = self.ring.place(self.ring.cursor - num)
        self._launches.append(Insert(query.serial, query.row, place, num, last_id))

    def _begin_batch(self) -> None:
        """Take as many of those who wait as fit, in order, for a batch that runs to its end."""
        batch, shape = self._fitting.batch_of(self.line.window(self._config.max_batch))
        if shape is None:
            return
        self._resize(shape)
        is_together = self._config.prefill == "together"
        length = self._lattice.length_for(max(map(num_tokens, batch))) if is_together else None
        for query in batch:
            if query.place is KVLocation.NOWHERE:
                # Its row may have been given up for another one, and its next would be longer by a token.
                if not is_ready(query) or self._fitting.num_columns(query) > shape.length:
                    return
                others = [one for one in batch if is_ready(one) and one is not query]
                self._prefill(query, others if is_together else None, length)
            if not query.is_launched:
                self._enter(query)

    # Who has to leave

    def _suspend(self, query: Query) -> None:
        """Out of the ring, to go on later."""
        length = self._lattice.length_for(query.num_kv_tokens)
        row, num_tokens = query.row, query.num_kv_tokens
        query.note_suspended()
        has_room = self.shelf.make_room(self._lattice.row_bytes(length), self._launches)
        assert has_room, "the length of one row is kept free"
        places = np.zeros(length, np.int32)
        places[:num_tokens] = self.ring.places(row)
        self._launches.append(Suspend(query.serial, row, places, num_tokens))
        self.shelf.put(query, length)
        self.ring.release(row)
        self.line.add(query)

    def _keep_in_length(self) -> None:
        """Have a column for the next step: a longer ring, and if that is narrower, fewer in it."""
        while self.ring.num_held:
            current, needed = self.ring.shape, self.ring.span + 1
            assert current is not None
            if needed <= current.length:
                return
            target = self._lattice.shape_for(needed)
            held = self.ring.held
            if target is not None and target.batch >= len(held):
                self._resize(target)
                return
            gone = [row for row, owner in held if owner.place is KVLocation.GONE]
            if gone:
                self.ring.release(max(gone, key=self.ring.row_span))
            elif target is None:  # its holes are too many: it comes back without
                self._suspend(max(held, key=lambda one: self.ring.row_span(one[0]))[1])
            else:
                self._suspend(max((owner for _, owner in held), key=standing))

    def _shrink_if_sparse(self) -> None:
        """A shorter ring is read faster."""
        current, span = self.ring.shape, self.ring.span
        if current is None or not span or _SPARSE * span >= current.length:
            self._num_sparse_steps = 0
            return
        self._num_sparse_steps += 1
        if 2 * self._num_sparse_steps >= current.length:
            target = self._lattice.shape_for(span + span // 2 + 1)
            if target is not None and target.length < current.length:
                self._resize(target)

    def _resize(self, shape: RingShape, keep: Query | None = None) -> None:
        if shape == self.ring.shape:
            return
        room_bytes = self._lattice.room_bytes(shape)
        has_room = self.shelf.make_room(0, self._launches, room_bytes=room_bytes, keep=keep)
        assert has_room, "the length of one row is kept free"
        self._launches.append(Resize(shape, self.ring.resize(shape)))
        for row, query in self.ring.held:
            query.row = row
        self.shelf.room_bytes = room_bytes
        self.shelf.note()
        self._num_sparse_steps = 0

    # What computes

    def _step(self) -> tuple[int, bool]:
        """One token for each in the ring, unless a shaped step did that; idle rows, and if nobody waits."""
        shape = self.ring.shape
        served = [(row, query) for row, query in self.ring.held if query.place is KVLocation.RING]
        if shape is None or not served:
            return 0, False
        num_idle = shape.batch - len(served)
        if not self._shaped:
            words = PackedStep(self.layout, self.ring.place(self.ring.cursor))
            for row, query in served:
                self._add_row(words, row, query, 1)
            self._launches.append(Decode(words.words, words.needs, _samples(served)))
            self.ring.advance()
        return num_idle, not len(self.line)

    def _shape_step(self, query: Query) -> None:
        """A step in which `query` joins with all its tokens."""
        token_ids = query.all_token_ids
        num_tokens = len(token_ids)
        row = query.row = self.ring.insert(query, 0)
        query.place = KVLocation.RING
        words = PackedStep(self.layout, self.ring.place(self.ring.cursor), num_tokens, row)
        served = [(index, owner) for index, owner in self.ring.held]
        for index, owner in served:
            if owner is query:
                words.add(row, query, 0, num_tokens, query.num_to_prefill)
                query.note_prefilled()
            else:
                self._add_row(words, index, owner, num_tokens)
        padded = np.zeros(self._lattice.length_for(num_tokens), np.int32)
        padded[:num_tokens] = token_ids
        self._launches.append(
            Shape(query.serial, padded, words.words, words.needs, _samples(served), num_tokens)
        )
        self.ring.advance(num_tokens, filled_row=row)
        self._shaped = True

    def _add_row(self, words: PackedStep, row: int, query: Query, num_new: int) -> None:
        """A row takes one token in a step that adds so many columns."""
        num_columns = self.ring.row_span(row) + num_new
        num_tokens = query.num_kv_tokens
        words.add(row, query, num_tokens, num_columns, num_tokens + 1)
        query.num_sampled += 1

    def _prefill(self, query: Query, others: list[Query] | None = None, length: int | None = None) -> None:
        """Compute a query's row, for which there must be room if others leave, and with it those of others.

        Args:
          query: the first.
          others: who may be computed with it; None: those of similar length that are next.
          length: of the rows; None: as `query` needs.
        """
        if others is None:
            most = max(self._config.num_ahead - len(self.shelf) - 1, 0)
            others = self._prefilling.similar_to(query, self.line, most)
        for one in self._prefilling.launch([query, *others], self._launches, length):
            if one.is_launched:  # its only token
                self.line.remove(one)
                self.shelf.drop(one, self._launches)
                one.place = KVLocation.GONE
        self._prefilled = True

    def _prefill_ahead(self) -> None:
        """At most one program beside a step, so that those in the ring wait for no more."""
        config = self._config
        if config.insertion == "shape" or config.prefill == "together" or self._prefilled:
            return
        if not self.ring.num_held or len(self.shelf) >= config.num_ahead:
            return
        for query in self.line.window(config.num_ahead + 1):
            if is_ready(query):
                num_bytes = self._lattice.row_bytes(self._lattice.length_for(query.num_to_prefill))
                if self.shelf.has_room(num_bytes):
                    self._prefill(query)
                else:
                    self.shelf.begin_to_make_room(num_bytes, query, self._launches)
                return

    def _bring_back(self) -> None:
        """Copy the first that waits in host memory back ahead of need, if there is room."""
        for query in self.line.window(1):
            if query.place is KVLocation.HOST and self.shelf.has_room(self.shelf.sizes[query]):
                self.shelf.bring(query, self._launches)


def _samples(served: list[tuple[int, Query]]) -> tuple[tuple[Query, int], ...]:
    return tuple((query, row) for row, query in served)
