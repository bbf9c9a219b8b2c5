"""Copies that end late, or after their chunk has gone: which pages and slots they hold, and until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.config import POLICIES
from tests.cache.helpers import CHUNK, Cache, resident, states

OPS = ("turn", "turn", "turn", "queue", "truncate", "close", "suspend", "think", "copy", "unfit", "lose")


@pytest.mark.parametrize("how", ["truncate", "close"])
def test_a_copy_whose_chunk_is_gone_holds_its_page_and_slot_until_it_is_complete(how):
    cache = Cache(6, 6)
    sequence = cache.queued("a", cache.on_cpu("a", 3 * CHUNK))
    cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    _, ins = cache.begin()
    cache.manager.release(sequence)
    getattr(cache.manager, how)(sequence, *([CHUNK] if how == "truncate" else []))
    num_left = 1 if how == "truncate" else 0
    assert cache.pool.num_free == 3 and cache.slots.num_free == 3
    cache.complete(ins[2].copy_id)
    assert cache.pool.num_free == 4 and cache.slots.num_free == 4
    cache.complete()
    assert cache.pool.num_free == cache.slots.num_free == 6 - num_left


def test_a_cancelled_swap_out_holds_its_slot_until_it_is_complete():
    cache = Cache(6, 6, clean_pages=6)
    sequence = cache.idle("a", 3 * CHUNK)
    cache.end_step()
    cache.manager.close(sequence)
    assert cache.pool.num_free == 6, "the pages were read already"
    assert cache.slots.num_free == 3
    cache.complete()
    assert cache.slots.num_free == 6


def test_lost_pools_leave_the_content_of_slots():
    """Complete copies survive, and arriving chunks; chunks on the GPU only or being copied out do not."""
    cache = Cache(12, 12, clean_pages=12, retrieval_priority=False)
    mixed = cache.on_both("mixed", 4 * CHUNK, but=[3])
    cache.manager._store.give_page(mixed, 1)
    arriving = cache.queued("arriving", cache.on_cpu("arriving", 2 * CHUNK))
    leaving = cache.idle("leaving", 2 * CHUNK)
    runs = cache.running("runs", 2 * CHUNK)
    cache.end_step()
    cache.manager._store.give_page(leaving, 0)
    cache.check()
    assert states(arriving) == ["copying in"] * 2 and states(leaving) == ["leaving", "copying out"]
    cache.manager.lose_device()
    assert states(mixed) == ["on cpu"] * 3 and mixed.num_kv_tokens == 3 * CHUNK
    assert states(arriving) == ["on cpu"] * 2 and states(leaving) == [] and states(runs) == ["dropped"] * 2
    assert cache.pool.num_free == 12 and cache.slots.num_free == 12 - 5
    cache.manager.truncate(runs, 0)
    cache.manager.release(runs)
    cache.check()


@given(
    cpu_pages=st.sampled_from([0, 1, 3, 6, 12, 40]),
    options=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(POLICIES),
            "clean_pages": st.integers(0, 12),
            "retrieval_priority": st.booleans(),
        }
    ),
    ops=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 5), st.integers(1, 60)), max_size=50),
)
def test_any_order_of_turns_and_copies_keeps_its_invariants(cpu_pages, options, ops):
    """Copies end late, in any order, or without content; the counts always match, and everything is free at
    the end.
    """
    cache = Cache(12, cpu_pages, **options)
    sequences, queued = {}, set()
    for op, number, size in ops:
        sequence = sequences.get(number)
        if op == "think":
            cache.clock.advance(size)
        elif op == "copy":
            in_flight = (*cache.copies_in, *cache.copies_out)[size % 3 :: 1 + number]
            if in_flight:
                cache.complete(*in_flight)
        elif op == "unfit":
            cache.begin()
            cache.lose(*tuple(cache.copies_out)[size % 3 :: 1 + number])
        elif op == "lose":
            cache.begin()
            cache.manager.lose_device()
            cache.copies_out.clear()
            cache.copies_in.clear()
        elif op in ("turn", "suspend", "queue"):
            sequences[number] = sequence = sequence or cache.manager.open(f"s{number}")
            if number not in queued:
                cache.queued(f"s{number}", sequence)
                queued.add(number)
            cache.end_step()
            num_tokens = min(sequence.num_kv_tokens + size, 12 * CHUNK)
            cache.manager.begin_step()
            if op != "queue" and cache.manager.try_admit(sequence, num_tokens, waive_reserve=True):
                cache.begin()
                if op == "turn":
                    for copy_id in cache.manager.expedite(sequence):
                        del cache.copies_in[copy_id]
                    for start, end in sequence.holes(CHUNK):
                        cache.manager.fill(sequence, start, end)
                    cache.manager.fill(sequence, sequence.num_kv_tokens, num_tokens)
                    assert not sequence.holes(CHUNK) and sequence.num_kv_tokens == num_tokens
                    assert resident(sequence) == list(range(len(sequence.chunks)))
                else:
                    cache.manager.suspend(sequence)
                cache.manager.release(sequence)
                queued.discard(number)
        elif sequence is not None and number not in queued:
            cache.manager.truncate(sequence, size)
            if op == "close":
                cache.manager.close(sequences.pop(number))
        cache.check()
    for sequence in sequences.values():
        cache.manager.close(sequence)
    cache.complete()
    assert cache.pool.num_free == 12 and cache.slots.num_free == cpu_pages
