"""Shapes within a budget, rings by hand, and invalid settings."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching import RebatchingConfig
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes


def test_growing_the_length_shrinks_the_batch():
    """There is always room for one row."""
    config = RebatchingConfig(max_batch=8, kv_bytes=2**20)
    ring_shapes = RingShapes(config, 64, 8192)
    assert ring_shapes.shapes[0] == (8, 512)
    assert all((shape.batch + 1) * shape.length * 64 <= 2**20 for shape in ring_shapes.shapes)
    batches, lengths = zip(*ring_shapes.shapes, strict=True)
    assert list(batches) == sorted(batches, reverse=True) and list(lengths) == sorted(set(lengths))
    assert ring_shapes.shape_for(513) == (8, 768) and ring_shapes.shape_for(lengths[-1] + 1) is None
    assert ring_shapes.room_bytes(ring_shapes.shapes[0]) == 2**20 - 8 * 512 * 64


@pytest.mark.parametrize(("max_tokens", "lengths"), [(65, [64]), (200, [64, 96, 128, 192, 224]), (3, [32])])
def test_short_contexts_have_short_rings(max_tokens, lengths):
    ring_shapes = RingShapes(RebatchingConfig(max_batch=1), 1, max_tokens)
    assert [shape.length for shape in ring_shapes.shapes] == lengths
    assert ring_shapes.max_context_tokens >= max_tokens


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("max_batch", {"max_batch": 0}),
        ("max_batch", {"max_batch": True}),
        ("kv_bytes", {"kv_bytes": 0}),
        ("insertion", {"insertion": "paste"}),
        ("prefill", {"prefill": "together"}),
        ("preemptive", {"preemptive": True, "insertion": "none"}),
        ("preemptive", {"preemptive": 1}),
        ("lengths", {"lengths": (64, 32)}),
        ("lengths", {"lengths": (40,)}),
        ("lengths", {"lengths": ()}),
        ("host_bytes", {"host_bytes": -1}),
        ("prefill_tokens", {"prefill_tokens": 31}),
        ("prefill_ahead", {"prefill_ahead": -1}),
        ("prefill_batch", {"prefill_batch": 0}),
        ("max_context_tokens", {"max_context_tokens": 1}),
        ("max_logprobs", {"max_logprobs": -1}),
        ("max_banned_ids", {"max_banned_ids": 0}),
        ("tensor_parallel_size", {"tensor_parallel_size": 0}),
        ("max_position_embeddings", {"max_position_embeddings": 1}),
        ("random_seed", {"random_seed": -1}),
        ("attention_backend", {"attention_backend": "cudnn"}),
        ("decode_backend", {"decode_backend": "pallas_mosaic_gpu"}),
        ("decode_backend", {"decode_backend": "pallas_triton", "insertion": "shape"}),
    ],
)
def test_invalid_settings_are_named(field, changes):
    with pytest.raises(ConfigError) as caught:
        RebatchingConfig(**changes)
    assert caught.value.field == field


def test_the_smallest_settings_are_accepted():
    """None is prefilled ahead, unlike the default of as many as there are rows."""
    smallest = {
        "max_batch": 1,
        "kv_bytes": 1,
        "prefill_batch": 1,
        "prefill_tokens": 32,
        "max_context_tokens": 2,
        "lengths": (32,),
        "host_bytes": 0,
        "max_logprobs": 0,
        "max_banned_ids": 1,
        "tensor_parallel_size": 1,
        "max_position_embeddings": 2,
        "random_seed": 0,
    }
    assert RebatchingConfig(prefill_ahead=0, **smallest).num_ahead == 0
    assert RebatchingConfig(max_batch=5).num_ahead == 5


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("kv_bytes", {"kv_bytes": 1000}),
        ("kv_bytes", {"kv_bytes": 20_000, "max_context_tokens": 1000}),
        ("lengths", {"lengths": (32, 64), "max_context_tokens": 100}),
        ("lengths", {"lengths": (64, 128), "max_context_tokens": 300, "kv_bytes": 2 * 64 * 64}),
        ("max_context_tokens", {"max_context_tokens": 5000}),
    ],
)
def test_budgets_without_room_for_a_row_are_named(field, changes):
    with pytest.raises(ConfigError) as caught:
        RingShapes(RebatchingConfig(**changes), 64, 4096)
    assert caught.value.field == field


def test_a_ring_by_hand():
    """Insertion, a shaped step, release and another shape."""
    ring: Ring[str] = Ring()
    assert ring.resize(RingShape(3, 8)) is None
    a = ring.insert("a", 3)
    assert (a, ring.span, ring.row_span(a)) == (0, 3, 3)
    assert ring.places(a).tolist() == [5, 6, 7]
    ring.advance()
    b = ring.insert("b", 0)
    ring.advance(3, filled_row=b)
    assert ring.places(a).tolist() == [5, 6, 7, 0, 1]  # two columns of padding follow
    assert ring.places(b).tolist() == [1, 2, 3]
    assert ring.row_span(a) == 7 and ring.span == 7
    c = ring.insert("c", 2)
    ring.release(a)
    assert ring.span == 3 and ring.num_held == 2
    moved = ring.resize(RingShape(2, 12))
    assert moved is not None
    assert moved.rows.tolist() == [b, c]
    assert [owner for _, owner in ring.held] == ["b", "c"]
    there = moved.columns >= 0
    assert there.sum() == 8
    np.testing.assert_array_equal(moved.columns[ring.places(0)], [1, 2, 3])
    np.testing.assert_array_equal(moved.columns[ring.places(1)], [2, 3])
    ring.release(0)
    ring.release(1)
    assert ring.cursor == 0 and not ring.span


def test_a_new_ring_equals_a_cleared_one():
    """It has no shape and no rows, and the next column is the first one."""
    used: Ring[str] = Ring()
    used.resize(RingShape(2, 8))
    used.insert("a", 3)
    used.advance(4)
    used.clear()
    for ring in (Ring(), used):
        assert (ring.shape, ring.cursor, ring.span, ring.num_held) == (None, 0, 0, 0)


def test_default_settings():
    """Values that the documentation names."""
    config = RebatchingConfig()
    assert (config.max_batch, config.kv_bytes, config.host_bytes) == (8, 2**30, 2**32)
    assert (config.prefill_batch, config.prefill_tokens, config.preemptive) == (4, 4096, False)
    assert (config.max_logprobs, config.max_banned_ids, config.random_seed) == (8, 8, 0)
    assert config.tensor_parallel_size == 1
