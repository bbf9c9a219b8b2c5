"""Copies to host memory that are lost: which sequences continue, which chunks are dropped or tried again."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import ChunkDrop, DropReason
from pensieve_jax.cache.states import IllegalTransitionError
from tests.cache.helpers import CHUNK, Cache, states


def reasons(cache: Cache) -> list[tuple[str, int, DropReason]]:
    return [(drop.conversation_id, drop.index, drop.reason) for drop in cache.manager.take_drops()]


def test_a_chunk_that_still_has_its_page_continues_without_a_slot():
    cache = Cache(6, 6, clean_pages=6)
    sequence = cache.idle("a", 3 * CHUNK)
    outs, _ = cache.end_step()
    cache.lose(outs[1].copy_id)
    assert states(sequence) == ["copying out", "on gpu", "copying out"]
    assert cache.slots.num_free == 4 and not reasons(cache)
    cache.complete()
    assert states(sequence) == ["on both", "on gpu", "on both"]
    assert cache.manager.stats()["num_lost_copies"] == 1


def test_it_is_not_tried_again_and_dropped_when_it_is_evicted():
    cache = Cache(6, 6, clean_pages=6)
    sequence = cache.idle("a", 4 * CHUNK)
    outs, _ = cache.end_step()
    cache.lose(outs[1].copy_id, outs[2].copy_id)
    cache.complete()
    assert states(sequence) == ["on both", "on gpu", "on gpu", "on both"]
    outs, _ = cache.end_step()
    assert not outs and states(sequence) == ["on both", "dropped", "dropped", "on both"]
    assert reasons(cache) == [("a", index, DropReason.FITS_NO_SLOT) for index in (1, 2)]
    assert sequence.holes(CHUNK) == [(CHUNK, 3 * CHUNK)]


def test_a_needed_page_drops_it_and_no_slot_is_freed():
    """The chunk in host memory is worth less, and stays: the evicted one does not fit there anyway."""
    cache = Cache(2, 1)
    kept = cache.on_cpu("kept", CHUNK, 1000.0)
    lost, other = cache.idle("lost", CHUNK, 100.0), cache.idle("other", CHUNK, 10.0)
    lost.chunks[0].fits_host = False
    cache.running("new", CHUNK)
    assert states(kept) == ["on cpu"] and states(lost) == [] and states(other) == ["on gpu"]
    assert reasons(cache) == [("lost", 0, DropReason.FITS_NO_SLOT)]
    cache.check()


def test_a_chunk_that_gave_its_page_away_is_dropped():
    """In the middle this leaves a hole; at the end it shortens the sequence."""
    cache = Cache(6, 6, clean_pages=6)
    sequence = cache.idle("a", 3 * CHUNK)
    outs, _ = cache.end_step()
    for index in range(3):
        cache.manager._store.give_page(sequence, index)
    cache.lose(outs[2].copy_id, outs[0].copy_id)
    assert states(sequence) == ["dropped", "leaving"] and sequence.num_kv_tokens == 2 * CHUNK
    assert cache.slots.num_free == 5 and cache.pool.num_free == 6
    assert cache.manager.take_drops() == tuple(
        ChunkDrop("a", index, DropReason.FITS_NO_SLOT, None) for index in (2, 0)
    )
    cache.lose(outs[1].copy_id)
    assert states(sequence) == [] and cache.slots.num_free == 6


def test_a_request_that_waited_for_it_is_admitted_and_recomputes_it():
    cache = Cache(6, 6, clean_pages=6)
    sequence = cache.idle("a", 3 * CHUNK)
    outs, _ = cache.end_step()
    cache.manager._store.give_page(sequence, 1)
    cache.queued("a", sequence)
    assert not cache.manager.try_admit(sequence, 3 * CHUNK + 1, waive_reserve=True)
    assert cache.manager.blocking_copies(sequence) == [outs[1].copy_id]
    cache.lose(outs[1].copy_id)
    assert cache.manager.try_admit(sequence, 3 * CHUNK + 1, waive_reserve=True)
    assert states(sequence) == ["copying out", "reserved", "copying out", "reserved"]
    cache.check()


@pytest.mark.parametrize("how", ["close", "lose_device"])
def test_an_abandoned_copy_frees_its_slot(how):
    cache = Cache(6, 6, clean_pages=6)
    sequence = cache.idle("a", 3 * CHUNK)
    outs, _ = cache.end_step()
    if how == "close":
        cache.manager.close(sequence)
        assert cache.slots.num_free == 3
        cache.lose(*[copy.copy_id for copy in outs])
        assert cache.manager.stats()["num_lost_copies"] == 3
    else:
        cache.manager.lose_device()
    assert cache.slots.num_free == 6
    cache.check()


def test_a_partial_chunk_is_tried_again_and_a_full_one_is_not():
    """The last chunk's content will change, so it may fit then."""
    cache = Cache(8, 8, clean_pages=8)
    sequence = cache.idle("a", CHUNK + 5)
    outs, _ = cache.end_step()
    cache.lose(*[copy.copy_id for copy in outs])
    cache.running("a", CHUNK + 9, sequence)
    assert [chunk.fits_host for chunk in sequence.chunks] == [False, True]
    cache.manager.release(sequence)
    outs, _ = cache.end_step()
    assert len(outs) == 1 and states(sequence) == ["dropped", "copying out"]


def test_a_loss_that_arrives_while_the_chunk_is_written_is_ignored():
    """The copy had the chunk's content from before its conversation returned."""
    cache = Cache(8, 8, clean_pages=8)
    sequence = cache.idle("a", CHUNK + 5)
    outs, _ = cache.end_step()
    assert len(outs) == 2
    cache.queued("a", sequence)
    assert cache.manager.try_admit(sequence, 2 * CHUNK, waive_reserve=True)
    cache.lose(*[copy.copy_id for copy in outs])
    cache.manager.fill(sequence, CHUNK + 5, 2 * CHUNK)
    assert [chunk.fits_host for chunk in sequence.chunks] == [False, True]
    cache.manager.release(sequence)
    outs, _ = cache.end_step()
    assert len(outs) == 1 and states(sequence) == ["dropped", "copying out"]


def test_only_a_copy_to_a_slot_can_be_lost():
    cache = Cache(6, 6)
    sequence = cache.queued("a", cache.on_cpu("a", CHUNK))
    cache.manager.try_admit(sequence, CHUNK, waive_reserve=True)
    _, ins = cache.begin()
    with pytest.raises(IllegalTransitionError):
        cache.manager.lose([ins[0].copy_id])
