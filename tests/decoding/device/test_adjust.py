"""The adjustment of logits against numpy, on whole logits and on parts of the vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_defs import make_mesh
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.token_masks import num_words
from pensieve_jax.decoding.adjustments import (
    MAX_COUNT,
    NUM_SEED_IDS,
    bias_words,
    no_bias,
    not_counted,
    penalty_words,
    seeds,
)
from pensieve_jax.decoding.device import adjust
from pensieve_jax.decoding.device.adjust import Counts
from pensieve_jax.decoding.device.choose import logits_spec
from tests.collectives import collectives
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus
from tests.seeds import new_seed

NUM_ROWS, NUM_SLOTS = 6, 4
VOCAB_SIZE = 268  # its halves and quarters are not multiples of 32
PENALIZED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)


@functools.cache
def programs(num_devices):
    """Return both programs, and the placement of logits and of everything else."""
    mesh = make_mesh(num_devices)
    split_over = mesh if num_devices > 1 else None
    places = NamedSharding(mesh, logits_spec(VOCAB_SIZE, mesh)), NamedSharding(mesh, PartitionSpec())
    found = [functools.partial(one, split_over=split_over) for one in (adjust.adjust, adjust.adjust_counted)]
    return *found, *places


def bits_of(allowed):
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def all_ids(num_rows=NUM_ROWS):
    return np.full((num_rows, num_words(VOCAB_SIZE)), -1, np.int32)


def random_logits(rng):
    logits = rng.normal(size=(NUM_ROWS, VOCAB_SIZE), scale=3.0).astype(np.float32)
    logits[0, 5], logits[1, 7] = -np.inf, np.nan
    return logits


def new_counts(num_devices=1):
    place = programs(num_devices)[3]
    shapes = adjust.counts_shape(NUM_SLOTS, VOCAB_SIZE)
    return jax.device_put(Counts(*(np.full(one.shape, 77, one.dtype) for one in shapes)), place)


def plain(logits, words, bias, num_devices=1):
    run, _, split, whole = programs(num_devices)
    given = jax.device_put(logits, split), jax.device_put(words, whole), jax.device_put(bias, whole)
    return np.asarray(run(*given))


def counted_scores(logits, words, bias, counts, counted, prev_ids, num_devices=1):
    _, run, split, whole = programs(num_devices)
    given = jax.device_put((words, bias), whole)
    scores, counts = run(
        jax.device_put(logits, split), *given, counts, *jax.device_put((counted, prev_ids), whole)
    )
    return np.asarray(scores), counts


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_masks_and_biases(num_devices):
    """Any ids, the first, the last and those at the edges of words and parts; all ids change no bit."""
    rng = np.random.default_rng(1)
    logits, allowed = random_logits(rng), rng.random((NUM_ROWS, VOCAB_SIZE)) < 0.3
    edges = [0, 31, 32, 63, 66, 67, 133, 134, VOCAB_SIZE - 1]
    allowed[:, edges] = rng.random((NUM_ROWS, len(edges))) < 0.5
    np.testing.assert_array_equal(plain(logits, all_ids(), no_bias(NUM_ROWS), num_devices), logits)
    bias, expected = no_bias(NUM_ROWS), logits.copy()
    for row in range(1, NUM_ROWS):  # a row with the most biases, and one without
        size = 268 if row == 2 else 9
        ids = rng.permutation(VOCAB_SIZE)[:size] if row > 2 else np.array(edges)
        given = dict(zip(ids.tolist(), rng.uniform(-100, 100, len(ids)).tolist(), strict=True))
        bias[:, row, : len(ids)] = bias_words(SamplingParams(logit_bias=given))
        expected[row, ids] += np.array(list(given.values()), np.float32)
    found = plain(logits, bits_of(allowed), bias, num_devices)
    np.testing.assert_array_equal(found, np.where(allowed, expected, -np.inf))


def test_the_planted_bug_of_bits_by_local_ids_is_found(monkeypatch):
    """Each device would take the bits of the first one's ids."""
    has_bits = adjust.has_bits
    monkeypatch.setattr(adjust, "has_bits", lambda words, first_id, num_ids: has_bits(words, 0, num_ids))

    def planted(num_devices):
        split_over = make_mesh(num_devices) if num_devices > 1 else None

        def run(*given):  # a function of its own, since programs are kept by function
            return adjust.adjust.__wrapped__(*given, split_over=split_over)

        return jax.jit(run), *programs_before(num_devices)[1:]

    programs_before = programs
    monkeypatch.setitem(globals(), "programs", planted)
    test_masks_and_biases(1)
    with pytest.raises(AssertionError):
        test_masks_and_biases(2)


