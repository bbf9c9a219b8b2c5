"""What a runner's buckets look like: the attention kernel's spec and the plan's layout of each.

Owns: how limits of the model and of the configuration become shapes.
Does not know: which back end serves them (`kernel_choices` does), pools, executables, or any step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from model_defs.config import ModelConfig
from pallas_kernels.ragged_paged_attention import TileSpec, tile_spec
from pensieve_jax.config import EngineConfig
from pensieve_jax.scheduler.buckets import bucket_layout, bucket_rows, token_buckets
from pensieve_jax.scheduler.plan import PlanLayout


def bucket_tile_specs(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, backend: str, num_shards: int
) -> dict[int, TileSpec]:
    """Per bucket the spec of an attention back end that serves this model; heads are one shard's."""
    return {
        bucket: tile_spec(
            num_tokens=bucket,
            max_num_seqs=bucket_rows(config.scheduler, bucket),
            num_q_heads=model.num_heads // num_shards,
            num_kv_heads=model.num_kv_heads // num_shards,
            head_dim=model.head_dim,
            page_size=config.cache.chunk_tokens,
            dtype=dtype,
            backend=backend,
            kv_dtype=config.cache.kv_dtype,
        )
        for bucket in token_buckets(config.scheduler)
    }


def bucket_layouts(
    model: ModelConfig, config: EngineConfig, tile_specs: Mapping[int, TileSpec]
) -> dict[int, PlanLayout]:
    """Per bucket the plan's layout.

    Raises:
      ConfigError: `scheduler.max_context_tokens` exceeds the model's positions or the page pool.
    """
    context_tokens = config.resolve_context_tokens(model.max_position_embeddings)
    return {
        bucket: bucket_layout(config, bucket, context_tokens=context_tokens, tiles_len=spec.tiles_len)
        for bucket, spec in tile_specs.items()
    }
