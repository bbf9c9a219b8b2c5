"""The sampler against numpy and against `jax.random`, and its independence of the rest of the batch."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams, plan_columns
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.choose import choose
from pensieve_jax.decoding.sampling_rows import SamplerMode, SamplingRows
from tests.kernels.cross_lower import lower_for_cuda
from tests.launching import optimized
from tests.seeds import new_seed

VOCAB_SIZE = 101
NUM_TOP = 5
NUM_ROWS = 64  # shared by most tests, so that few shapes are compiled
EVERYTHING = SamplerMode(draws=True, truncates=True, top_logprobs=True)


@functools.cache
def _compiled(num_top, mode):
    return jax.jit(functools.partial(sampler.sample, num_top=num_top, mode=mode))


_truncated = jax.jit(functools.partial(sampler._truncate, backend="xla"))


def run(logits, rows, mode=EVERYTHING, num_top=NUM_TOP, scores=None):
    """Return samples as numpy arrays; `scores` are the logits unless given."""
    logits = np.asarray(logits, np.float32)
    scores = logits if scores is None else np.asarray(scores, np.float32)
    return jax.tree.map(np.asarray, _compiled(num_top, mode)(logits, scores, rows))


def make_rows(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0, banned=()):
    """Return rows of one setting; `seeds` and `positions` may be arrays."""
    seeds = np.broadcast_to(np.asarray(seeds, np.uint64), num_rows)
    banned_ids = np.full((num_rows, 4), -1, np.int32)
    banned_ids[:, : len(banned)] = banned
    return SamplingRows(
        temperature=np.broadcast_to(np.float32(temperature), num_rows).copy(),
        top_k=np.broadcast_to(np.int32(top_k), num_rows).copy(),
        top_p=np.broadcast_to(np.float32(top_p), num_rows).copy(),
        min_p=np.broadcast_to(np.float32(min_p), num_rows).copy(),
        seed=np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], axis=1).astype(np.uint32),
        sample_positions=np.broadcast_to(np.asarray(positions, np.int32), num_rows).copy(),
        banned_ids=banned_ids,
    )


def random_logits(num_rows, seed=0, vocab_size=VOCAB_SIZE, scale=3.0):
    return np.random.default_rng(seed).normal(size=(num_rows, vocab_size), scale=scale).astype(np.float32)


def kept_by_numpy(logits, temperature, top_k, top_p):
    """Return bool[V] and f64[V]: the ids that survive both cuts, and their probabilities."""
    scores = logits.astype(np.float64) / temperature
    kept = np.ones(len(scores), bool)
    if 0 < top_k < len(scores):
        kept &= scores >= np.sort(scores)[-top_k]
    probs = np.where(kept, np.exp(scores - scores.max()), 0)
    probs /= probs.sum()
    if top_p < 1:
        above = np.array([probs[scores > score].sum() for score in scores])
        kept &= (above < top_p) | (scores == scores.max())
    probs = np.where(kept, probs, 0)
    return kept, probs / probs.sum()


def chi_square(token_ids, probs):
    """Return the statistic and its degrees of freedom, with cells of at least 5 expected draws."""
    expected = probs * len(token_ids)
    observed = np.bincount(token_ids, minlength=len(probs))
    large = expected >= 5
    cells = [(observed[large], expected[large]), (observed[~large].sum(), expected[~large].sum())]
    return sum(((o - e) ** 2 / np.maximum(e, 1e-9)).sum() for o, e in cells), large.sum()


def test_noise_equals_jax_random():
    """Seed, position and token id go through the same hash as a `threefry2x32` key."""
    seed, position = 0x1234567_89ABCDEF, 77
    key = jax.random.wrap_key_data(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32")
    with jax.threefry_partitionable(True):
        bits = np.asarray(jax.random.bits(jax.random.fold_in(key, position), (VOCAB_SIZE,)))
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), 1 - 2.0**-24)
    rows = make_rows(1, seeds=seed, positions=position)
    noise = np.asarray(sampler._gumbel(rows.seed, rows.sample_positions, VOCAB_SIZE))[0]
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-uniform.astype(np.float64))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 7, 1.0), (1.5, 0, 0.8), (1.0, 20, 0.9)]
)
def test_distribution(temperature, top_k, top_p):
    """20,000 fixed seeds follow the softmax of what the cuts leave."""
    logits = random_logits(1, seed=3, vocab_size=40)[0]
    num_rows = 20_000
    rows = make_rows(
        num_rows, temperature=temperature, top_k=top_k, top_p=top_p, seeds=np.arange(num_rows), positions=9
    )
    with optimized():
        token_ids = run(np.tile(logits, (num_rows, 1)), rows).token_ids
    kept, probs = kept_by_numpy(logits, temperature, top_k, top_p)
    assert kept[token_ids].all()
    statistic, freedom = chi_square(token_ids, probs)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.long
def test_positions_are_independent_draws():
    """One seed over many positions is as good as many seeds; so are seeds that differ in the high word."""
    logits = random_logits(1, seed=4, vocab_size=40)[0]
    num_rows = 20_000
    tiled = np.tile(logits, (num_rows, 1))
    probs = kept_by_numpy(logits, 1.0, 0, 1.0)[1]
    by_position = run(tiled, make_rows(num_rows, seeds=5, positions=np.arange(num_rows))).token_ids
    by_high_word = run(tiled, make_rows(num_rows, seeds=np.arange(num_rows, dtype=np.uint64) << 32)).token_ids
    for token_ids in (by_position, by_high_word):
        statistic, freedom = chi_square(token_ids, probs)
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    pairs = np.mean(by_position[1:] == by_position[:-1])
    assert abs(pairs - (probs**2).sum()) < 0.02


@pytest.mark.parametrize("num_rows", [1, 37])
def test_a_row_is_independent_of_its_batch(num_rows):
    """A row's id does not depend on its index, other rows, the padding or the mode of the batch."""
    logits = random_logits(NUM_ROWS, seed=5)
    rng = np.random.default_rng(6)
    rows = make_rows(
        NUM_ROWS, temperature=rng.choice([0.0, 0.7, 1.3], NUM_ROWS), top_k=rng.choice([0, 1, 9], NUM_ROWS),
        top_p=rng.choice([0.3, 0.9, 1.0], NUM_ROWS), seeds=rng.integers(0, 2**63, NUM_ROWS),
        positions=rng.integers(0, 4096, NUM_ROWS),
    )  # fmt: skip
    expected = run(logits, rows).token_ids
    order = rng.permutation(NUM_ROWS)[:num_rows]
    subset = jax.tree.map(lambda leaf: leaf[order], rows)
    np.testing.assert_array_equal(run(logits[order], subset).token_ids, expected[order])
    draws_only = order[(rows.top_k[order] == 0) & (rows.top_p[order] == 1)]
    subset = jax.tree.map(lambda leaf: leaf[draws_only], rows)
    mode = SamplerMode(draws=True, truncates=False, top_logprobs=False)
    np.testing.assert_array_equal(run(logits[draws_only], subset, mode).token_ids, expected[draws_only])


