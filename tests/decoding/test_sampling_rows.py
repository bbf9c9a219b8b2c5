"""The packing of sampling parameters, and which rows need the sampler's cuts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pensieve_jax.core.sampling_params import MAX_SEED, SamplingParams
from pensieve_jax.decoding.sampling_rows import (
    SAMPLING,
    SAMPLING_WORDS,
    pack_sampling,
    sampling_words,
    truncates,
)


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, MAX_SEED])
def test_a_record_holds_the_parameters_and_the_seed(seed):
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, logprobs=3)
    (record,) = np.frombuffer(pack_sampling(params, seed), SAMPLING)
    assert record["temperature"] == np.float32(0.7) and record["top_p"] == np.float32(0.9)
    assert (record["top_k"], record["logprobs"]) == (40, 1)
    assert int(record["seed"][0]) | int(record["seed"][1]) << 32 == seed


def test_the_words_are_the_bits_of_the_record():
    params, seed = SamplingParams(temperature=0.7, top_k=40, top_p=0.9), 2**40 + 3
    words = dict(zip(SAMPLING_WORDS, sampling_words(params, seed), strict=True))
    assert words["temperature"].view(np.float32) == np.float32(0.7)
    assert words["top_k"] == 40 and words["top_p"].view(np.float32) == np.float32(0.9)
    assert (words["seed_low"], words["seed_high"]) == (3, 2**8)


def test_only_a_sampled_row_needs_cuts():
    """Checks the parameters of a row, and records of many."""
    rows = list(itertools.product((0.0, 0.5), (0, 1), (1.0, 0.5)))
    expected = [temperature > 0 and (top_k > 0 or top_p < 1) for temperature, top_k, top_p in rows]
    params = [SamplingParams(temperature=heat, top_k=top_k, top_p=top_p) for heat, top_k, top_p in rows]
    assert [truncates(one) for one in params] == expected
    records = np.frombuffer(b"".join(pack_sampling(one, 0) for one in params), SAMPLING)
    assert truncates(records).tolist() == expected
