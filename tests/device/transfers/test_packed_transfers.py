"""Packed chunks between pages and slots: a chunk that overflows a list never reaches a slot."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.transfers.transfer_bench import CACHE, MODEL, Bench

NUM_HEADS = 2 * MODEL.num_kv_heads


def wild(num_rows, num_columns):
    """Return more exponents in every row than a list has places for."""
    numbers = 2.0 ** np.linspace(-100, 100, num_rows * num_columns)
    return numbers.reshape(num_columns, num_rows).T.astype(jnp.bfloat16)


def packed_bench(num_devices=1, **options):
    return Bench(num_devices, "bfloat16", pack_host=True, **options)


def with_wild_page(bench, page, layer, head):
    """Make one head row of one layer of one page impossible to pack."""
    content = bench.content.copy()
    content[page, layer, :, head] = wild(*content[page, layer, :, head].shape)
    bench.fill(content)


def ended(bench, copies):
    """Return the ids that arrived and those that were lost, of these copies."""
    arrived, lost = set(), set()
    wanted = {copy.copy_id for copy in copies}
    bench.transfers.swap_in([])
    while arrived | lost != wanted:
        bench.transfers.wait()
        for found, named in zip((arrived, lost), bench.transfers.completed(), strict=True):
            assert not found & set(named)
            found |= set(named)
    assert not arrived & lost
    return arrived, lost


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("layer", [0, pytest.param(MODEL.num_layers - 1, marks=pytest.mark.long)])
@pytest.mark.parametrize("head", [0, NUM_HEADS - 1])
def test_a_chunk_that_cannot_be_packed_is_lost_and_others_arrive(num_devices, layer, head):
    """Any group of layers, and any device, may have it; its slot holds nothing."""
    bench = packed_bench(num_devices)
    with_wild_page(bench, 9, layer, head)
    out = bench.copies((page, page - 4) for page in range(5, 11))
    bench.transfers.swap_out(out)
    bench.step([9])
    arrived, lost = ended(bench, out)
    assert lost == {out[4].copy_id} and len(arrived) == 5
    with pytest.raises(AssertionError, match="slot 5 holds no chunk"):
        bench.transfers.swap_in(bench.copies([(20, 5)]))
    back = bench.copies([(20, 1), (21, 6)])
    bench.transfers.swap_in(back)
    bench.finish(back)
    bench.check({9: None, 20: 5, 21: 10})
    assert bench.counter.value == 0


def test_unpackable_pages_that_are_not_copied_lose_nothing():
    """A batch is padded with page 0, which may hold anything."""
    bench = packed_bench()
    with_wild_page(bench, 0, 0, 0)
    out = bench.copies([(5, 1)])
    bench.transfers.swap_out(out)
    assert ended(bench, out) == ({out[0].copy_id}, set())


def test_a_slot_with_old_content_is_empty_after_a_lost_copy():
    bench = packed_bench()
    bench.store([(5, 1)])
    with_wild_page(bench, 6, 1, 1)
    out = bench.copies([(6, 1)])
    bench.transfers.swap_out(out)
    assert ended(bench, out) == (set(), {out[0].copy_id})
    with pytest.raises(AssertionError, match="slot 1 holds no chunk"):
        bench.transfers.swap_in(bench.copies([(7, 1)]))


def test_waiting_for_a_lost_copy_ends():
    """Room for two: the first to end is noticed while the third is gathered, and reported later."""
    bench = packed_bench(bound=2)
    with_wild_page(bench, 5, 0, 0)
    with_wild_page(bench, 6, 1, 1)
    bench.transfers.swap_out(out := bench.copies([(5, 1), (6, 2), (7, 3)]))
    first, second, third = (copy.copy_id for copy in out)
    assert bench.transfers._outgoing.lost
    bench.transfers.wait()
    assert ended(bench, out) == ({third}, {first, second})


def test_two_devices_hold_the_bytes_of_one():
    benches = [packed_bench(num_devices) for num_devices in (1, 2)]
    slots = []
    for bench in benches:
        bench.store([(5, 1)])
        slots.append([np.asarray(array) for array in bench.transfers._host.get(1)])
    for one, two in zip(*slots, strict=True):
        assert one.dtype == np.uint8 and one.shape[1] == 26
        np.testing.assert_array_equal(one, two)


def test_an_ignored_overflow_would_be_detected(monkeypatch):
    """The content that the flags keep out of a slot differs from the page's: the test above could fail."""
    bench = packed_bench()
    with_wild_page(bench, 5, 0, 0)
    monkeypatch.setattr(type(bench.transfers._dispatcher), "is_lost", lambda self, transfer: False)
    bench.store([(5, 1)])
    back = bench.copies([(7, 1)])
    bench.transfers.swap_in(back)
    bench.finish(back)
    with pytest.raises(AssertionError):
        bench.check({7: 5})


def test_sizes_follow():
    assert CACHE.pack_host is None
    raw, packed = Bench(dtype="bfloat16", pack_host=False), packed_bench()
    assert packed.storage.page_bytes == raw.storage.page_bytes
    assert packed.storage.slot_bytes * 32 == raw.storage.slot_bytes * 26
    assert packed.transfers.staging_bytes * 32 == raw.transfers.staging_bytes * 26
    assert Bench(dtype="bfloat16").storage.packing == packed.storage.packing is not None