def test_ids_are_independent_of_sharding():
    """A vocabulary sharded over two devices gives the same ids and log-probabilities."""
    logits = random_logits(16, seed=7, vocab_size=128)
    rows = make_rows(16, temperature=0.9, top_k=30, top_p=0.9, seeds=np.arange(16), positions=3, banned=(5,))
    expected = run(logits, rows)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tp")))
    replicated = jax.device_put(rows, NamedSharding(mesh, PartitionSpec()))
    found = _compiled(NUM_TOP, EVERYTHING)(sharded, sharded, replicated)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "logits_spec",
    [None, PartitionSpec(), PartitionSpec(None, "tp")],
    ids=["one device", "whole on two", "split over two"],
)
def test_the_kernel_gives_the_same_ids(monkeypatch, logits_spec):
    """The kernel and XLA find the cutoffs, also with logits on two devices that each search all rows."""
    logits = random_logits(16, seed=7, vocab_size=128)
    rows = make_rows(
        16, temperature=np.tile([0.9, 0.9, 0.9, 0.0], 4), top_k=np.tile([0, 30], 8),
        top_p=np.tile([0.9, 0.9, 1.0, 0.5], 4), seeds=np.arange(16), banned=(5,),
    )  # fmt: skip
    expected = run(logits, rows)
    monkeypatch.setattr(sampler, "cutoffs", functools.partial(sampler.cutoffs, interpret=True))
    kernel = {"cutoff_backend": "pallas_triton"}
    sample = jax.jit(functools.partial(sampler.sample, num_top=NUM_TOP, mode=EVERYTHING, **kernel))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    placed = logits, rows
    if logits_spec is not None:
        placed = jax.device_put(
            placed, (NamedSharding(mesh, logits_spec), NamedSharding(mesh, PartitionSpec()))
        )
    found = sample(placed[0], *placed)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)


