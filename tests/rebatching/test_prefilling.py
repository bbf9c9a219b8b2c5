"""Which queries share a program of prompts, and the integers that programs read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pensieve_jax.decoding.sampling_rows import SAMPLING_WORDS, SamplerMode
from pensieve_jax.rebatching.launches import COUNTS, HEADER, PackedStep, Prefill, WordsLayout
from pensieve_jax.rebatching.parked_rows import ParkedRows
from pensieve_jax.rebatching.prefilling import Prefilling, is_ready, prefill_widths
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import QueryQueue
from tests.rebatching.small_queries import ROW_BYTES, query, ring_shapes_of


def prefilling_of(**config: Any) -> tuple[Prefilling, ParkedRows]:
    made, ring_shapes = ring_shapes_of(40, **config)
    parked = ParkedRows(ring_shapes, made.host_bytes)
    return Prefilling(made, ring_shapes, WordsLayout(made.max_batch, 3), parked), parked


@pytest.mark.parametrize(
    ("length", "widths"), [(32, [1, 4]), (64, [1, 3]), (96, [1, 2]), (97, [1]), (128, [1]), (1000, [1])]
)
def test_programs_take_one_prompt_or_as_many_as_their_tokens_allow(length, widths):
    config, _ = ring_shapes_of(40, prefill_batch=4, prefill_tokens=192)
    assert prefill_widths(config, length) == widths


def test_programs_take_no_more_prompts_than_a_batch():
    config, _ = ring_shapes_of(40, max_batch=3, prefill_batch=4)
    assert prefill_widths(config, 32) == [1, 3]


def queue_of(queries: list[Query]) -> QueryQueue:
    queue = QueryQueue()
    for one in queries:
        queue.add(one)
    return queue


@pytest.mark.parametrize(("most", "found"), [(0, []), (1, [2]), (2, [2, 4]), (3, [2, 4, 5]), (9, [2, 4, 5])])
def test_prompts_of_rows_of_one_length_share_a_program(most, found):
    """They are taken in queue order, up to the largest program."""
    prefilling, _ = prefilling_of()
    queries = [query(serial, 50 if serial == 3 else 20) for serial in range(1, 8)]
    others = prefilling.similar_to(queries[0], queue_of(queries), most)
    assert [one.serial for one in others] == found


def test_a_query_with_a_row_or_pending_tokens_shares_no_program():
    prefilling, _ = prefilling_of()
    queries = [query(serial) for serial in range(1, 5)]
    queries[1].location, queries[2].num_sampled = KVLocation.DEVICE, 1
    assert [is_ready(one) for one in queries] == [True, False, False, True]
    assert prefilling.similar_to(queries[0], queue_of(queries), 9) == [queries[3]]


def test_a_query_that_is_served_much_later_shares_no_program():
    """Only the first four batches of the queue are considered."""
    prefilling, _ = prefilling_of(max_batch=2, prefill_batch=2)
    queries = [query(serial, 50 if serial else 20) for serial in range(9)]
    queries[8] = query(8, 20)
    assert prefilling.similar_to(queries[0], queue_of(queries), 1) == []
    queries[7] = query(7, 20)
    assert prefilling.similar_to(queries[0], queue_of(queries), 1) == [queries[7]]


def launched(prefilling: Prefilling, queries: list[Query], length: int | None = None) -> Prefill:
    launches: list[Any] = []
    chosen = prefilling.launch(queries, launches, length)
    (prefill,) = launches
    assert [one.serial for one in chosen] == list(prefill.serials)
    assert prefill.samples == tuple((one, row) for row, one in enumerate(chosen))
    return prefill


def test_a_prefill_by_hand():
    """Two prompts in a program for three: ids, padding, words, and the queries' state afterwards."""
    prefilling, parked = prefilling_of(prefill_batch=3)
    queries = [query(5, 3), query(6, 2)]
    prefill = launched(prefilling, queries)
    assert (prefill.serials, prefill.length, prefill.num_rows, prefill.num_tokens) == ((5, 6), 32, 3, 5)
    ids = prefill.token_ids.reshape(3, 32)
    assert ids[:, :4].tolist() == [[1, 2, 3, 0], [1, 2, 0, 0], [0, 0, 0, 0]] and not ids[:, 4:].any()
    fields = prefill.words[len(HEADER) :].reshape(-1, 4)
    assert dict(zip(COUNTS, fields[: len(COUNTS), :3].tolist(), strict=True)) == {
        "position": [2, 1, 0],
        "num_columns": [1, 1, 1],
        "sample_position": [3, 2, 0],
    }
    assert [one.num_sampled for one in queries] == [1, 1]
    assert parked.device_bytes == 2 * ROW_BYTES and all(one.location is KVLocation.DEVICE for one in queries)