def numpy_scores(logits, params, context_ids, reply_ids):
    """Return the scores of one row by the definition, in float32."""
    counts = np.bincount(np.array(reply_ids, int), minlength=VOCAB_SIZE)
    seen = counts > 0
    seen[context_ids] |= params.repetition_penalty != 1
    repetition = np.float32(params.repetition_penalty)
    scores = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    scores = scores - np.float32(params.frequency_penalty) * counts.astype(np.float32)
    return scores - np.where(counts > 0, np.float32(params.presence_penalty), np.float32(0))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_penalties_count_what_the_turn_has(num_devices):
    """Slots are seeded in several pieces, taken over, continued, and count ids in flight."""
    rng = np.random.default_rng(2)
    settings = [
        PENALIZED,
        SamplingParams(frequency_penalty=-2.0),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(repetition_penalty=0.5),
    ]
    counts, place = new_counts(num_devices), programs(num_devices)[3]
    contexts = [rng.integers(0, VOCAB_SIZE, size).tolist() for size in (3000, 5, 1, 40)]
    replies = [rng.integers(0, 9, size).tolist() for size in (NUM_SEED_IDS + 100, 0, 7, 30)]
    for slot in (2, 1, 3, 0):
        # Another turn had the slot; then this turn's ids come in two calls.
        for words in (
            *seeds(slot, [1, 2, 3], [4, 4], clears=True),
            *seeds(slot, contexts[slot], replies[slot][:-3], clears=True),
            *seeds(slot, [], replies[slot][-3:], clears=False),
        ):
            counts = adjust.seed(counts, jax.device_put(words, place))
    prev_ids = np.array([3, 8, VOCAB_SIZE - 1, 0, 100, 134, 5], np.int32)
    counted, slot_of_row = not_counted(NUM_ROWS), [2, -1, 0, 3, 1, -1]
    for row, slot in enumerate(slot_of_row):
        if slot >= 0:
            counted[:, row] = [slot, (row + 1) if row % 2 == 0 else -1, *penalty_words(settings[slot])]
    for _ in range(2):  # the second time, ids in flight of the first are counted
        for row, slot in enumerate(slot_of_row):
            if slot >= 0 and counted[1, row] >= 0:
                replies[slot].append(int(prev_ids[counted[1, row]]))
        logits = random_logits(rng)
        given = all_ids(), no_bias(NUM_ROWS), counts, counted, prev_ids
        scores, counts = counted_scores(logits, *given, num_devices)
        for row, slot in enumerate(slot_of_row):
            expected = logits[row]
            if slot >= 0:
                expected = numpy_scores(logits[row], settings[slot], contexts[slot], replies[slot])
            np.testing.assert_allclose(scores[row], expected, rtol=2e-6, atol=2e-6)
            if slot < 0:
                np.testing.assert_array_equal(scores[row], logits[row])


