"""The dense reference against free-running generation by whole forward passes."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest

from model_defs import load_model, make_mesh
from pensieve_jax.core.errors import ContextLengthError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.sampling_rows import SamplerMode
from pensieve_jax.device.dense_reference import DenseReference, turn_rows

PRESETS = ("llama-tiny", "opt-tiny")


@functools.cache
def _model(preset):
    return load_model(f"random:{preset}", dtype="float32", mesh=make_mesh(1), seed=3)


@functools.cache
def reference_for(preset):
    return DenseReference(_model(preset))


_sample = jax.jit(functools.partial(sampler.sample, mode=SamplerMode(True, True, False), num_top=1))


def random_ids(num_ids, seed=0):
    return np.random.default_rng(seed).integers(3, 320, num_ids).tolist()


def free_run(reference, context_ids, params, seed, eos_token_ids=(257, 261)):
    """Generate token by token; every step is a whole forward pass and one call of the sampler."""
    output_ids, logprobs = [], []
    for num_done in range(params.max_tokens):
        ids = [*context_ids, *output_ids]
        logits = reference.logits(ids)[-1:]
        rows = turn_rows(params, seed, np.array([len(ids)]), eos_token_ids)
        if num_done >= params.min_tokens:
            rows.banned_ids[:] = -1
        samples = _sample(logits, logits, rows)
        output_ids.append(int(samples.token_ids[0]))
        logprobs.append(float(samples.logprobs[0]))
    return output_ids, logprobs


@pytest.mark.parametrize("preset", PRESETS)
def test_logits_do_not_depend_on_what_follows(preset):
    """Padding and later tokens change nothing: row i of a prefix is row i of the whole."""
    ids = random_ids(40)
    whole = reference_for(preset).logits(ids)
    assert whole.shape == (40, 320)
    assert whole.dtype == np.float32
    for num_ids in (1, 16, 17):
        np.testing.assert_allclose(reference_for(preset).logits(ids[:num_ids]), whole[:num_ids], atol=1e-4)
    assert np.abs(np.diff(whole, axis=0)).max() > 0.1
    padded = DenseReference(_model(preset), min_padded_tokens=128)
    np.testing.assert_allclose(padded.logits(ids), whole, atol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=10),
        SamplingParams(max_tokens=10, temperature=1.2),
        SamplingParams(max_tokens=10, temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(max_tokens=10, min_tokens=6, temperature=3.0, stop_token_ids=(5, 6, 7)),
    ],
)
def test_replay_is_free_running_generation(preset, params):
    """Teacher forcing finds the very tokens that generation emits, and their log-probabilities."""
    reference = reference_for(preset)
    history_ids, prompt_ids = random_ids(21, seed=1), random_ids(9, seed=2)
    seed = 2**40 + 17
    output_ids, logprobs = free_run(reference, [*history_ids, *prompt_ids], params, seed)
    replay = reference.replay_turn(history_ids, prompt_ids, output_ids, params, seed)
    assert replay.token_ids.tolist() == output_ids
    np.testing.assert_allclose(replay.logprobs, logprobs, atol=1e-3)
    assert replay.possible.all() and (replay.margins >= 0).all()
    if params.temperature:
        other = reference.replay_turn(history_ids, prompt_ids, output_ids, params, seed + 1)
        assert other.token_ids.tolist() != output_ids


def test_replay_finds_a_wrong_token():
    """A changed token differs at its own position; a changed context differs somewhere."""
    reference, params = reference_for("llama-tiny"), SamplingParams(max_tokens=12)
    prompt_ids = random_ids(20, seed=5)
    output_ids, _ = free_run(reference, prompt_ids, params, 0)
    wrong_ids = [*output_ids[:7], (output_ids[7] + 1) % 320, *output_ids[8:]]
    replay = reference.replay_turn([], prompt_ids, wrong_ids, params)
    assert np.flatnonzero(replay.token_ids[:8] != wrong_ids[:8]).tolist() == [7]
    assert np.flatnonzero(~replay.possible[:8]).tolist() == [7]
    far = reference.replay_turn([], prompt_ids, wrong_ids, params, margin=1e3)
    assert far.possible.all(), "where logits may be off by anything"
    replay = reference.replay_turn([], [*prompt_ids[1:], 3], output_ids, params)
    assert replay.token_ids.tolist() != output_ids


def test_ending_ids_are_banned_below_min_tokens_only():
    """The greedy choice, made an ending id, is skipped for the first `min_tokens` tokens."""
    reference, prompt_ids = reference_for("llama-tiny"), random_ids(20, seed=6)
    output_ids, _ = free_run(reference, prompt_ids, SamplingParams(max_tokens=6), 0)
    params = SamplingParams(max_tokens=6, min_tokens=2, stop_token_ids=tuple(output_ids))
    replay = reference.replay_turn([], prompt_ids, output_ids, params)
    assert not set(replay.token_ids[:2].tolist()) & set(output_ids)
    assert replay.token_ids[2:].tolist() == output_ids[2:]


def test_greedy_margins_are_the_gap_of_the_logits():
    """In units of logits, whatever the token emitted."""
    reference, prompt_ids = reference_for("opt-tiny"), random_ids(10, seed=7)
    output_ids = random_ids(5, seed=8)
    replay = reference.replay_turn(prompt_ids[:4], prompt_ids[4:], output_ids, SamplingParams(max_tokens=5))
    ordered = np.sort(reference.logits([*prompt_ids, *output_ids])[9:14], axis=1)
    np.testing.assert_allclose(replay.margins, ordered[:, -1] - ordered[:, -2], atol=1e-3)


def test_too_long_a_sequence_is_refused():
    """The model's positions are the limit."""
    with pytest.raises(ContextLengthError, match="2048"):
        reference_for("opt-tiny").logits([3] * 2049)


def test_a_gap_is_that_of_the_first_different_token():
    """It is the gap to the best choice there, for whichever of the two is farther from it."""
    reference, common = reference_for("opt-tiny"), random_ids(12, seed=9)
    row = reference.logits(common)[-1]
    best, second, third = np.argsort(-row)[:3].tolist()
    for one, other, worse in ((best, second, second), (second, best, second), (second, third, third)):
        gap = reference.gap([*common, one, 4], [*common, other, 5, 6])
        assert gap == pytest.approx(row[best] - row[worse], abs=1e-5) and gap > 0
    assert reference.gap(common, [*common, best]) == math.inf
    for one, other in ((common, common), ([3], [4])):
        with pytest.raises(ValueError, match="no choice can be compared there"):
            reference.gap(one, other)
