"""The counters of a query, and the order in which queries are served."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.queue import QueryQueue, rank
from tests.rebatching.small_queries import query


def test_counts_of_a_query():
    """The last sampled token has no KV yet, but would have to be computed with the others."""
    one = query(1, 20, max_tokens=3)
    assert (one.num_to_prefill, one.is_launched) == (20, False)
    one.note_prefilled()
    assert (one.num_sampled, one.num_kv_tokens, one.num_to_prefill) == (1, 20, 21)
    one.token_ids.append(5)
    assert one.all_token_ids == [*range(1, 21), 5]
    one.num_sampled = 2
    assert not one.is_launched
    one.num_sampled = 3
    assert one.is_launched


@pytest.mark.parametrize(("num_prompt", "num"), [(20, 100), (29, 100), (30, 99), (128, 1)])
def test_a_reply_ends_with_the_context(num_prompt, num):
    assert query(1, num_prompt, max_tokens=100).max_num_tokens == num


def test_usage_counts_recomputed_and_copied_back_tokens():
    one = query(1, 20)
    one.note_prefilled()
    one.note_copied_back()  # it was prefilled ahead, and never in the ring
    one.note_suspended()
    one.num_sampled = 4
    one.note_copied_back()
    one.note_suspended()
    one.note_prefilled()
    one.token_ids += [3, 4]
    one.finish("length")
    assert one.done
    usage = one.result().usage
    assert (usage.prompt_tokens, usage.prefilled_tokens, usage.output_tokens) == (20, 20, 2)
    assert usage.num_suspensions == 2
    assert usage.resume_swapped_in_tokens == 23
    assert usage.resume_recomputed_tokens == 24


def test_a_query_has_no_result_before_its_end():
    one = query(1)
    assert not one.done
    with pytest.raises(PensieveError, match="has not finished"):
        one.result()
    one.error = PensieveError("planted")
    assert one.done
    with pytest.raises(PensieveError, match="planted"):
        one.result()


def test_a_new_query_is_empty():
    one = query(1)
    assert (one.row, one.num_sampled, one.num_failures, one.suspended) == (-1, 0, 0, False)
    one.finish("cancelled")
    usage = one.result().usage
    assert (usage.num_suspensions, usage.resume_swapped_in_tokens, usage.resume_recomputed_tokens) == (
        0,
        0,
        0,
    )
    assert (usage.reused_gpu_tokens, usage.swapped_in_tokens, usage.recomputed_tokens) == (0, 0, 0)
    assert (usage.prompt_tokens, usage.prefilled_tokens) == (20, 0)


def test_a_seed_is_two_words():
    one = query(1, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
    seeded = Query(
        1,
        [1],
        one.params,
        seed=(5 << 32) + 2**31,
        priority=0,
        ending_ids=(),
        max_context_tokens=9,
        tokenizer=None,
    )
    words = seeded.sampling_words
    assert words[[0, 2, 3]].view(np.float32).tolist() == [0.5, 0.25, 0.125]
    assert words[[1, 4, 5]].tolist() == [3, -(2**31), 5]


def test_priority_then_suspension_then_arrival():
    late, early, urgent, back = query(4), query(1), query(3, priority=2), query(2)
    back.suspended = True
    queue = QueryQueue()
    for one in (late, early, urgent, back):
        queue.add(one)
    assert list(queue) == [urgent, back, early, late] == sorted(queue, key=rank)
    assert queue.head is urgent and queue.window(2) == [urgent, back] and len(queue) == 4
    queue.remove(early)
    assert list(queue) == [urgent, back, late]
    with pytest.raises(AssertionError):
        queue.remove(early)
