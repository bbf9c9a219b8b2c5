"""The lowering of a step of many layers, for absent GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from model_defs import PagedAttention, RaggedBatch, abstract_model, preset
from pallas_kernels.ragged_paged_attention import page_shape, tile_spec
from pensieve_jax.decoding.device.structure import ModelStructure
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus

PAGE_SIZE, NUM_PAGES, PAGES_A_ROW = 32, 9, 4


def lowered(num_layers: int, backend: str, num_devices: int, kv_dtype: str | None = None) -> str:
    """Return the lowered layers of a model, for one step; pages in 8 bits are decoded for prompts."""
    num_tokens, head_dim = (128, 64) if kv_dtype is None else (512, 128)
    config = preset("llama-tiny", num_layers=num_layers, num_heads=8, num_kv_heads=4, head_dim=head_dim)
    mesh = mesh_of_gpus(num_devices)
    structure, leaves = ModelStructure.split(abstract_model(config, dtype="bfloat16", mesh=mesh))
    spec = tile_spec(
        num_tokens=num_tokens,
        max_num_seqs=num_tokens,
        num_q_heads=config.num_heads // num_devices,
        num_kv_heads=config.num_kv_heads // num_devices,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        dtype=jnp.dtype("bfloat16"),
        backend=backend,
        kv_dtype=kv_dtype,
        scratch_pages=0 if kv_dtype is None else 8,
    )
    assert (spec.scratch_pages > 0) == (kv_dtype is not None)

    def run(leaves: list[jax.Array], pools: list[jax.Array], x: jax.Array, batch: RaggedBatch) -> object:
        attention = PagedAttention(pools, batch, mesh=mesh, tile_specs=(spec,), backend=backend)
        positions = jnp.zeros(num_tokens, jnp.int32)
        model = structure.merge(leaves)
        return model.run_layers(x, positions, attention, 0, num_layers), attention.kv_pages

    def of(*shape: int, dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = RaggedBatch(
        of(num_tokens),
        of(num_tokens),
        of(num_tokens, PAGES_A_ROW),
        of(num_tokens + 1),
        of(1),
        (of(spec.tiles_len),),
    )
    page = page_shape(kv_dtype, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    pool = of(NUM_PAGES, *page, dtype=jnp.bfloat16 if kv_dtype is None else jnp.int8)
    x = of(num_tokens, config.hidden_size, dtype=jnp.float32)
    shapes = [of(*leaf.shape, dtype=leaf.dtype) for leaf in leaves]
    return lower_for_cuda(run, shapes, [pool] * num_layers, x, rows, mesh=mesh)


@pytest.mark.parametrize(
    ("backend", "num_devices"),
    [
        ("pallas_triton", 1),
        pytest.param("pallas_triton", 2, marks=pytest.mark.long),
        pytest.param("pallas_mosaic_gpu", 1, marks=pytest.mark.long),
    ],
)
def test_kernels_are_lowered_once_for_all_layers(backend, num_devices):
    """A start lowers some two dozen programs sequentially, each of many layers."""
    few, many = (
        [text.count(call) for call in ("xla.gpu.triton", "@mosaic_gpu")]
        for text in (lowered(num_layers, backend, num_devices) for num_layers in (2, 5))
    )
    assert few == many
    assert few[0] > 1 and (few[1] > 0) == (backend == "pallas_mosaic_gpu")


@pytest.mark.long
def test_pages_are_decoded_on_every_device_once_for_all_layers():
    few, many = (
        [text.count(call) for call in ("xla.gpu.triton", "@mosaic_gpu", "decode_pages")]
        for text in (lowered(num_layers, "pallas_mosaic_gpu", 2, "int8") for num_layers in (1, 3))
    )
    assert few == many and few[1] == 3 and few[2] > 0