def test_a_single_prompt_takes_the_small_program():
    prefilling, _ = prefilling_of()
    assert launched(prefilling, [query(1)]).num_rows == 1


def test_rows_may_be_longer_than_a_prompt_needs():
    """A batch that decodes together needs it."""
    prefilling, parked = prefilling_of()
    assert launched(prefilling, [query(1), query(2)], 64).length == 64
    assert parked.device_bytes == 4 * ROW_BYTES


@pytest.mark.parametrize(("room", "num_rows"), [(4, 4), (3, 1)])
def test_no_row_leaves_for_prompts_that_could_wait(room, num_rows):
    prefilling, parked = prefilling_of()
    parked.room_bytes = room * ROW_BYTES
    assert launched(prefilling, [query(serial) for serial in range(3)]).num_rows == num_rows


def test_a_query_of_a_failed_launch_is_computed_alone():
    """It shares no program, whether it comes first or later."""
    prefilling, _ = prefilling_of()
    bad, good, other = query(1), query(2), query(3)
    bad.num_failures = 1
    assert launched(prefilling, [good, bad, other]).serials == (2, 3)
    assert launched(prefilling, [bad, query(4)]).serials == (1,)


# The words of a step.

_NUM_FIRST = len(COUNTS) + len(SAMPLING_WORDS)  # fields before the banned ids


def test_words_lie_in_fields_of_rows():
    layout = WordsLayout(3, 2)
    num_fields = _NUM_FIRST + 2
    assert layout.num_fields == num_fields and layout.size == 4 + num_fields * 3
    words = PackedStep(layout, place=11, num_new=5, row=2)
    assert words.words.dtype == np.int32 and words.words[:4].tolist() == [11, 5, 2, 0]
    words.add(1, query(1, temperature=0.5, top_k=3, top_p=0.25), 20, 6, 21)
    fields = words.words[4:].reshape(num_fields, 3)
    assert fields[:3].tolist() == [[0, 20, 0], [1, 6, 1], [0, 21, 0]]
    sampling = dict(zip(SAMPLING_WORDS, fields[len(COUNTS) : _NUM_FIRST], strict=True))
    assert sampling["temperature"].view(np.float32).tolist() == [0.0, 0.5, 0.0]
    assert sampling["top_k"].tolist() == [0, 3, 0]
    assert sampling["top_p"].view(np.float32).tolist() == [1.0, 0.25, 1.0]
    assert (fields[_NUM_FIRST:] == -1).all()


@pytest.mark.parametrize(("num_sampled", "is_banned"), [(0, True), (1, True), (2, False)])
def test_ending_ids_are_banned_until_enough_tokens_were_sampled(num_sampled, is_banned):
    words = PackedStep(WordsLayout(2, 3))
    one = query(1, min_tokens=2)
    one.num_sampled = num_sampled
    words.add(0, one, 0, 1, 1)
    banned = words.words[4:].reshape(-1, 2)[_NUM_FIRST:]
    assert banned.T.tolist() == [[7, 9, -1] if is_banned else [-1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("params", "sampler_mode"),
    [
        ({}, SamplerMode()),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, SamplerMode()),
        ({"temperature": 0.1}, SamplerMode(draws=True)),
        ({"temperature": 0.1, "top_k": 1}, SamplerMode(draws=True, truncates=True)),
        ({"temperature": 0.1, "top_p": 0.5}, SamplerMode(draws=True, truncates=True)),
        ({"logprobs": 0}, SamplerMode()),
        ({"logprobs": 1}, SamplerMode(top_logprobs=True)),
    ],
)
def test_the_sampler_mode_of_a_row(params, sampler_mode):
    words = PackedStep(WordsLayout(2, 3))
    words.add(0, query(1, **{"temperature": 0.0, **params}), 0, 1, 1)
    assert words.sampler_mode == sampler_mode
    words.add(1, query(2, temperature=0.0), 0, 1, 1)
    assert words.sampler_mode == sampler_mode, "another row needs no less"
