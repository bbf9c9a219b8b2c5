"""Argument errors and the choice of back end."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.devices import triton_device_limit
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    build_tiles,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import assert_equals_reference, make_batch

SPEC: dict[str, Any] = dict(
    num_tokens=8, max_num_seqs=4, num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16, dtype="float32"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens = 0: must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"num_q_heads": 5}, "num_q_heads = 5: must be a multiple of num_kv_heads = 2"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0"),
        ({"page_size": 48}, r"page_size = 48: must be one of \(16, 32, 64\)"),
        ({"dtype": "float64"}, "dtype = 'float64': must be one of"),
        ({"backend": "cuda"}, "backend = 'cuda': must be one of"),
        (
            {"backend": "pallas_triton", "head_dim": 80},
            "head_dim = 80: pallas_triton serves .* use backend 'xla'",
        ),
        ({"backend": "pallas_triton", "num_q_heads": 200}, "num_q_heads / num_kv_heads = 100"),
        ({"backend": "pallas_triton", "blocks": BlockSizes((TileClass(20, 64, 4, 3, 1, 1),))}, "blocks"),
        (
            {
                "backend": "pallas_triton",
                "num_q_heads": 64,
                "blocks": BlockSizes((TileClass(16, 64, 4, 3, 1, 1),)),
            },
            "blocks",
        ),
        ({"backend": "pallas_triton", "blocks": BlockSizes(())}, "blocks"),
    ],
)
def test_spec_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AttentionArgumentError, match=message):
        tile_spec(**{**SPEC, **changes})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q", jnp.zeros((3, 4)), r"q\.shape"),
        ("kv_pages", jnp.zeros((4, 16, 3, 32)), r"kv_pages\.shape"),
        ("kv_pages", jnp.zeros((4, 16, 4, 64)), r"kv_pages\.shape"),
        ("kv_pages", jnp.zeros((4, 16, 4, 32), jnp.bfloat16), r"kv_pages\.dtype = 'bfloat16': must be q's"),
        ("kv_lens", np.zeros((2, 2), np.int32), r"kv_lens\.shape"),
        ("page_indices", np.zeros((2, 3), np.int32), r"page_indices\.shape"),
        ("cu_q_lens", np.zeros(4, np.int32), r"cu_q_lens\.shape"),
        ("num_seqs", np.zeros((), np.int32), r"num_seqs\.shape"),
        ("kv_lens", np.zeros(4, np.int64), r"kv_lens\.dtype = 'int64': must be int32"),
    ],
)
def test_array_errors(field: str, value: Any, message: str) -> None:
    batch = make_batch(np.random.default_rng(0), [(1, 5), (3, 9)], Heads(4, 2, 32))
    assert batch.kv_lens.shape == (4,)
    with pytest.raises(AttentionArgumentError, match=message):
        ragged_paged_attention(*batch._replace(**{field: value}), sm_scale=1.0)


@pytest.mark.parametrize("sm_scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_error(sm_scale: float) -> None:
    batch = make_batch(np.random.default_rng(0), [(1, 5)], Heads(4, 2, 32))
    with pytest.raises(AttentionArgumentError, match="sm_scale"):
        ragged_paged_attention(*batch, sm_scale=sm_scale)


def test_metadata_of_another_call_is_refused() -> None:
    batch = make_batch(np.random.default_rng(0), [(1, 5)], Heads(4, 2, 32))
    spec = tile_spec(**SPEC, backend="pallas_triton")
    tiles = build_tiles(spec, np.zeros(5, np.int32), np.zeros(4, np.int32), 0)
    with pytest.raises(AttentionArgumentError, match="was made for another call"):
        ragged_paged_attention(*batch, sm_scale=1.0, metadata=(spec, jnp.asarray(tiles)))


def test_reference_is_a_backend_outside_jit() -> None:
    batch = make_batch(np.random.default_rng(0), [(1, 5), (3, 9)], Heads(4, 2, 80))
    assert_equals_reference(ragged_paged_attention(*batch, sm_scale=0.1, backend="reference"), batch, 0.1)
    with pytest.raises(AttentionArgumentError, match="cannot be jitted"):
        jax.jit(lambda *args: ragged_paged_attention(*args, sm_scale=0.1, backend="reference"))(*batch)


def test_auto_is_xla_on_a_cpu() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("a CPU's choice")
    assert tile_spec(**SPEC).backend == "xla"


@pytest.mark.parametrize(
    ("platform", "capability", "says"),
    [
        ("gpu", "9.0", None),
        ("gpu", "8.0", None),
        ("gpu", "7.5", "capability 8.0 or more, this GPU has 7.5"),
        ("gpu", "gfx942", "needs an NVIDIA GPU, this device is 'kind'"),
        ("cpu", None, "needs an NVIDIA GPU, this device is 'kind'"),
    ],
)
def test_devices_that_triton_runs_on(platform: str, capability: str | None, says: str | None) -> None:
    device = types.SimpleNamespace(platform=platform, device_kind="kind", compute_capability=capability)
    limit = triton_device_limit(device)
    assert limit is None if says is None else limit is not None and says in limit