@pytest.mark.parametrize("mode", sampler.all_modes(), ids=str)
@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
def test_lowers_for_cuda(backend, mode):
    """Only a mode that truncates has the kernel, and only if a step is told to use it."""
    logits, rows = random_logits(4), make_rows(4)
    statics = {"mode": mode, "num_top": NUM_TOP, "max_num_samples": 4, "cutoff_backend": backend}
    text = lower_for_cuda(functools.partial(choose, **statics), logits, logits, rows)
    assert text.count("xla.gpu.triton") == (mode.truncates and backend == "pallas_triton")


@pytest.mark.parametrize("mode", sampler.all_modes(), ids=str)
def test_scores_choose_and_logits_have_the_probabilities(mode):
    """Ids depend on the scores alone, log-probabilities and the most likely ids on the logits."""
    logits, scores = random_logits(NUM_ROWS, seed=8), random_logits(NUM_ROWS, seed=9)
    scores[:, ::3] = -np.inf
    rows = make_rows(
        NUM_ROWS,
        temperature=np.tile([0.0, 0.8], NUM_ROWS // 2),
        top_k=20,
        top_p=0.9,
        seeds=np.arange(NUM_ROWS),
    )
    found, by_scores = run(logits, rows, mode, scores=scores), run(scores, rows, mode)
    np.testing.assert_array_equal(found.token_ids, by_scores.token_ids)
    assert (found.token_ids % 3 != 0).all()
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    chosen = np.take_along_axis(expected, found.token_ids[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, chosen, rtol=1e-6, atol=1e-6)
    if mode.top_logprobs:
        np.testing.assert_array_equal(found.top_ids, run(logits, rows, mode).top_ids)


def test_the_planted_bug_of_log_probabilities_of_masked_logits_is_found(monkeypatch):
    sample = sampler.sample

    def planted(logits, scores, *args, **kwargs):
        return sample(scores, scores, *args, **kwargs)

    monkeypatch.setattr(sampler, "sample", planted)
    monkeypatch.setitem(globals(), "_compiled", _compiled.__wrapped__)
    with pytest.raises(AssertionError):
        test_scores_choose_and_logits_have_the_probabilities(SamplerMode())


@pytest.mark.parametrize("count", [1, 16, 17, 20, 40])
def test_the_most_likely_are_those_of_one_sort(count):
    """With ties, also at the end of a piece, and with fewer possible ids than are asked for."""
    logits = np.round(random_logits(NUM_ROWS, seed=13))
    logits[1] = 0.0
    logits[2, 5:] = -np.inf
    logits[3] = -np.inf
    logits[4, ::2] = np.finfo(np.float32).max
    found = jax.jit(functools.partial(sampler.most_likely, count=count))(logits)
    expected = jax.lax.top_k(logits, count)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_scores_come_back_from_their_keys():
    scores = np.array([0, -2e-38, -1e-30, -0.5, -17, -3e38, -np.inf], np.float32)
    back = sampler._scores_of(sampler._ordered_keys(jnp.asarray(scores)))
    np.testing.assert_array_equal(back, scores)
    assert np.isnan(sampler._scores_of(jnp.zeros(1, jnp.uint32)))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 50.0, 1e4]),
    top_k=st.sampled_from([0, 1, 2, 17, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.95, 0.9999, 1.0]),
    ties=st.booleans(),
)
def test_cuts_keep_what_numpy_keeps(seed, temperature, top_k, top_p, ties):
    """Compares the ids left by both cuts, with and without ties."""
    logits = random_logits(1, seed=seed)
    if ties:
        logits = np.round(logits)
    scores = (logits - logits.max()) / np.float32(temperature)
    cuts = np.array([top_k], np.int32), np.array([top_p], np.float32)
    found = np.asarray(_truncated(scores, *cuts))[0]
    kept = kept_by_numpy(scores[0], 1.0, top_k, np.float32(top_p))[0]
    # Fixed-point masses and numpy's may fall on different sides of top_p, within rounding of the edge.
    near_edge = kept_by_numpy(scores[0], 1.0, top_k, top_p + 1e-4)[0]
    near_edge &= ~kept_by_numpy(scores[0], 1.0, top_k, top_p - 1e-4)[0]
    agree = (found > -np.inf) == kept
    assert (agree | near_edge).all()
    assert found.max() == 0
    if top_k in (1, 2, 17) and top_p == 1.0 and not ties:
        assert (found > -np.inf).sum() == top_k