def test_a_row_does_not_depend_on_its_batch():
    """The same bits alone and in company, on any row, and on several devices."""
    rng = np.random.default_rng(new_seed())
    logits = np.tile(random_logits(rng)[2], (NUM_ROWS, 1))
    scores = {}
    for num_devices in (1, 2):
        counts = new_counts(num_devices)
        for slot in range(NUM_SLOTS):
            for words in seeds(slot, range(50), [1, 2, 2, slot // 2], clears=True):
                counts = adjust.seed(counts, jax.device_put(words, programs(num_devices)[3]))
        counted = not_counted(NUM_ROWS)
        for row in range(4):
            counted[:, row] = [row, -1, *penalty_words(PENALIZED)]
        prev_ids = np.zeros(NUM_ROWS, np.int32)
        given = all_ids(), no_bias(NUM_ROWS), counts, counted, prev_ids
        scores[num_devices] = counted_scores(logits, *given, num_devices)[0]
    np.testing.assert_array_equal(scores[1], scores[2])
    np.testing.assert_array_equal(scores[1][0], scores[1][1])
    assert (scores[1][1] != scores[1][2]).any()
    np.testing.assert_array_equal(scores[1][4], logits[4])


def test_counts_stop_at_their_largest_number():
    counts = new_counts()
    for start in range(0, MAX_COUNT + 5, NUM_SEED_IDS):
        (words,) = seeds(1, [], [9] * min(NUM_SEED_IDS, MAX_COUNT - 1 - start), clears=start == 0) or [None]
        counts = counts if words is None else adjust.seed(counts, words)
    assert counts.replies[1, 9] == MAX_COUNT - 1
    counted = not_counted(NUM_ROWS)
    counted[:, 0] = [1, 0, *penalty_words(PENALIZED)]
    for _ in range(3):
        given = all_ids(), no_bias(NUM_ROWS), counts, counted, np.full(NUM_ROWS, 9, np.int32)
        _, counts = counted_scores(np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32), *given)
    assert counts.replies[1, 9] == MAX_COUNT
    for words in seeds(1, [], [9, 9], clears=False):
        counts = adjust.seed(counts, words)
    assert counts.replies[1, 9] == MAX_COUNT


def test_seeds_of_a_long_context_are_few():
    """Repeated ids of a context are sent once; without ids there is nothing to send but a clear."""
    assert len(seeds(0, [5] * 10_000, [], clears=True)) == 1
    assert seeds(0, [], [], clears=False) == []
    (words,) = seeds(3, [], [], clears=True)
    assert words[:2].tolist() == [3, 1]
    assert len(seeds(0, range(2000), range(2000), clears=True)) == 4


@pytest.mark.parametrize("has_counts", [False, True])
def test_nothing_is_exchanged(has_counts):
    """Each device changes its own part of the logits; not even words are exchanged."""
    plain_run, counted_run, split, whole = programs(2)
    logits = jax.device_put(np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32), split)
    given = jax.device_put((all_ids(), no_bias(NUM_ROWS)), whole)
    more = ()
    if has_counts:
        more = new_counts(2), *jax.device_put((not_counted(NUM_ROWS), np.zeros(9, np.int32)), whole)
    run = counted_run if has_counts else plain_run
    text = run.func.lower(logits, *given, *more, **run.keywords).compile().as_text()
    assert collectives(text) == {}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_lowers_for_cuda(num_devices):
    """The shapes of a large model: 128 rows, 32,000 ids, and counts for as many turns."""
    shape = jax.ShapeDtypeStruct
    mesh = mesh_of_gpus(num_devices)
    split_over = mesh if num_devices > 1 else None
    logits = shape((128, 32_000), jnp.float32)
    given = logits, shape((128, 1000), jnp.int32), shape((2, 128, 300), jnp.int32)
    counts = Counts(*adjust.counts_shape(128, 32_000))
    more = counts, shape((5, 128), jnp.int32), shape((128,), jnp.int32)
    for run, arguments in ((adjust.adjust, given), (adjust.adjust_counted, (*given, *more))):
        text = lower_for_cuda(functools.partial(run, split_over=split_over), *arguments, mesh=mesh)
        assert "128x" in text
    lower_for_cuda(adjust.seed, counts, shape((2 + NUM_SEED_IDS,), jnp.int32))
