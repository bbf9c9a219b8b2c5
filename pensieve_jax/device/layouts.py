"""What a runner's buckets look like: the attention kernel's spec and the plan's layout of each.

Owns: how limits of the model and of the configuration become shapes, and the refusal of an attention
back end that cannot serve them here.
Does not know: pools, executables, or any step.
Called by: `model_runner`, once.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from model_defs.config import ModelConfig
from pallas_kernels.devices import mosaic_device_limit, triton_device_limit
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    TileSpec,
    tile_spec,
)
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.scheduler.buckets import bucket_layout, bucket_rows, token_buckets
from pensieve_jax.scheduler.plan import PlanLayout

_BACKEND_FIELD = "runner.attention_backend"
_DEVICE_LIMITS = {
    "pallas_triton": triton_device_limit,
    "pallas_mosaic_gpu": mosaic_device_limit,
    "jax_triton": triton_device_limit,
}


def bucket_tile_specs(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, device: jax.Device, num_shards: int
) -> dict[int, TileSpec]:
    """Per bucket the attention kernel's spec; heads are those of one of `num_shards`.

    Raises:
      ConfigError: the attention back end that was asked for does not run on `device`, or does not serve
        this model.
    """
    backend = config.runner.attention_backend
    limit_of = _DEVICE_LIMITS.get(backend)
    if limit_of is not None and (device_limit := limit_of(device)) is not None:
        raise ConfigError(_BACKEND_FIELD, backend, "'auto' or 'xla' on this device", device_limit)
    try:
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
            )
            for bucket in token_buckets(config.scheduler)
        }
    except AttentionArgumentError as error:
        # Sizes and pages are checked elsewhere: what is left is heads or a dtype that no kernel serves.
        raise ConfigError(_BACKEND_FIELD, backend, "'auto' or 'xla' for this model", str(error)) from error


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
