"""Sampling parameters at and beyond their limits."""

from __future__ import annotations

import math

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import options_of
from pensieve_jax.core.sampling_params import MAX_SEED, SamplingParams

BAD_PARAMS = {
    "max_tokens": (-1, 1.0, "3", True, None, 2**31),
    "min_tokens": (-1, 33, 0.5, True, False, None),
    "temperature": (math.nan, math.inf, -math.inf, -0.1, "1", True, False, None, 1e9, 1j),
    "top_k": (-2, -1.0, 0.0, 1.5, True, False, None, 2**31),
    "top_p": (math.nan, -0.5, False, 1.01, math.inf, "1", True, None),
    "seed": (-1, MAX_SEED + 1, 1.0, True, "1"),
    "logprobs": (-1, 1.0, True, "1"),
    "stop": ("", "text", [""], [1], [b"x"], 5, None),
    "stop_token_ids": ([-1], [1.0], [True], ["1"], [2**31], 5, None),
    "ignore_eos": (1, None, "yes"),
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in BAD_PARAMS.items() for v in values], ids=repr
)
def test_invalid_sampling_parameters_are_refused(field, value):
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field) and str(caught.value.limit) in str(caught.value)


def test_a_number_too_long_for_python_to_print_is_refused_like_others():
    with pytest.raises(InvalidRequestError, match="max_tokens is a number of 16610 bits, but must be"):
        SamplingParams(max_tokens=10**5000)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stop", ["x"] * 17, "17 strings.*at most 16 strings"),
        ("stop", ["x", "y" * 1025], "1025 characters.*at most 1024 characters"),
        ("stop", ["x"] * 1_000_000, "at most 16 strings"),
        ("stop", ["ab" * 40_000], "at most 1024 characters"),
        ("stop_token_ids", range(1025), "1025 ids.*at most 1024 ids"),
        ("stop_token_ids", range(1_000_000), "at most 1024 ids"),
    ],
    ids=["strings", "characters", "very many", "very long", "ids", "very many ids"],
)
def test_parameters_that_are_searched_at_every_token_are_limited(field, value, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field and len(str(caught.value)) < 200


def test_defaults_are_within_their_limits():
    """A new object checks only values that are not the default."""
    defaults = SamplingParams()
    for option in options_of(SamplingParams):
        assert option.limit.accepts(getattr(defaults, option.name)), option.name


def test_parameters_keep_no_list_or_mapping_of_their_caller():
    stop, ids, words, bias = [], [], [], {}
    params = SamplingParams(stop=stop, stop_token_ids=ids, bad_words=words, logit_bias=bias)
    for given in (stop, ids, words):
        given.append(1)
    bias[1] = 2.0
    assert params == SamplingParams() and repr(params) == repr(SamplingParams())


def test_stop_strings_and_ids_at_their_limits():
    SamplingParams(stop=["x" * 1024] * 16, stop_token_ids=range(1024))


def test_sampling_parameters_at_their_limits():
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=1e4,
        top_k=0,
        top_p=1,
        seed=MAX_SEED,
        stop=("a", "b"),
        stop_token_ids=(0,),
        logprobs=0,
    )


def test_other_ways_to_switch_a_cut_off_are_stored_as_ours():
    """A step's plan and a stored turn have one value each for a cut that is off."""
    for top_k, top_p in ((-1, 0), (0, 0.0), (-1, 1.0)):
        assert SamplingParams(top_k=top_k, top_p=top_p) == SamplingParams()
    assert repr(SamplingParams(top_p=0).top_p) == "1.0"


def test_ending_ids_are_stop_ids_and_end_of_sequence():
    assert SamplingParams(stop_token_ids=(5, 2)).ending_ids((2, 9)) == (5, 2, 9)
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).ending_ids((2, 9)) == (5,)
