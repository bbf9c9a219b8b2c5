"""Steps over pages in 8 bits: how many pages they decode for prompts, and that plans say which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import preset
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_DECODED
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.sizing import step_bytes
from pensieve_jax.device.step_programs import bucket_layouts, bucket_tile_specs
from pensieve_jax.scheduler.plan import StepPlan

MODEL = preset("llama2-13b-gqa10")
BFLOAT16 = np.dtype(jnp.bfloat16)


def config_of(kv_dtype: str | None, gpu_pages: int | None = 40_000) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(gpu_pages=gpu_pages, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=2048, max_num_running=64, token_buckets=(64, 512, 2048)
        ),
        runner=RunnerConfig(),
    )


def specs_of(config: EngineConfig, backend: str = "pallas_mosaic_gpu") -> dict[int, Any]:
    specs = bucket_tile_specs(MODEL, config, BFLOAT16, backend, 1)
    return {bucket: spec for bucket, (spec,) in specs.items()}


def test_the_scratch_pool_holds_a_context_and_new_prompts_and_no_more_than_the_pool() -> None:
    context_pages = MODEL.max_position_embeddings // 32
    pages = {bucket: spec.scratch_pages for bucket, spec in specs_of(config_of("int8")).items()}
    assert pages == {64: 0, 512: context_pages + 16, 2048: context_pages + 64}
    assert {spec.scratch_pages for spec in specs_of(config_of("int8", 100)).values()} == {0, 100}
    assert {spec.scratch_pages for spec in specs_of(config_of(None)).values()} == {0}
    assert {spec.scratch_pages for spec in specs_of(config_of("int8"), "xla").values()} == {0}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_its_bytes_count_as_those_of_a_step(num_devices: int) -> None:
    num_pages = MODEL.max_position_embeddings // 32 + 2048 // 32
    page_bytes = 2 * 32 * 2 * MODEL.num_kv_heads * MODEL.head_dim // num_devices
    without = step_bytes(config_of(None, None), MODEL, BFLOAT16, num_devices)
    beside = step_bytes(config_of("int8", None), MODEL, BFLOAT16, num_devices)
    beside -= without + num_pages * page_bytes
    (spec,) = (one for one in specs_of(config_of("int8")).values() if one.num_tokens == 2048)
    part_rows = spec.partial_begin(3) - spec.partial_begin(2)
    assert part_rows * (MODEL.head_dim + 1) * 4 <= beside < 40 * 2**20


@pytest.mark.parametrize(
    ("attention", "chunk_tokens", "num_tokens"),
    [
        ("pallas_triton", 32, 2048),
        ("xla", 32, 2048),
        ("pallas_mosaic_gpu", 16, 2048),
        ("pallas_mosaic_gpu", 32, 256),
    ],
)
def test_steps_that_decode_no_pages_keep_no_memory_for_them(
    attention: str, chunk_tokens: int, num_tokens: int
) -> None:
    """Other back ends, pages of 16 tokens, and small steps read 8 bits as they are."""

    def of(kv_dtype: str | None) -> EngineConfig:
        scheduler = SchedulerConfig(max_num_batched_tokens=num_tokens, max_num_running=64)
        return EngineConfig(
            cache=CacheConfig(kv_dtype=kv_dtype, chunk_tokens=chunk_tokens), scheduler=scheduler
        )

    assert len({step_bytes(of(kv), MODEL, BFLOAT16, 1, attention) for kv in (None, "int8")}) == 1


def test_a_plan_names_the_pages_of_long_prompts() -> None:
    config = config_of("int8")
    specs = bucket_tile_specs(MODEL, config, BFLOAT16, "pallas_mosaic_gpu", 1)
    plan = StepPlan(bucket_layouts(MODEL, config, specs)[512], 0, 10**6)
    plan.num_rows[0] = 2
    plan.cu_q_lens[1:] = (1, *[301] * (len(plan.cu_q_lens) - 2))
    plan.kv_lens[:2] = 700, 1000
    plan.page_indices[0, :22] = np.arange(100, 122)
    plan.page_indices[1, :32] = np.arange(332, 300, -1)
    runner: Any = SimpleNamespace(_tile_specs=specs)
    ModelRunner.fill_tiles(runner, plan)
    assert plan.tiles[0][NUM_DECODED] == 32
    decoded = plan.tiles[0][specs[512][0].decoded_offset :][:32]
    np.testing.assert_array_equal(decoded, np.arange(332, 300, -1))
