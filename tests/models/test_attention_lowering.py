"""The lowering of a step of many layers, for absent GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from model_defs import PagedAttention, RaggedBatch, abstract_model, preset
from pallas_kernels.ragged_paged_attention import tile_spec
from pensieve_jax.decoding.device.structure import ModelStructure
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus

NUM_TOKENS, PAGE_SIZE, NUM_PAGES, PAGES_A_ROW = 128, 32, 9, 4


def lowered(num_layers: int, backend: str, num_devices: int) -> str:
    """Return the lowered layers of a model, for one step."""
    config = preset("llama-tiny", num_layers=num_layers, num_heads=8, num_kv_heads=4, head_dim=64)
    mesh = mesh_of_gpus(num_devices)
    structure, leaves = ModelStructure.split(abstract_model(config, dtype="bfloat16", mesh=mesh))
    spec = tile_spec(
        num_tokens=NUM_TOKENS,
        max_num_seqs=NUM_TOKENS,
        num_q_heads=config.num_heads // num_devices,
        num_kv_heads=config.num_kv_heads // num_devices,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        dtype=jnp.dtype("bfloat16"),
        backend=backend,
    )

    def run(leaves: list[jax.Array], pools: list[jax.Array], x: jax.Array, batch: RaggedBatch) -> object:
        attention = PagedAttention(pools, batch, mesh=mesh, tile_spec=spec, backend=backend)
        positions = jnp.zeros(NUM_TOKENS, jnp.int32)
        model = structure.merge(leaves)
        return model.run_layers(x, positions, attention, 0, num_layers), attention.kv_pages

    def of(*shape: int, dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = RaggedBatch(
        of(NUM_TOKENS),
        of(NUM_TOKENS),
        of(NUM_TOKENS, PAGES_A_ROW),
        of(NUM_TOKENS + 1),
        of(1),
        of(spec.tiles_len),
    )
    pool = of(NUM_PAGES, PAGE_SIZE, 2 * config.num_kv_heads, config.head_dim, dtype=jnp.bfloat16)
    x = of(NUM_TOKENS, config.hidden_size, dtype=jnp.float32)
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
