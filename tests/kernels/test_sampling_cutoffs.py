"""Cutoffs of top-k and top-p: both back ends against a sort in numpy, and against each other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sampling_cutoffs import (
    MASS_BITS,
    MAX_VOCAB_SIZE,
    CutoffArgumentError,
    choose_backend,
    cutoffs,
    pallas_triton,
)
from tests.kernels.cross_lower import lower_for_cuda

BACKENDS = ["xla", "pallas_triton"]
SHAPE = jax.ShapeDtypeStruct
# Few threads, reads and pairs, so that short rows take many passes of many reads.
SMALL = {"NUM_WARPS": 1, "UNROLL": 2, "WAYS": 4, "FEW": 16}
KINDS = ["normal", "rounded", "hot", "cold", "few finite", "equal", "unrelated"]


def run(backend, *args, interpret=True):
    constants = tuple(getattr(pallas_triton, name) for name in SMALL)
    return np.asarray(_compiled(backend, interpret, constants)(*args))


@functools.cache
def _compiled(backend, interpret, constants):
    """Return jitted cutoffs; `constants` distinguish programs traced with other constants."""
    return jax.jit(lambda *args: cutoffs(*args, backend=backend, interpret=interpret))


def keys_and_masses(scores):
    """Return keys and masses as the sampler computes them from scores; the best score is 0."""
    bits = np.where(scores == 0, np.float32(0), scores).view(np.uint32)
    keys = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))
    return keys, np.round(np.exp(scores) * np.float32(2**MASS_BITS)).astype(np.uint32)


def make_rows(kind, num_rows, vocab_size, seed):
    """Draw keys and masses u32[S, V] of one kind."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(num_rows, vocab_size), scale=3).astype(np.float32)
    if kind == "unrelated":
        keys = rng.integers(0, 2**32, scores.shape, np.uint32)
        return keys, rng.integers(0, 2**MASS_BITS + 1, scores.shape, np.uint32)
    if kind == "rounded":
        scores = np.round(scores)
    elif kind == "hot":
        scores *= np.float32(1e-4)
    elif kind == "cold":
        scores *= np.float32(1e5)
    elif kind == "few finite":
        scores[rng.random(scores.shape) < 0.99] = -np.inf
        scores[:, 0] = 1
    elif kind == "equal":
        scores[:] = -1
    return keys_and_masses(scores - scores.max(axis=1, keepdims=True))


def cutoff_by_numpy(keys, masses, top_k, top_p):
    """Return one row's cutoff by a sort: the key at which enough ids are kept."""
    order = np.argsort(keys)[::-1]
    keys, masses = keys[order], masses[order]
    last_of_equals = np.searchsorted(-keys.astype(np.int64), -keys.astype(np.int64), side="right") - 1
    cutoff = np.uint32(0)
    if 0 < top_k <= len(keys):
        cutoff = keys[top_k - 1]
    if top_p < 1:
        masses = np.where(keys >= cutoff, masses, 0)
        halves = (masses >> 12, masses & 4095)
        high, low = (np.cumsum(half, dtype=np.uint32).astype(np.float32) for half in halves)
        sums = (high * np.float32(4096) + low)[last_of_equals]
        enough = sums >= max(np.float32(top_p) * sums[-1], np.float32(1))
        cutoff = max(cutoff, keys[enough].max(initial=0))
    return cutoff


def limits(num_rows, vocab_size, seed):
    """Draw top-k and top-p of every size, on and off."""
    rng = np.random.default_rng(seed)
    top_k = rng.choice(
        [0, 0, 1, 2, 17, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1], num_rows
    )
    top_p = rng.choice([0, 1e-9, 0.05, 0.5, 0.9, 0.9999, 1 - 2**-24, 1, 1], num_rows)
    return top_k.astype(np.int32), top_p.astype(np.float32)


def check(backend, keys, masses, top_k, top_p, **kwargs):
    expected = [cutoff_by_numpy(*row) for row in zip(keys, masses, top_k, top_p, strict=True)]
    np.testing.assert_array_equal(run(backend, keys, masses, top_k, top_p, **kwargs), expected)


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(pallas_triton, name, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cutoffs_equal_numpy(backend, kind):
    """Rows need one read or several, as on a GPU."""
    for num_rows, vocab_size in ((24, 700), (8, 9001)):
        check(backend, *make_rows(kind, num_rows, vocab_size, 0), *limits(num_rows, vocab_size, 1))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS))
def test_cutoffs_equal_numpy_in_many_passes(seed, kind):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(pallas_triton, name, value)
        check("pallas_triton", *make_rows(kind, 16, 331, seed), *limits(16, 331, seed + 1))