@functools.cache
def _compiled_possible(mode):
    return jax.jit(functools.partial(sampler.possible_choices, mode=mode))


def possible_ids(logits, rows, margin, mode=EVERYTHING):
    """Return bool[S, V] as a numpy array."""
    return np.asarray(_compiled_possible(mode)(logits, rows, margin=np.float32(margin)))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 17, VOCAB_SIZE]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    margin=st.sampled_from([1e-3, 0.15, 1.0]),
)
def test_choices_of_slightly_different_logits_are_possible(seed, temperature, top_k, top_p, min_p, margin):
    """Logits differ by at most the margin; the choice itself is always possible, most other ids are not."""
    logits = random_logits(NUM_ROWS, seed=seed)
    rows = make_rows(
        NUM_ROWS,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=np.arange(NUM_ROWS) + seed,
        banned=(5,),
    )
    possible = possible_ids(logits, rows, margin)
    noise = np.random.default_rng(seed).uniform(-margin / 2, margin / 2, (4, *logits.shape))
    for off in (*(0.999 * noise), np.sign(noise[0]) * 0.499 * margin):
        chosen = run((logits + off).astype(np.float32), rows).token_ids
        assert possible[np.arange(NUM_ROWS), chosen].all()
    assert not possible[:, 5].any()
    anything = possible_ids(logits, rows, np.inf)
    assert not anything[:, 5].any()
    if margin == 1e-3 and temperature < 1:
        assert possible.sum(axis=1).mean() < 1.05


FEW_IDS = 6
CORNERS = np.array(list(itertools.product((-0.499, 0.499), repeat=FEW_IDS)), np.float32)


def few_rows(rng, num_rows, margin):
    """Return rows of few ids that are close to their cuts and to each other, some of them equal."""
    temperature = rng.choice([0.1, 0.5, 1.0, 5.0], num_rows)
    scores = rng.choice([0.0, 0.5, 1.0, 2.0], (num_rows, FEW_IDS))
    scores += rng.choice([0.0, 0.4, 0.9], scores.shape) * (margin / temperature)[:, None]
    logits = (scores * temperature[:, None]).astype(np.float32)
    masses = -np.sort(-np.exp(scores), axis=1)
    edges = np.cumsum(masses, axis=1) / masses.sum(axis=1, keepdims=True)
    top_p = edges[np.arange(num_rows), rng.integers(0, FEW_IDS, num_rows)]
    top_p = np.clip(top_p + rng.choice([-0.01, -1e-4, 1e-4, 0.01], num_rows), 1e-6, 1.0)
    rows = make_rows(num_rows, seeds=rng.integers(0, 2**63, num_rows))
    return logits, rows._replace(
        temperature=temperature.astype(np.float32),
        top_k=rng.choice([0, 1, 2, 3], num_rows).astype(np.int32),
        top_p=np.where(rng.random(num_rows) < 0.8, top_p, 1.0).astype(np.float32),
        min_p=np.where(rng.random(num_rows) < 0.5, _min_p(rng, scores, margin / temperature), 0).astype(
            np.float32
        ),
    )


