"""Sampling over a split vocabulary: the ids of whole rows, with the fewest possible exchanges."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_defs import make_mesh
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.choose import choose, logits_spec, unpack_result
from pensieve_jax.decoding.sampling_rows import SamplerMode, StepResult
from tests.collectives import collectives
from tests.decoding.device.test_sampler import make_rows, random_logits

NUM_ROWS, NUM_TOP, VOCAB_SIZE = 24, 5, 128


@functools.cache
def chooser(num_devices, mode, vocab_size=VOCAB_SIZE):
    """Return the compiled sampler of a step, and the placement of its arguments."""
    mesh = make_mesh(num_devices)
    places = (
        NamedSharding(mesh, logits_spec(vocab_size, mesh)),
        NamedSharding(mesh, PartitionSpec()),
    )
    statics = {
        "mode": mode, "num_top": NUM_TOP, "max_num_samples": NUM_ROWS, "cutoff_backend": "xla",
        "split_over": mesh if num_devices > 1 else None,
    }  # fmt: skip
    logits, rows = jax.device_put(
        (random_logits(NUM_ROWS, vocab_size=vocab_size), make_rows(NUM_ROWS)), places
    )
    return choose.lower(logits, logits, rows, **statics).compile(), places


def run(num_devices, mode, logits, rows, scores=None) -> StepResult:
    compiled, (split, whole) = chooser(num_devices, mode, logits.shape[1])
    logits = jax.device_put(logits, split)
    scores = logits if scores is None else jax.device_put(scores, split)
    next_ids, words = compiled(logits, scores, jax.device_put(rows, whole))
    result = unpack_result(np.asarray(words), NUM_ROWS)
    np.testing.assert_array_equal(next_ids, result.token_ids)
    return result


def assert_same(mode, logits, rows, num_devices=2, scores=None):
    """Compare ids exactly, and sums over devices up to rounding."""
    expected, found = (run(number, mode, logits, rows, scores) for number in (1, num_devices))
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", sampler.all_modes(), ids=str)
def test_every_mode_chooses_as_one_device_does(mode):
    """Covers greedy, random, truncated and banned rows, and rows with ties across the devices."""
    rng = np.random.default_rng(1)
    rows = make_rows(
        NUM_ROWS, temperature=np.tile([0.0, 0.7, 1.5], NUM_ROWS // 3), top_k=rng.choice([0, 9], NUM_ROWS),
        top_p=rng.choice([0.8, 1.0], NUM_ROWS), seeds=rng.integers(0, 2**63, NUM_ROWS),
        positions=rng.integers(0, 4096, NUM_ROWS), banned=(3, 70), min_p=rng.choice([0.0, 0.2], NUM_ROWS),
    )  # fmt: skip
    for seed in range(4):
        logits = random_logits(NUM_ROWS, seed=seed, vocab_size=VOCAB_SIZE)
        scores = random_logits(NUM_ROWS, seed=seed + 9, vocab_size=VOCAB_SIZE) if seed > 1 else None
        assert_same(mode, np.round(logits) if seed % 2 else logits, rows, scores=scores)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("mode", sampler.all_modes(), ids=str)
def test_a_log_probability_shows_that_logits_are_not_finite(mode, num_devices):
    """Wherever NaN or infinity is, and only in that row; minus infinity alone excludes an id."""
    logits = random_logits(NUM_ROWS, vocab_size=VOCAB_SIZE)
    rows = make_rows(NUM_ROWS, temperature=np.tile([0.0, 1.0], NUM_ROWS // 2), top_k=9, banned=(3, 70))
    expected = run(num_devices, mode, logits, rows)
    bad = logits.copy()
    values = (np.nan, np.inf)
    for row in range(0, 12, 2):  # the first, a banned and the last id
        bad[row, (0, 3, VOCAB_SIZE - 1)[row // 2 % 3]] = values[row // 6]
    bad[12] = np.nan
    bad[14] = -np.inf
    bad[16, :60] = -np.inf
    found = run(num_devices, mode, bad, rows)
    is_bad = np.isin(np.arange(NUM_ROWS), range(0, 16, 2))
    np.testing.assert_array_equal(np.isfinite(found.logprobs), ~is_bad)
    others = np.arange(NUM_ROWS) % 2 == 1
    np.testing.assert_array_equal(found.token_ids[others], expected.token_ids[others])
    np.testing.assert_array_equal(found.logprobs[others], expected.logprobs[others])


def test_parts_without_a_possible_id_and_more_devices():
    """One part is all minus infinity; four devices; fewer ids per device than requested alternatives."""
    mode = SamplerMode(draws=True, truncates=False, top_logprobs=True)
    rows = make_rows(NUM_ROWS, temperature=np.tile([0.0, 1.0], NUM_ROWS // 2), seeds=np.arange(NUM_ROWS))
    logits = random_logits(NUM_ROWS, seed=5, vocab_size=VOCAB_SIZE)
    logits[:, : VOCAB_SIZE // 2] = -np.inf
    assert_same(mode, logits, rows)
    few = random_logits(NUM_ROWS, seed=6, vocab_size=16)
    assert_same(mode, few, rows, num_devices=4)


@pytest.mark.parametrize("mode", sampler.all_modes(), ids=str)
def test_logits_are_not_gathered(mode):
    """One exchange of a few words per row, and the largest score before a draw; cuts gather whole rows."""
    text = chooser(2, mode)[0].as_text()
    expected = {"all-gather": 1 + mode.truncates}  # of scores and logits, which may be different arrays
    if mode.draws and not mode.truncates:
        expected["all-reduce"] = 1
    assert collectives(text) == expected
    num_words = 5 + 2 * NUM_TOP * mode.top_logprobs
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    width = VOCAB_SIZE if mode.truncates else num_words
    assert all(f"{width}]" in gather.split(" all-gather(")[0] for gather in gathers), gathers
