"""Attention over a ring against dense attention, at every column where the ring can begin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import DenseAttention, make_mesh, preset
from model_defs.attention import Attention
from pensieve_jax.rebatching.device import programs
from pensieve_jax.rebatching.device.attention import RingAttention
from pensieve_jax.rebatching.device.ring_state import RingState, RingStorage
from pensieve_jax.rebatching.ring_shapes import RingShape

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 8
GARBAGE = 1e4


def ring_of(rows: list[tuple[np.ndarray, np.ndarray]], last: int, *, has_holes: bool = False) -> RingState:
    """Return a ring of rows [n, K, D] that end in column `last`; the rest has large numbers."""
    shape = (len(rows), KV_HEADS, LENGTH, HEAD_DIM)
    pools = [np.full(shape, GARBAGE, np.float32) for _ in range(2)]
    valid = np.zeros((len(rows), LENGTH), bool)
    for row, parts in enumerate(rows):
        places = (last + 1 - len(parts[0]) + np.arange(len(parts[0]))) % LENGTH
        for pool, part in zip(pools, parts, strict=True):
            pool[row][:, places] = part.swapaxes(0, 1)
        valid[row, places] = True
    keys, values = ([jnp.asarray(pool)] for pool in pools)
    return RingState(keys, values, jnp.asarray(valid) if has_holes else None)


def tokens(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw queries, keys and values of a sequence."""
    draw = rng.standard_normal
    return (
        draw((num, HEADS, HEAD_DIM)).astype(np.float32),
        draw((num, KV_HEADS, HEAD_DIM)).astype(np.float32),
        draw((num, KV_HEADS, HEAD_DIM)).astype(np.float32),
    )


