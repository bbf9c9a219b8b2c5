"""Steps around chunks that are being copied: what is granted before they arrive, and what waits."""

from __future__ import annotations

import pytest

from pensieve_jax.scheduler import RequestStatus
from tests.scheduler.helpers import CHUNK, SchedulerHarness


def returning(harness, name, history_len, *holes):
    """Add a conversation with its history on the CPU, except its last token and the dropped chunks."""
    harness.conversation(name, history_len)
    sequence, cache = harness.sequences[name][1], harness.cache
    for index in range(len(sequence.chunks)):
        cache.manager._store.swap_out(sequence, index, cache.slots.allocate())
    cache.complete()
    for index in range(len(sequence.chunks)):
        cache.manager._store.give_page(sequence, index)
    cache.drop(sequence, *holes)


def test_nothing_behind_an_arriving_chunk_is_granted():
    """Chunks 0 and 3 are dropped, 1 and 2 arrive: only the leading one is computed beside the copy."""
    harness = SchedulerHarness(40, 40)
    harness.add("runs", 5, max_tokens=50)
    harness.step()
    returning(harness, "a", 81, 0, 3)
    harness.add("a", 7)
    output = harness.step()
    assert harness.steps[-1] == [("runs", 5, 6, True), ("a", 0, 16, False)]
    assert len(output.swap_ins) == 3 and output.expedited == ()
    harness.step()
    assert harness.steps[-1] == [("runs", 6, 7, True)]
    harness.cache.complete(output.swap_ins[0].copy_id)
    harness.step()
    assert harness.steps[-1] == [("runs", 7, 8, True)], "chunk 2 still arrives"
    harness.cache.complete(output.swap_ins[1].copy_id)
    harness.step()
    assert harness.steps[-1] == [("runs", 8, 9, True), ("a", 48, 64, False)]
    harness.cache.complete(output.swap_ins[2].copy_id)
    harness.step()
    assert harness.steps[-1] == [("runs", 9, 10, True), ("a", 80, 88, True)]


def test_decodes_after_a_recomputation_are_not_starved():
    """The oldest recomputes and computes a prompt after its copies; later arrivals keep their tokens."""
    harness = SchedulerHarness(40, 40, max_num_running=3, max_num_batched_tokens=34, max_num_rows=4)
    returning(harness, "old", 100, 1, 2)
    harness.add("old", 60, max_tokens=9)
    for name in "ab":
        harness.add(name, 1, max_tokens=9)
    output = harness.step()
    for copy in output.swap_ins:
        harness.cache.complete(copy.copy_id)
    harness.step()
    harness.step()
    assert harness.steps == [
        [("a", 0, 1, True), ("b", 0, 1, True)],
        [("old", 16, 48, False), ("a", 1, 2, True), ("b", 1, 2, True)],
        [("old", 99, 131, False), ("a", 2, 3, True), ("b", 2, 3, True)],
    ]


def test_computable_tokens_go_before_expediting():
    harness = SchedulerHarness(40, 40, max_num_batched_tokens=32)
    returning(harness, "a", 81, 0, 1, 2)
    harness.add("a", 7)
    expedited = [harness.step().expedited for _ in range(3)]
    assert harness.steps == [
        [("a", 0, 32, False)],
        [("a", 32, 48, False)],
        [("a", 80, 88, True)],
    ]
    assert [len(copy_ids) for copy_ids in expedited] == [0, 0, 2]


def test_only_the_oldest_is_expedited():
    harness = SchedulerHarness(40, 40)
    returning(harness, "a", 49)
    returning(harness, "b", 49)
    first, second = harness.add("a", 5), harness.add("b", 5)
    output = harness.step()
    assert len(output.swap_ins) == 6 and output.expedited == tuple(
        copy.copy_id for copy in output.swap_ins[:3]
    )
    assert [grant.request for grant in output.grants] == [first]
    assert first.status is second.status is RequestStatus.RUNNING


def test_expediting_is_limited_to_the_staging_size():
    """Six copies, room for four: the step waits until two of them are complete."""
    harness = SchedulerHarness(40, 40, max_num_copies=4)
    returning(harness, "a", 97)
    harness.add("a", 5)
    output = harness.step()
    assert len(output.swap_ins) == 6 and output.expedited == () and output.grants == ()
    harness.cache.begin()
    harness.cache.manager.complete([copy.copy_id for copy in output.swap_ins[:2]])
    assert len(harness.step().expedited) == 4


def test_slots_of_expedited_copies_are_not_given_away_in_the_same_step():
    """Copies out run before copies in: host memory is full, and a chunk must be copied out."""
    harness = SchedulerHarness(12, 4, clean_pages=6)
    returning(harness, "a", 65)
    harness.cache.idle("idle", 6 * CHUNK, 5.0)
    harness.add("a", 5)
    output = harness.step()
    assert len(output.expedited) == 4
    assert not {copy.slot for copy in output.swap_outs} & {copy.slot for copy in output.swap_ins}


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_a_request_that_waits_for_a_copy_out_is_not_stuck(num_waiting):
    """Its chunks are leaving: no other is admitted before it, and nothing is granted until they have left."""
    harness = SchedulerHarness(6, 6)
    harness.conversation("a", 65)
    sequence = harness.sequences["a"][1]
    harness.cache.running("other", 4 * CHUNK)
    outs, _ = harness.cache.begin()
    assert len(outs) == 2
    other = next(s for s in harness.cache.manager._store if s.sequence_id == "other")
    harness.cache.manager.truncate(other, 0)
    harness.cache.manager.release(other)
    requests = [harness.add("a", 5), *[harness.add(f"new{i}", 5) for i in range(1, num_waiting)]]
    output = harness.step()
    assert output.grants == () and output.admitted == () and sequence.first_arriving is None
    harness.cache.complete()
    assert harness.step().admitted == tuple(requests)


def test_usage_counts_copied_in_tokens():
    harness = SchedulerHarness(40, 40)
    returning(harness, "a", 100, 0, 1)
    request = harness.add("a", 7)
    harness.step()
    usage = request.usage(num_output_tokens=4)
    assert (usage.reused_gpu_tokens, usage.swapped_in_tokens) == (0, 67)
    assert (usage.recomputed_tokens, usage.prefilled_tokens) == (32, 8)
