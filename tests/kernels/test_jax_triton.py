"""The plain Triton back end without a GPU: errors, lowering for a GPU, and Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from model_defs import PRESETS
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileSpec,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
    tile_specs,
)
from pallas_kernels.ragged_paged_attention.backends import AUTO_BACKENDS
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus

SHAPE = jax.ShapeDtypeStruct
MODEL_HEADS = {
    Heads(config.num_heads, config.num_kv_heads, config.head_dim): name for name, config in PRESETS.items()
}
GQA = Heads(40, 10, 128)


def spec_of(heads: Heads, num_tokens: int, max_num_seqs: int, dtype: str, **changes: Any) -> TileSpec:
    arguments: dict[str, Any] = dict(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=32, dtype=dtype,
        backend="jax_triton",
    )  # fmt: skip
    return tile_spec(**arguments | changes)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AttentionArgumentError, match=r"backend = 'jax_triton': .* extra 'triton'"):
        spec_of(GQA, 64, 64, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "head_dim = 80: jax_triton supports"),
        ({"num_q_heads": 800}, "num_q_heads / num_kv_heads = 80: jax_triton supports"),
        ({"blocks": BlockSizes((mosaic_class(64, 64, 2, 64, 8),))}, "blocks"),
    ],
)
def test_unsupported_arguments_are_named(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(AttentionArgumentError, match=message):
        spec_of(GQA, 64, 64, "bfloat16", **changes)


def test_auto_never_selects_it() -> None:
    assert "jax_triton" not in AUTO_BACKENDS


HAS_EXTRA = importlib.util.find_spec("jax_triton") is not None
can_lower = pytest.mark.skipif(
    not (HAS_EXTRA and any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin")))),
    reason="needs the extra 'triton' and JAX's CUDA plugin, of jaxlib's version: see .ci/run",
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what Triton compiles during a test, including PTX, after clearing its cache."""
    from jax_triton import triton_lib

    from pallas_kernels.ragged_paged_attention import jax_triton_kernels as kernels

    for kernel in (kernels.ragged_paged_attention_tiles, kernels.ragged_paged_attention_merge):
        monkeypatch.setattr(kernel, "_jT_kernel_cache", {}, raising=False)
    results: list[Any] = []
    compile_kernel = triton_lib.compile_ttir_inplace

    def record(*args: Any) -> Any:
        results.append(compile_kernel(*args))
        return results[-1]

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", record)
    return results


def lower(spec: TileSpec, heads: Heads, dtype: str, device: str = "NVIDIA H200") -> str:
    """Return the StableHLO of attention on `device`, over a pool of 2**32 elements."""

    def attend(*args: jax.Array) -> jax.Array:
        return ragged_paged_attention(*args[:-1], sm_scale=0.1, metadata=(spec, args[-1]))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return SHAPE(shape, jnp.int32)

    num_pages = 2**32 // (spec.page_size * 2 * heads.num_kv_heads * heads.head_dim)
    pool = SHAPE((num_pages, spec.page_size, 2 * heads.num_kv_heads, heads.head_dim), dtype)
    q = SHAPE((spec.num_tokens, heads.num_q_heads, heads.head_dim), dtype)
    rows = spec.max_num_seqs
    batch = (array(rows), array(rows, 128), array(rows + 1), array(1), array(spec.tiles_len))
    return lower_for_cuda(attend, q, pool, *batch, device_kind=device)


@can_lower
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(heads, id=name, marks=() if name == "llama2-70b" else pytest.mark.long)
        for heads, name in MODEL_HEADS.items()
    ],
)
def test_presets(heads: Heads, compiled: list[Any]) -> None:
    """Decoding and prompts, in buckets with the same tile classes: the second compiles nothing."""
    decode, prefill = spec_of(heads, 256, 256, "bfloat16"), spec_of(heads, 2048, 256, "bfloat16")
    assert decode.blocks == prefill.blocks
    for spec in (decode, prefill):
        text = lower(spec, heads, "bfloat16")
        # The tiles of each class, and the merge.
        assert text.count("@triton_kernel_call_ffi") == 3 == len(compiled)
    tensor_cores = "wgmma.mma_async.sync.aligned.m64"
    assert tensor_cores in compiled[1].binary and "ex2.approx.ftz.f32" in compiled[0].binary


@pytest.mark.long
@can_lower
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page_size", "device", "target"),
    [
        (32, "float32", 16, "NVIDIA H200", "sm_90a"),
        (64, "float16", 64, "NVIDIA A100", "sm_80"),
        (256, "bfloat16", 16, "NVIDIA H200", "sm_90a"),
        (256, "float32", 32, "NVIDIA H200", "sm_90a"),
    ],
)
def test_dtypes_sizes_and_devices(
    head_dim: int, dtype: str, page_size: int, device: str, target: str, compiled: list[Any]
) -> None:
    heads = Heads(12, 4, head_dim)
    lower(spec_of(heads, 512, 32, dtype, page_size=page_size), heads, dtype, device=device)
    assert all(f".version 8.8\n.target {target}\n" in result.binary for result in compiled)
    if dtype == "float32":  # IEEE, not TF32
        assert not any("tf32" in result.ttgir or "tf32" in result.binary for result in compiled)


@can_lower
@pytest.mark.parametrize("group", [8, pytest.param(64, marks=pytest.mark.long)])
def test_heads_of_256_fit_little_shared_memory(
    group: int, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler counts the shared memory, for a GPU whose programs have 99 KiB."""
    monkeypatch.setattr(tile_specs, "has_large_shared_memory", lambda device: False)
    heads = Heads(2 * group, 2, 256)
    lower(spec_of(heads, 512, 64, "bfloat16"), heads, "bfloat16", device="NVIDIA L4")
    assert len(compiled) == (3 if group == 8 else 2)
    assert all(".target sm_89\n" in result.binary for result in compiled)
    assert max(result.shared_mem_bytes for result in compiled) <= 99 * 1024


@pytest.mark.long
@can_lower
def test_inside_shard_map() -> None:
    """Heads split over two devices, as the model's attention splits them."""
    spec = spec_of(Heads(4, 2, 64), 256, 8, "bfloat16")
    mesh = mesh_of_gpus(2)
    heads, none = PartitionSpec(None, "tp"), PartitionSpec()
    args = (
        SHAPE((256, 8, 64), jnp.bfloat16), SHAPE((400, 32, 8, 64), jnp.bfloat16), SHAPE((8,), jnp.int32),
        SHAPE((8, 128), jnp.int32), SHAPE((9,), jnp.int32), SHAPE((1,), jnp.int32),
    )  # fmt: skip
    attend = functools.partial(ragged_paged_attention, sm_scale=0.1, backend="jax_triton", blocks=spec.blocks)
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, PartitionSpec(None, None, "tp"), none, none, none, none),
        out_specs=heads, check_vma=False,
    )  # fmt: skip
    text = lower_for_cuda(sharded, *args, mesh=mesh)
    assert text.count("@triton_kernel_call_ffi") == 3


@pytest.mark.long
@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'triton'")
def test_equals_reference_in_the_interpreter() -> None:
    """The interpreter runs in its own process; see `triton_interpreter`."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.kernels.triton_interpreter"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"after {done.stdout.split()}:\n{done.stderr}"
