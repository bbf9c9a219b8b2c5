"""Grouping of prompts into prefills (Baton, section 4.2: P&D decoupling).

Owns: the sizes of prefill programs, and the choice of queries that share one.
Does not know: the ring, or when a prefill is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.launches import Launch, PackedStep, Prefill, WordsLayout
from pensieve_jax.rebatching.parked_rows import ParkedRows
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import QueryQueue
from pensieve_jax.rebatching.ring_shapes import RingShapes


def prefill_widths(config: RebatchingConfig, length: int) -> list[int]:
    """Return the batch sizes of prefills of `length`: 1, and a larger one if the rows are short enough."""
    most = min(config.prefill_batch, config.max_batch, config.prefill_tokens // length)
    return [1, most] if most > 1 else [1]


class Prefilling:
    """Builder of prefill launches."""

    def __init__(
        self, config: RebatchingConfig, ring_shapes: RingShapes, layout: WordsLayout, parked: ParkedRows
    ) -> None:
        """Store the limits, and `parked`, which receives the rows."""
        self._config, self._ring_shapes, self._layout, self._parked = config, ring_shapes, layout, parked

    def similar_to(self, query: Query, queue: QueryQueue, max_num: int) -> list[Query]:
        """Return up to `max_num` queries near the front of the queue that need equally long rows."""
        length = self._ring_shapes.length_for(query.num_to_prefill)
        max_num = min(max_num, prefill_widths(self._config, length)[-1] - 1)
        similar: list[Query] = []
        for other in queue.window(4 * self._config.max_batch) if max_num > 0 else []:
            if len(similar) == max_num:
                break
            if other is query or not is_ready(other):
                continue
            if self._ring_shapes.length_for(other.num_to_prefill) == length:
                similar.append(other)
        return similar

    def launch(
        self, queries: Sequence[Query], launches: list[Launch], length: int | None = None
    ) -> list[Query]:
        """Prefill the first query, and as many others as one program and the memory allow.

        Args:
          queries: candidates. All of their tokens must be known.
          launches: list that receives the launch.
          length: length of the rows; None means the length that the first query needs.

        Returns:
          The prefilled queries.
        """
        length = length or self._ring_shapes.length_for(queries[0].num_to_prefill)
        row_bytes = self._ring_shapes.row_bytes(length)
        # A query that was in a failed launch is prefilled alone, to find out whether it caused the failure.
        alone = queries[0].num_failures > 0
        queries = queries[:1] if alone else [one for one in queries if not one.num_failures]
        width = prefill_widths(self._config, length)[-1]
        if len(queries) == 1 or not self._parked.has_room(width * row_bytes):
            width = 1  # free no parked row for queries that can wait
        has_room = self._parked.make_room(width * row_bytes, launches)
        assert has_room, "memory for one row is always reserved"
        chosen = list(queries[:width])
        assert all(map(is_ready, chosen))
        token_ids = np.zeros((width, length), np.int32)
        words = PackedStep(self._layout)
        num_tokens = 0
        for row, query in enumerate(chosen):
            ids = query.all_token_ids
            token_ids[row, : len(ids)] = ids
            words.add(row, query, len(ids) - 1, 1, len(ids))
            query.note_prefilled()
            num_tokens += len(ids)
        launches.append(
            Prefill(
                serials=tuple(query.serial for query in chosen),
                length=length,
                num_rows=width,
                token_ids=token_ids.reshape(-1),
                words=words.words,
                sampler_mode=words.sampler_mode,
                samples=tuple((query, row) for row, query in enumerate(chosen)),
                num_tokens=num_tokens,
            )
        )
        for query in chosen:
            self._parked.put(query, length)
        return chosen


def is_ready(query: Query) -> bool:
    """Return whether the query can be prefilled: it has no KV cache, and all its tokens were fetched."""
    return query.location is KVLocation.NOT_COMPUTED and len(query.token_ids) == query.num_sampled
