"""Rotary frequencies of each kind, compared with values worked out by hand.

Heads of 8 elements and a theta of 10,000 have the frequencies 1, 0.1, 0.01 and 0.001. Over 6,283 positions
they turn 1,000, 100, 10 times and once, so turns map easily to indices among the four.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import RopeConfig, UnsupportedModelError
from model_defs.rope import cos_sin, inverse_frequencies, rotate, rotation

PLAIN = np.array([1.0, 0.1, 0.01, 0.001])
# Between 300 turns, at index 3 - log10(300) = 0.5229, and 3 turns, at 2.5229.
YARN = RopeConfig("yarn", 1e4, 4.0, 6283, beta_fast=300.0, beta_slow=3.0)


def assert_stretched(rope: RopeConfig, shares: list[float]) -> None:
    """Assert for each frequency the share that is divided by the factor; the rest is unchanged."""
    stretched = np.array(shares)
    expected = PLAIN * (1 - stretched) + PLAIN / rope.factor * stretched
    np.testing.assert_allclose(inverse_frequencies(rope, 8), expected, rtol=2e-4)


def test_plain_and_linear() -> None:
    assert_stretched(RopeConfig(theta=1e4), [0, 0, 0, 0])
    assert_stretched(RopeConfig("linear", 1e4, 4.0), [1, 1, 1, 1])
    assert inverse_frequencies(RopeConfig(), 8).dtype == np.float32


def test_llama3_blends_by_turns() -> None:
    """The blend is full up to 5 turns and none from 205 on: 100 turns are 0.475 of the way, 10 are 0.025."""
    rope = RopeConfig("llama3", 1e4, 8.0, 6283, low_freq_factor=5.0, high_freq_factor=205.0)
    assert_stretched(rope, [0, 0.525, 0.975, 1])


def test_yarn_blends_by_index() -> None:
    assert_stretched(YARN, [0, 1 / 3, 2 / 3, 1])  # from the index below to the one above
    exact = dataclasses.replace(YARN, truncate=False)
    assert_stretched(exact, [0, (1 - 0.5229) / 2, (2 - 0.5229) / 2, 1])


def test_yarn_ends_where_its_betas_say() -> None:
    exact = dataclasses.replace(YARN, truncate=False)
    assert_stretched(dataclasses.replace(exact, beta_fast=30.0), [0, 0, (2 - 1.5229) / 1, 1])
    assert_stretched(dataclasses.replace(exact, beta_slow=30.0), [0, 1 - 0.5229, 1, 1])
    assert_stretched(dataclasses.replace(YARN, beta_fast=30.0), [0, 0, 1 / 2, 1])


def test_yarn_ends_within_the_head() -> None:
    """The last index is the last element's, not the last pair's; 1e5 turns would be at index -2."""
    assert_stretched(dataclasses.replace(YARN, beta_slow=1e-5), [0, 1 / 7, 2 / 7, 3 / 7])
    assert_stretched(dataclasses.replace(YARN, beta_fast=1e5), [0, 1 / 3, 2 / 3, 1])


def test_yarn_of_a_ramp_without_width_is_a_step() -> None:
    """No frequency turns once in three positions, so both ends are the first index."""
    assert_stretched(dataclasses.replace(YARN, original_max_positions=3, beta_slow=1.0), [0, 1, 1, 1])


def test_longrope_divides_each_frequency_by_its_factor() -> None:
    factors = {"short_factors": (1.0, 2.0, 4.0, 5.0), "long_factors": (1.0, 10.0, 20.0, 50.0)}
    rope = RopeConfig("longrope", 1e4, original_max_positions=100, **factors)
    for context, expected in ((100, factors["short_factors"]), (101, factors["long_factors"])):
        np.testing.assert_allclose(
            inverse_frequencies(rope.in_context(context), 8), PLAIN / expected, rtol=1e-6
        )
    with pytest.raises(AssertionError, match="longrope of no context"):
        inverse_frequencies(rope, 8)


def test_a_part_of_a_head_has_the_frequencies_of_a_smaller_head() -> None:
    np.testing.assert_array_equal(
        inverse_frequencies(RopeConfig(rotary_fraction=0.5), 16), inverse_frequencies(RopeConfig(), 8)
    )
    yarn = dataclasses.replace(YARN, rotary_fraction=0.25)
    np.testing.assert_array_equal(inverse_frequencies(yarn, 32), inverse_frequencies(YARN, 8))


def test_the_attention_factor_is_of_cos_and_sin() -> None:
    cos, sin = cos_sin(jnp.array([0, 2]), PLAIN.astype(np.float32), 0.7)
    np.testing.assert_allclose(cos[:, 0], 0.7 * np.cos(np.outer([0, 2], PLAIN)), rtol=1e-5)
    np.testing.assert_allclose(sin[:, 0], 0.7 * np.sin(np.outer([0, 2], PLAIN)), rtol=1e-5)


@pytest.mark.parametrize("quarter_turns", [1, 2])
def test_rotate_pairs_halves(quarter_turns: int) -> None:
    """A quarter turn takes the first half to the second and the second, negated, to the first."""
    frequencies = np.array([math.pi / 2, 0.0], np.float32)  # the second pair stays
    turned = rotate(
        jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), *cos_sin(jnp.array([quarter_turns]), frequencies, 1.0)
    )
    expected = {1: [-3.0, 2.0, 1.0, 4.0], 2: [-1.0, 2.0, -3.0, 4.0]}[quarter_turns]
    np.testing.assert_allclose(turned[0, 0], expected, atol=1e-6)


def test_elements_behind_the_rotated_ones_stay() -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 10)).astype(np.float32)
    rotation = cos_sin(jnp.arange(3), np.array([0.5, 0.1, 0.02], np.float32), 1.0)
    turned = np.asarray(rotate(jnp.asarray(x), *rotation))
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(turned[..., :6], rotate(jnp.asarray(x[..., :6]), *rotation))


def test_queries_grow_with_the_periods_of_their_positions() -> None:
    rope = RopeConfig("yarn", 1e4, 4.0, 100, query_growth=0.5)
    positions = jnp.array([0, 99, 100, 250])
    queries, keys = rotation(positions, rope, 8)
    scale = 1 + 0.5 * np.log([1.0, 1.0, 2.0, 3.0])
    for grown, plain in zip(queries, keys, strict=True):
        np.testing.assert_allclose(grown, plain * scale[:, None, None], rtol=1e-6)
    plain = rotation(positions, dataclasses.replace(rope, query_growth=None), 8)
    np.testing.assert_array_equal(plain.queries, plain.keys)
    np.testing.assert_array_equal(plain.keys, keys)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_growth": 0.0}, "rope.query_growth=0.0 must be a finite number above 0, or null"),
        ({"query_growth": "1"}, "rope.query_growth='1' must be a finite number above 0, or null"),
        (
            {"query_growth": 0.1, "original_max_positions": 0},
            "original_max_positions=0 must be above 0 with a",
        ),
    ],
)
def test_wrong_values_of_growth_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        dataclasses.replace(YARN, **fields)
