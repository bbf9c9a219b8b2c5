"""The Mosaic kernel lowers for an H200 on a machine without a GPU: shapes, layouts, shared memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from model_defs import PRESETS
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.backends import TABLE
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.cross_lower import lower_for_cuda
from tests.seeds import EVERYTHING

SHAPE = jax.ShapeDtypeStruct
MOSAIC = TABLE["pallas_mosaic_gpu"]
MODEL_HEADS = {
    Heads(config.num_heads, config.num_kv_heads, config.head_dim): name for name, config in PRESETS.items()
}
SERVED = {
    heads: name
    for heads, name in MODEL_HEADS.items()
    if heads.head_dim in (64, 128) and heads.num_q_heads // heads.num_kv_heads in MOSAIC.groups
}
QUICK = ("llama2-13b-gqa10",)  # the others are long
# One preset for each kernel: programs of a launch take one head each, so the number of heads is not compiled.
KERNELS = {(heads.head_dim, heads.num_q_heads // heads.num_kv_heads): heads for heads in reversed(SERVED)}
LOWERED = SERVED if EVERYTHING else {heads: SERVED[heads] for heads in KERNELS.values()}


def lower(
    heads: Heads,
    page_size: int = 32,
    dtype: str = "bfloat16",
    blocks: BlockSizes | None = None,
    window: int | None = None,
    has_sinks: bool = False,
) -> str:
    num_tokens, max_num_seqs = 2048, 256
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype=dtype,
        backend="pallas_mosaic_gpu", blocks=blocks, window=window,
    )  # fmt: skip

    def attend(sinks: jax.Array, *args: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *args[:-1], sm_scale=0.1, window=window, sinks=sinks if has_sinks else None,
            metadata=(spec, args[-1]),
        )  # fmt: skip

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return SHAPE(shape, jnp.int32)

    pool = SHAPE((40_000, page_size, 2 * heads.num_kv_heads, heads.head_dim), dtype)  # over 2**31 elements
    q = SHAPE((num_tokens, heads.num_q_heads, heads.head_dim), dtype)
    rows = (array(max_num_seqs), array(max_num_seqs, 128), array(max_num_seqs + 1), array(1))
    sinks = SHAPE((heads.num_q_heads,), jnp.float32)
    return lower_for_cuda(attend, sinks, q, pool, *rows, array(spec.tiles_len))


@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(heads, id=name, marks=() if name in QUICK else pytest.mark.long)
        for heads, name in LOWERED.items()
    ],
)
def test_every_preset(heads: Heads) -> None:
    """Decoding and prompts lower through the Mosaic kernel, the merge through Triton."""
    text = lower(heads)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2
    assert text.count("xla.gpu.triton") == 1


def test_other_presets_are_refused() -> None:
    for heads in MODEL_HEADS.keys() - SERVED.keys():
        with pytest.raises(AttentionArgumentError, match=r"head_dim|num_q_heads / num_kv_heads"):
            lower(heads)


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"),
    [
        pytest.param(Heads(16, 1, 128), 16, "bfloat16", marks=pytest.mark.long),
        pytest.param(Heads(8, 4, 64), 64, "float16", marks=pytest.mark.long),
        pytest.param(Heads(8, 1, 128), 64, "float16", marks=pytest.mark.long),
    ],
)
def test_groups_pages_and_types(heads: Heads, page_size: int, dtype: str) -> None:
    assert "mosaic_gpu_v2" in lower(heads, page_size, dtype)


@pytest.mark.parametrize(
    ("heads", "window", "has_sinks"),
    [
        (Heads(64, 8, 64), 128, True),
        pytest.param(Heads(40, 10, 128), 4096, False, marks=pytest.mark.long),
        pytest.param(Heads(28, 4, 128), None, True, marks=pytest.mark.long),  # one head is padding
        pytest.param(Heads(40, 40, 128), 1024, True, marks=pytest.mark.long),
    ],
)
def test_windows_and_sinks(heads: Heads, window: int | None, has_sinks: bool) -> None:
    text = lower(heads, window=window, has_sinks=has_sinks)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.long
def test_two_mosaic_classes() -> None:
    """The second launch continues in the buffers of the first; only the merge is Triton's."""
    blocks = BlockSizes((mosaic_class(64, 64, 5, 256, 528), mosaic_class(128, 64, 4, 1024, 528)))
    text = lower(Heads(40, 10, 128), blocks=blocks)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2
    assert text.count("xla.gpu.triton") == 1


def test_more_stages_than_shared_memory_holds() -> None:
    blocks = BlockSizes((mosaic_class(128, 128, 3, 1024, 528),))
    with pytest.raises(ValueError, match="shared memory"):
        lower(Heads(40, 10, 128), blocks=blocks)