def _min_p(rng, scores, margins):
    """Return shares of the most likely id's probability, close to that of another id."""
    edge = scores[np.arange(len(scores)), rng.integers(0, FEW_IDS, len(scores))] - scores.max(axis=1)
    return np.exp(np.minimum(edge + rng.choice([-0.9, 0.0, 0.9], len(scores)) * margins, 0))


@pytest.mark.parametrize(("margin", "most"), [(1e-3, 1.5), (0.1, 1.6)])
def test_all_choices_of_logits_within_the_margin_are_possible(margin, most):
    """Covers every corner, and rounding to a grid with ties; hardly any other id is possible."""
    rng = np.random.default_rng(new_seed())
    num_possible = num_chosen = 0
    for _ in range(12):
        logits, rows = few_rows(rng, NUM_ROWS, margin)
        possible = possible_ids(logits, rows, margin)
        grids = [np.round(logits / step) * step for step in (0.99 * margin, 0.3 * margin)]
        off = np.concatenate([logits + margin * CORNERS[:, None], grids, logits[None]]).astype(np.float32)
        many = SamplingRows(*(np.tile(field, (len(off), *[1] * (field.ndim - 1))) for field in rows))
        chosen = run(off.reshape(-1, FEW_IDS), many, num_top=1).token_ids.reshape(len(off), NUM_ROWS)
        is_chosen = np.zeros_like(possible)
        is_chosen[np.arange(NUM_ROWS), chosen] = True
        wrong = np.flatnonzero((is_chosen & ~possible).any(axis=1))
        assert not len(wrong), [field[wrong[0]] for field in (logits, *rows)]
        num_possible += possible.sum()
        num_chosen += is_chosen.sum()
    assert num_possible < most * num_chosen


@pytest.mark.parametrize(
    ("probs", "temperature", "top_k", "top_p", "margin", "num_possible"),
    [
        ([0.5, 0.3, 0.1, 0.1], 1.0, 0, 0.7, 1e-3, 1),  # two stay, far from the cut: the choice and no other
        ([0.5, 0.3, 0.1, 0.1], 1.0, 2, 1.0, 1e-3, 1),
        ([0.76, 0.24], 0.1, 0, 0.75, 0.01, 2),  # odds of 3.17 and 3: the temperature brings them closer
        ([0.76, 0.24], 0.1, 0, 0.75, 0.004, 1),
        ([0.76, 0.24], 1.0, 0, 0.75, 0.01, 1),
        ([1.0], 1.0, 3, 0.5, 0.01, 1),
    ],
)
def test_possible_ids_by_hand(probs, temperature, top_k, top_p, margin, num_possible):
    logits = np.tile((temperature * np.log(probs)).astype(np.float32), (NUM_ROWS, 1))
    rows = make_rows(NUM_ROWS, temperature=temperature, top_k=top_k, top_p=top_p, seeds=np.arange(NUM_ROWS))
    possible = possible_ids(logits, rows, margin)
    assert possible.sum(axis=1).max() == num_possible
    chosen = run(logits, rows, num_top=1).token_ids
    assert possible[np.arange(NUM_ROWS), chosen].all()


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_no_more_than_the_margin_apart(temperature):
    """For a greedy row the logits count, for a random one the logits with their noise."""
    free = make_rows(NUM_ROWS, temperature=temperature, seeds=np.arange(NUM_ROWS))
    mode = SamplerMode(draws=temperature > 0, truncates=False, top_logprobs=False)
    scale = temperature or 1.0
    noise = np.asarray(sampler.decision_scores(jnp.zeros((NUM_ROWS, 2)), free, mode=mode))
    for apart, is_possible in ((0.9, True), (1.1, False)):
        logits = -scale * noise  # so that both are equal
        logits[:, 1] -= apart * 0.01
        possible = possible_ids(logits, free, 0.01, mode)
        assert possible[:, 0].all() and (possible[:, 1] == is_possible).all()


