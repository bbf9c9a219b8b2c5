"""Batches are few, in order, of compiled sizes, and less than twice as large as their content."""

import pytest

from pensieve_jax.device.transfers.copy_batches import batch_sizes, batches, max_padding


@pytest.mark.parametrize("max_num_chunks", [1, 3, 4, 5, 16, 20, 64, 65, 128])
def test_any_number_goes_in_the_fewest_batches_that_are_not_half_empty(max_num_chunks):
    sizes = batch_sizes(max_num_chunks)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == min(max_num_chunks, 64)
    for num_chunks in range(1, max_num_chunks + 1):
        cut = list(batches(num_chunks, sizes))
        assert [chunk for one in cut for chunk in range(one.start, one.stop)] == list(range(num_chunks))
        assert len(cut) == -(-num_chunks // sizes[-1])
        for one in cut:
            held = one.stop - one.start
            assert one.size in sizes and one.size - held <= max_padding(max_num_chunks)
            assert one.size < 2 * held or one.size == sizes[0]


def test_the_padding_that_memory_is_set_aside_for_is_reached():
    for max_num_chunks, padding in ((1, 0), (4, 3), (20, 7), (64, 31), (128, 31)):
        sizes = batch_sizes(max_num_chunks)
        found = [
            one.size - (one.stop - one.start)
            for num_chunks in range(1, max_num_chunks + 1)
            for one in batches(num_chunks, sizes)
        ]
        assert max(found) == max_padding(max_num_chunks) == padding


def test_nothing_is_no_batch():
    assert not list(batches(0, batch_sizes(8)))


@pytest.mark.parametrize(
    ("max_num_chunks", "num_chunks", "cut"),
    [
        (64, 1, [4]),
        (64, 8, [8]),
        (64, 9, [16]),
        (64, 33, [64]),
        (128, 130, [64, 64, 4]),
        (20, 17, [20]),
        (3, 2, [3]),
        (1, 2, [1, 1]),
    ],
)
def test_batches(max_num_chunks, num_chunks, cut):
    assert [one.size for one in batches(num_chunks, batch_sizes(max_num_chunks))] == cut
