"""How far lists of token ids are equal."""

from __future__ import annotations

import pytest

from pensieve_jax.core.token_ids import num_equal


@pytest.mark.parametrize(
    ("ones", "others", "expected"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], (1, 2), 2),
        ([1, 9, 3], [1, 2, 3], 1),
        ([9], [1], 0),
    ],
)
def test_the_common_beginning_ends_at_the_first_difference(ones, others, expected):
    assert num_equal(ones, others) == num_equal(others, ones) == expected