def test_an_id_near_the_cut_is_possible_and_one_far_below_is_not():
    """This holds although the best id is ahead of it by 1.1, which exceeds the margin of either."""
    logits = np.full((NUM_ROWS, VOCAB_SIZE), -50.0, np.float32)
    logits[:, :2] = np.log([0.7503, 0.2497])
    for top_p, is_possible in ((0.75, True), (0.74, False)):
        rows = make_rows(NUM_ROWS, top_p=top_p, seeds=np.arange(NUM_ROWS))
        assert (run(logits, rows).token_ids == 0).all()
        possible = possible_ids(logits, rows, 0.01)
        assert possible[:, 0].all() and not possible[:, 2:].any()
        assert possible[:, 1].any() == is_possible
    free = make_rows(NUM_ROWS, seeds=np.arange(NUM_ROWS))
    chosen = run(logits, free).token_ids
    wanted = make_rows(NUM_ROWS, top_p=0.75, seeds=np.arange(NUM_ROWS))
    possible = possible_ids(logits, wanted, 0.01)
    assert set(chosen) == {0, 1} and possible[np.arange(NUM_ROWS), chosen].all()


@pytest.mark.parametrize("top_k", [0, 5])
def test_min_p_keeps_what_is_likely_enough(top_k):
    """Of the ids that are left, top-k and top-p keep what they keep without it; greedy rows ignore it."""
    logits = random_logits(1, seed=11)
    probs = np.exp(logits[0].astype(np.float64))
    likely = np.flatnonzero(probs >= 0.05 * probs.max())
    assert 5 < len(likely) < 20
    rows = make_rows(4 * NUM_ROWS, temperature=1.0, top_k=top_k, min_p=0.05, seeds=np.arange(4 * NUM_ROWS))
    chosen = run(np.tile(logits, (4 * NUM_ROWS, 1)), rows).token_ids
    assert set(chosen) <= set(likely)
    assert len(set(chosen)) == top_k or (not top_k and len(set(chosen)) > 5)
    for mode in sampler.all_modes():
        same = make_rows(NUM_ROWS, temperature=np.tile([0.0, 0.7], NUM_ROWS // 2), seeds=np.arange(NUM_ROWS))
        cut = same._replace(min_p=np.where(same.temperature > 0, 0, 0.9).astype(np.float32))
        many = random_logits(NUM_ROWS, seed=12)
        np.testing.assert_array_equal(run(many, cut, mode).token_ids, run(many, same, mode).token_ids)


def test_min_p_cuts_before_top_p():
    """Probabilities 0.4, 0.3, 0.2, 0.1: of the first two, which min-p leaves, top-p of 0.5 keeps one."""
    logits = np.tile(np.log(np.float32([0.4, 0.3, 0.2, 0.1])), (NUM_ROWS, 1))
    for min_p, expected in ((0.0, {0, 1}), (0.7, {0})):
        rows = make_rows(NUM_ROWS, top_p=0.5, min_p=min_p, seeds=np.arange(NUM_ROWS))
        assert set(run(logits, rows, num_top=1).token_ids) == expected


def values_of(name):
    """Values that the field of a column takes and that are not those of `make_rows`."""
    for value in (0.125, 1, 2):
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError:
            continue
        yield value


@pytest.mark.parametrize("name", plan_columns())
def test_every_column_of_the_table_changes_what_is_chosen(name):
    """A row of the table whose column no sampler reads would be accepted without effect."""
    logits, rows = random_logits(NUM_ROWS), make_rows(NUM_ROWS, seeds=np.arange(NUM_ROWS))
    plain = run(logits, rows).token_ids
    dtype = np.dtype(plan_columns()[name].dtype)
    changed = (rows._replace(**{name: np.full(NUM_ROWS, value, dtype)}) for value in values_of(name))
    assert any((run(logits, other).token_ids != plain).any() for other in changed)


def test_greedy_takes_the_first_of_equals():
    """Ties go to the lowest id, with and without the code for random choice."""
    logits = np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32)
    logits[1, [20, 40]] = 2.0
    logits[2, [7, 99]] = 3.0
    for mode in sampler.all_modes():
        found = run(logits, make_rows(NUM_ROWS, temperature=0.0, banned=(7,)), mode)
        assert found.token_ids[:3].tolist() == [0, 20, 99]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 0.8])