@pytest.mark.parametrize(
    "vocab_size",
    [1, pytest.param(16, marks=pytest.mark.long), 17, 64, pytest.param(65, marks=pytest.mark.long)],
)
def test_sizes_at_the_edges_of_reads_and_pairs(small, vocab_size):
    check("pallas_triton", *make_rows("rounded", 12, vocab_size, 2), *limits(12, vocab_size, 3))


def test_the_largest_masses_add_up(small):
    """Every mass is 2**24, in more reads than packed sums could hold at once."""
    keys, _ = make_rows("normal", 4, 1500, 4)
    masses = np.full(keys.shape, 2**MASS_BITS, np.uint32)
    check("pallas_triton", keys, masses, np.zeros(4, np.int32), np.array([0.3, 0.5, 0.999, 0], np.float32))


def test_without_mass_only_top_k_cuts(small):
    keys, masses = make_rows("normal", 3, 300, 5)
    top_k, top_p = np.array([0, 5, 200], np.int32), np.full(3, 0.5, np.float32)
    for backend in BACKENDS:
        check(backend, keys, np.zeros_like(masses), top_k, top_p)


def test_several_devices_search_the_same_rows(small):
    """Rows are replicated over a mesh, inside `shard_map`."""
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    call = functools.partial(cutoffs, backend="pallas_triton", interpret=True)
    whole = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    args = (*make_rows("normal", 6, 200, 6), *limits(6, 200, 7))
    np.testing.assert_array_equal(jax.jit(sharded)(*args), run("xla", *args))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 512), (7, 32000), (180, 50272), (16, 128256)])
def test_on_a_gpu(num_rows, vocab_size, kind):
    for seed in range(4):
        args = (*make_rows(kind, num_rows, vocab_size, seed), *limits(num_rows, vocab_size, seed + 100))
        expected = run("xla", *args, interpret=False)
        np.testing.assert_array_equal(run("pallas_triton", *args, interpret=False), expected)


@pytest.mark.gpu
def test_the_largest_vocabulary_on_a_gpu():
    args = (
        *make_rows("normal", 3, MAX_VOCAB_SIZE, 8),
        np.array([0, 40, 9999], np.int32),
        np.full(3, 0.9, "f"),
    )
    for backend in BACKENDS:
        check(backend, *args, interpret=False)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 101), (128, 32000), (180, 128256), (4096, MAX_VOCAB_SIZE)]
)
def test_lowers_for_cuda(num_rows, vocab_size):
    """There is one kernel, which works in place on keys and masses."""
    matrix = SHAPE((num_rows, vocab_size), jnp.uint32)
    rows = SHAPE((num_rows,), jnp.int32), SHAPE((num_rows,), jnp.float32)
    text = lower_for_cuda(functools.partial(cutoffs, backend="pallas_triton"), matrix, matrix, *rows)
    assert text.count("xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 2


def test_the_back_end_is_chosen_by_device(monkeypatch):
    device = jax.devices("cpu")[0]
    assert choose_backend(device) == "xla"
    monkeypatch.setattr("pallas_kernels.sampling_cutoffs.api.triton_device_limit", lambda device: None)
    assert choose_backend(device) == "pallas_triton"


def test_what_does_not_fit_is_named():
    keys, top_k, top_p = jnp.zeros((2, 8), jnp.uint32), jnp.zeros(2, jnp.int32), jnp.zeros(2)
    with pytest.raises(
        CutoffArgumentError, match=r"keys are \(2, 524289\), but must be .* V from 1 to 524288"
    ):
        jax.eval_shape(cutoffs, SHAPE((2, MAX_VOCAB_SIZE + 1), jnp.uint32), keys, top_k, top_p)
    with pytest.raises(CutoffArgumentError, match=r"keys are int32\[2, 8\], but must be uint32\[2, 8\]"):
        cutoffs(keys.astype(jnp.int32), keys, top_k, top_p)
    with pytest.raises(CutoffArgumentError, match=r"masses are uint32\[2, 7\], but must be uint32\[2, 8\]"):
        cutoffs(keys, keys[:, 1:], top_k, top_p)
    with pytest.raises(CutoffArgumentError, match=r"top_k are .* but must be int32\[2\]"):
        cutoffs(keys, keys, top_p, top_p)
    with pytest.raises(CutoffArgumentError, match=r"top_p are .* but must be float32\[2\]"):
        cutoffs(keys, keys, top_k, top_k)
    with pytest.raises(CutoffArgumentError, match="backend is 'cuda'"):
        cutoffs(keys, keys, top_k, top_p, backend="cuda")