def dense(attention: Attention, sequence: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return f32[n, H, D], the dense attention of every token of a sequence."""
    return np.asarray(attention(0, *map(jnp.asarray, sequence)))


@pytest.mark.parametrize("place", range(LENGTH))
def test_a_step_attends_as_a_dense_model(place):
    """The rows have all lengths, one as long as the ring, and one row is free."""
    rng = np.random.default_rng(place)
    lens = [1, 3, LENGTH]
    sequences = [tokens(rng, num) for num in lens]
    state = ring_of(
        [(k[:-1], v[:-1]) for _, k, v in sequences] + [(np.zeros((0, KV_HEADS, HEAD_DIM)),) * 2], place - 1
    )
    nobody = tokens(rng, 1)
    q, k, v = (np.stack([one[part][-1] for one in [*sequences, nobody]]) for part in range(3))
    attention = RingAttention(state, jnp.int32(place), jnp.int32(1), jnp.asarray([*lens, 1], jnp.int32))
    out = np.asarray(attention(0, jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)))
    for row, sequence in enumerate(sequences):
        np.testing.assert_allclose(out[row], dense(DenseAttention(), sequence)[-1], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(attention.state.keys[0][row][:, place], sequence[1][-1])
    np.testing.assert_allclose(out[3], np.repeat(nobody[2][0], HEADS // KV_HEADS, 0), rtol=1e-5)


@pytest.mark.parametrize("place", range(LENGTH))
@pytest.mark.parametrize(
    ("num_new", "num_queries"), [(2, 2), pytest.param(2, 8, marks=pytest.mark.long), (5, 8)]
)
def test_a_shaped_step_attends_as_a_dense_model(place, num_new, num_queries, monkeypatch):
    """One row takes a prompt, in blocks of queries; the other takes a token, and its rest is empty."""
    monkeypatch.setattr("pensieve_jax.rebatching.device.attention._BLOCK", 4)
    rng = np.random.default_rng(place)
    old, new = tokens(rng, 4), tokens(rng, num_new)
    nothing = np.zeros((0, KV_HEADS, HEAD_DIM), np.float32)
    state = ring_of([(old[1][:-1], old[2][:-1]), (nothing, nothing)], place - 1, has_holes=True)
    places = (place + np.arange(num_new)) % LENGTH
    valid = np.array(state.valid)
    valid[0, places] = [True] + [False] * (num_new - 1)
    valid[1] = False
    valid[1, places] = True
    state = state._replace(valid=jnp.asarray(valid))
    parts = []
    for part in range(3):
        padded = rng.standard_normal((2, num_queries, *old[part].shape[1:])).astype(np.float32)
        padded[0, 0], padded[1, :num_new] = old[part][-1], new[part]
        parts.append(jnp.asarray(padded.reshape(-1, *old[part].shape[1:])))
    num_columns = jnp.asarray([3 + num_new, num_new], jnp.int32)
    attention = RingAttention(state, jnp.int32(place), jnp.int32(num_new), num_columns)
    before = np.array(state.keys[0])
    out = np.asarray(attention(0, *parts)).reshape(2, num_queries, HEADS, HEAD_DIM)
    np.testing.assert_allclose(out[0, 0], dense(DenseAttention(), old)[-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[1, :num_new], dense(DenseAttention(), new), rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()
    others = np.setdiff1d(np.arange(LENGTH), places)
    np.testing.assert_array_equal(np.array(attention.state.keys[0])[:, :, others], before[:, :, others])


@pytest.mark.parametrize("place", [0, 5, 9, LENGTH - 1])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_only_the_tokens_of_an_inserted_row_are_valid(place, num_tokens):
    """Its row is longer, and padded; the ring's old content is gone, and other rows are unchanged."""
    rng = np.random.default_rng(place)
    _, keys, values = tokens(rng, num_tokens)
    state = ring_of([(keys, values), (np.zeros((0, KV_HEADS, HEAD_DIM)),) * 2], place, has_holes=True)
    state = state._replace(valid=state.valid.at[1].set(True))
    before = np.array(state.valid)
    row = np.full((1, 2, KV_HEADS, 6, HEAD_DIM), GARBAGE, np.float32)
    row[0, 0, :, :num_tokens], row[0, 1, :, :num_tokens] = keys.swapaxes(0, 1), values.swapaxes(0, 1)
    where = jnp.asarray([1, place, num_tokens, 0, 7], jnp.int32)
    new, ids = programs.insert(
        state, jnp.zeros(2, jnp.int32), jnp.asarray(row), jnp.zeros(2, jnp.int32), where
    )
    places = (place + np.arange(num_tokens)) % LENGTH
    assert np.flatnonzero(new.valid[1]).tolist() == sorted(places.tolist())
    np.testing.assert_array_equal(new.valid[0], before[0])
    np.testing.assert_array_equal(np.array(new.keys[0])[1][:, places], keys.swapaxes(0, 1))
    np.testing.assert_array_equal(np.array(new.values[0])[1][:, places], values.swapaxes(0, 1))
    assert ids.tolist() == [0, 7]


@pytest.mark.parametrize("name", ["decode", "insert"])
def test_the_ring_is_updated_in_place(name):
    """A copy of it would take as long as the step, and as much memory."""
    model = preset("llama-tiny")
    storage = RingStorage(model, jnp.dtype(jnp.float32), make_mesh(1), has_holes=False)
    shape = RingShape(4, 4096)
    ring, ids = storage.ring(shape), storage.whole(4)
    if name == "insert":
        lowered = programs.insert.lower(ring, ids, storage.row(1024), ids, storage.whole(5))
    else:
        layer = storage.layer(shape)

        def attend(state: RingState, q: jax.Array, k: jax.Array, place: jax.Array) -> RingState:
            attention = RingAttention(state, place, jnp.int32(1), jnp.full(4, 7))
            q = attention(0, q, k, k)
            return attention.state, q

        query = jax.ShapeDtypeStruct((4, model.num_heads, model.head_dim), jnp.float32)
        key = jax.ShapeDtypeStruct((4, model.num_kv_heads, model.head_dim), jnp.float32)
        ring = RingState([layer], [layer], None)
        lowered = jax.jit(attend, donate_argnums=0).lower(ring, query, key, storage.whole())
    sizes = lowered.compile().memory_analysis()
    layer_bytes = int(np.prod(storage.layer(shape).shape)) * 4
    num_layers = len(ring.keys)
    assert sizes.alias_size_in_bytes >= 2 * num_layers * layer_bytes
    assert sizes.temp_size_in_bytes < layer_bytes