def test_banned_ids_are_never_sampled(temperature):
    """The four best ids are banned; padding (-1) bans nothing, in particular not the last id."""
    logits = np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32)
    logits[:, :4] = 20.0
    logits[:, VOCAB_SIZE - 1] = 15.0
    rows = make_rows(NUM_ROWS, temperature=temperature, seeds=np.arange(NUM_ROWS), banned=(0, 1, 2, 3))
    found = run(logits, rows)
    assert found.token_ids.min() >= 4
    assert (found.token_ids == VOCAB_SIZE - 1).mean() > 0.9
    rows = make_rows(NUM_ROWS, temperature=temperature, seeds=np.arange(NUM_ROWS), banned=(0, 1, 2))
    assert (run(logits, rows).token_ids == 3).mean() > 0.9


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1e-6, 0, 1), (1, 1, 1), (1, 0, 1e-9), (1, 0, 0)]
)
def test_extremes_are_greedy(temperature, top_k, top_p):
    """The smallest temperature, one id, and the smallest mass all leave the most likely id."""
    logits = random_logits(NUM_ROWS, seed=8, scale=1e3)
    rows = make_rows(NUM_ROWS, temperature=temperature, top_k=top_k, top_p=top_p, seeds=np.arange(NUM_ROWS))
    np.testing.assert_array_equal(run(logits, rows).token_ids, logits.argmax(axis=1))


def test_infinite_logits_stay_finite():
    """Minus infinity on every id but one is a certain choice, not a NaN."""
    logits = np.full((NUM_ROWS, VOCAB_SIZE), -np.inf, np.float32)
    logits[:, 13] = 1.0
    found = run(logits, make_rows(NUM_ROWS, temperature=np.tile([0, 1e-6, 1, 1e4], 16), top_k=5, top_p=0.5))
    assert found.token_ids.tolist() == [13] * NUM_ROWS
    np.testing.assert_array_equal(found.logprobs, np.zeros(NUM_ROWS))


def test_logprobs_are_those_of_the_raw_distribution():
    """Neither temperature, nor cuts, nor bans change the log-probabilities reported."""
    logits = random_logits(NUM_ROWS, seed=9)
    reference = logits.astype(np.float64)
    reference = reference - np.log(np.exp(reference).sum(axis=1, keepdims=True))
    rows = make_rows(
        NUM_ROWS, temperature=2.0, top_k=50, top_p=0.95, seeds=np.arange(NUM_ROWS), banned=(1, 2)
    )
    for mode in (EVERYTHING, EVERYTHING._replace(top_logprobs=False)):
        found = run(logits, rows, mode)
        np.testing.assert_allclose(found.logprobs, reference[np.arange(NUM_ROWS), found.token_ids], atol=1e-5)
    found = run(logits, rows)
    order = np.argsort(-reference, axis=1)[:, :NUM_TOP]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(reference, order, axis=1), atol=1e-5)


def test_modes():
    """Six modes; cuts without a draw are the greedy mode."""
    assert len(set(sampler.all_modes())) == 6
    assert {sampler.mode_for(*needs) for needs in np.ndindex(2, 2, 2)} <= set(sampler.all_modes())
