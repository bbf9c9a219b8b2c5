"""Argument errors and the choice of back end."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_names import COMPILED_BACKENDS
from pallas_kernels.devices import triton_device_limit
from pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    AttentionArgumentError,
    AttentionHeads,
    BackendChoice,
    BlockSizes,
    TileClass,
    build_tiles,
    choose_backend,
    device_limit,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.backends import AUTO_BACKENDS, TABLE
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.deadlines import TIMEOUT_S
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
            "head_dim = 80: pallas_triton supports .* use backend 'xla'",
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
        ("page_indices", np.zeros((4, 0), np.int32), r"page_indices\.shape = \(4, 0\): .*at least 1"),
        ("page_indices", np.zeros(4, np.int32), r"page_indices\.shape"),
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
def test_devices_that_run_triton(platform: str, capability: str | None, says: str | None) -> None:
    device = types.SimpleNamespace(platform=platform, device_kind="kind", compute_capability=capability)
    limit = triton_device_limit(device)
    assert limit is None if says is None else limit is not None and says in limit


H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize(
    ("heads", "device", "name", "reason"),
    [
        (
            AttentionHeads(40, 10, 128, "bfloat16"),
            H200,
            "pallas_mosaic_gpu",
            "the fastest that serves 40 query heads on 10 KV heads of 128 in bfloat16 on NVIDIA H200",
        ),
        (
            AttentionHeads(40, 10, 128, "float32"),
            H200,
            "pallas_triton",
            "the fastest that serves 40 query heads on 10 KV heads of 128 in float32 on NVIDIA H200; "
            "not pallas_mosaic_gpu: dtype = 'float32': pallas_mosaic_gpu supports ('bfloat16', 'float16'); "
            "use backend 'pallas_triton' or 'xla'",
        ),
        (
            AttentionHeads(4, 4, 80, "bfloat16"),
            CPU,
            "xla",
            "the fastest that serves 4 query heads on 4 KV heads of 80 in bfloat16 on cpu; "
            "not pallas_mosaic_gpu: pallas_mosaic_gpu needs an NVIDIA GPU of compute capability 9.0, "
            "'cpu' has None; "
            "not pallas_triton: the Triton kernel needs an NVIDIA GPU, this device is 'cpu'",
        ),
    ],
    ids=["hopper", "float32", "cpu"],
)
def test_the_choice_has_a_reason(heads: AttentionHeads, device: Any, name: str, reason: str) -> None:
    assert choose_backend("auto", heads, device) == BackendChoice(name, reason)


def test_a_named_back_end_is_accepted_on_any_device() -> None:
    heads = AttentionHeads(40, 10, 128, "bfloat16")
    for name in ("pallas_mosaic_gpu", "xla", "reference"):
        choice = choose_backend(name, heads, CPU, named_in="runner.attention_backend")
        assert choice == BackendChoice(name, "named in runner.attention_backend")


def test_heads_without_a_back_end() -> None:
    with pytest.raises(AttentionArgumentError, match=r"none serves .* float64.*not xla: dtype = 'float64'"):
        choose_backend("auto", AttentionHeads(4, 2, 128, np.dtype("float64")), H200)
    with pytest.raises(AttentionArgumentError, match="num_kv_heads = 0"):
        AttentionHeads(4, 0, 128, "float32")


def test_the_hopper_kernel_reads_pages_in_8_bits_where_supported():
    """It supports only bfloat16 models; Triton's kernel reads the others."""
    for dtype, expected in (("bfloat16", "pallas_mosaic_gpu"), ("float16", "pallas_triton")):
        heads = AttentionHeads(40, 10, 128, jnp.dtype(dtype), "int8")
        assert choose_backend("auto", heads, H200).name == expected


def test_groups_for_which_auto_selects_hopper():
    """They are the groups in docs/kernels.md."""

    def taken(head_dim, kv_dtype=None):
        heads = [AttentionHeads(4 * group, 4, head_dim, "bfloat16", kv_dtype) for group in range(1, 17)]
        return [each.group for each in heads if choose_backend("auto", each, H200).name.endswith("_gpu")]

    assert taken(64) == [1, 2, 4, 8, 16] and taken(128) == [1, 2, 4, 7, 8, 16]
    assert taken(128, "int8") == list(range(1, 17)) and taken(64, "int8") == []


def test_unmeasured_groups_need_the_back_ends_name():
    seven, heads = (AttentionHeads(count, 4, 128, jnp.dtype("bfloat16")) for count in (28, 24))
    assert choose_backend("auto", seven, H200).name == "pallas_mosaic_gpu"  # measured with this head size
    small = AttentionHeads(14, 2, 64, jnp.dtype("bfloat16"))
    assert choose_backend("auto", small, H200).name == "pallas_triton"
    choice = choose_backend("auto", heads, H200)
    assert choice.name == "pallas_triton" and "has not been measured" in choice.reason
    assert choose_backend("pallas_mosaic_gpu", heads, H200).name == "pallas_mosaic_gpu"
    assert {*TABLE["pallas_mosaic_gpu"].untried_groups} <= {*TABLE["pallas_mosaic_gpu"].groups}


def test_the_table_has_a_row_for_every_name() -> None:
    assert set(TABLE) == {*COMPILED_BACKENDS, "reference"}
    assert AUTO_BACKENDS == ("pallas_mosaic_gpu", "pallas_triton", "xla")
    assert all(name == row.name and name in BACKENDS for name, row in TABLE.items())
    everything = TABLE[AUTO_BACKENDS[-1]]
    assert everything.head_dims is everything.groups is device_limit(everything.name, CPU) is None


@pytest.mark.parametrize("name", ["pallas_triton", "pallas_mosaic_gpu", "jax_triton"])
def test_every_kernel_has_a_device_limit(name: str) -> None:
    assert device_limit(name, H200) is None and "NVIDIA GPU" in str(device_limit(name, CPU))


def test_names_need_no_jax() -> None:
    """The configuration checks names and must not import JAX."""
    code = "import sys, pallas_kernels.attention_names; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
