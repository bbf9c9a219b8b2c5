"""A model's limits on a turn: ids of its vocabulary, and parameters within its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import ModelLimits, check_params, check_token_ids

LIMITS = ModelLimits(
    vocab_size=100, max_context_tokens=50, eos_token_ids=(2,), max_logprobs=4, max_banned_ids=3
)


@pytest.mark.parametrize(
    "token_ids",
    [[0, 99], (5,), np.array([0, 99]), [np.int32(7)], range(3)],
    ids=["list", "tuple", "array", "numpy ints", "range"],
)
def test_all_ids_of_the_vocabulary_are_accepted(token_ids):
    check_token_ids("prompt", token_ids, 100)


@pytest.mark.parametrize(
    ("token_ids", "field"),
    [
        ([1, 100], "prompt[1]"),
        ([-1, 1], "prompt[0]"),
        (np.array([1, 100]), "prompt[1]"),
        (np.array([-1]), "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([], "prompt"),
        (np.array([], int), "prompt"),
        (np.array(3), "prompt"),
        ({1, 2}, "prompt"),
    ],
)
def test_an_id_outside_the_vocabulary_is_named_by_its_position(token_ids, field):
    with pytest.raises(InvalidRequestError) as caught:
        check_token_ids("prompt", token_ids, 100)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "limits", "field"),
    [
        ({"logprobs": 4}, {}, None),
        ({"logprobs": 5}, {}, "logprobs"),
        ({"stop_token_ids": [99]}, {}, None),
        ({"stop_token_ids": [1, 100]}, {}, "stop_token_ids[1]"),
        ({"stop_token_ids": [5, 6], "min_tokens": 1}, {}, None),
        ({"stop_token_ids": [5, 6, 7], "min_tokens": 1}, {}, "stop_token_ids"),
        ({"stop_token_ids": [5, 6, 7], "min_tokens": 0}, {}, None),
        ({"stop_token_ids": [5, 6, 7], "min_tokens": 1, "ignore_eos": True}, {}, None),
        ({"stop_token_ids": [0], "min_tokens": 1}, {"vocab_size": 3}, None),
        ({"stop_token_ids": [0, 1], "min_tokens": 1}, {"vocab_size": 3}, "stop_token_ids"),
    ],
)
def test_parameters_at_and_beyond_a_models_limits(params, limits, field):
    limits = dataclasses.replace(LIMITS, **limits)
    if field is None:
        check_params(SamplingParams(**params), limits, None)
        return
    with pytest.raises(InvalidRequestError) as caught:
        check_params(SamplingParams(**params), limits, None)
    assert caught.value.field == field
