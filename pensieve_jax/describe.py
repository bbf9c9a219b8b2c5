"""A description of an engine on this machine, as plain values.

Owns: the keys of `LLM.describe` and their meanings.
Does not know: how a value was chosen; the parts of the engine report that.
Called by `LLM` and the server.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from pensieve_jax.assembly import Assembled
from pensieve_jax.decoding.device.describe import (
    Description,
    describe_choice,
    describe_devices,
    describe_model,
)
from pensieve_jax.device.kv_storage import packing_reason
from pensieve_jax.device.sizing import memory_in_words


def describe(parts: Assembled) -> Description:
    """Return plain values for JSON; printed, they are a line each.

    Keys:
      model: `name` as the caller gave it, `architecture`, `num_layers`, `hidden_size`, `num_heads`,
        `num_kv_heads`, `head_dim`, `intermediate_size`, `vocab_size`, the distinct `windows` of the layers
        (None for none), `num_parameters`, `num_active_parameters` (those that compute a token: of experts,
        the chosen ones), the `dtype` of the computation, the `weights_dtype` in which layers keep their
        weights, and `weights_bytes` per device.
      device: `platform`, `kind` and `count` of the devices that share the model.
      kernels: the `backend` and the `reason` for it, for each of `attention`, `residual_norm`,
        `decode_matmul`, `experts`, `all_reduce`, `sampling_cutoff` and `page_copy`; None for an unused
        kernel.
      cache:
        `stateful`; `policy`; for a learning policy the `order` that it uses now and why, else None.
        `chunk_tokens`; the `kv_dtype` of stored pages; `page_bytes` of a page on one device.
        Sizes of both tiers: `gpu_pages`, `gpu_bytes` per device and `gpu_tokens`, without the dummy page;
        `cpu_slots`, `cpu_bytes` of all devices together and `cpu_tokens`. `summary` says this in a line.
        `packed`: whether and why chunks are packed in host memory and on the way there; `slot_bytes`: size of
        a chunk there, all devices together.
        `cost_model`: origin of the eviction costs: "file", "shipped", "cached" (by an earlier start),
        "measured at start" or "analytic"; `cost_profile`: path of the profile, name of a shipped one, or
        None; `cost_reason`: reason of the choice; `cost_at_4096`: cost of the chunk at 4,096 tokens over that
        of the first.
      steps: `buckets` in tokens, ascending; `max_context_tokens`, `max_num_running`, `max_num_rows`,
        `num_layer_groups`, `prompt_order` and `target_tpot_ms`.
      compilation_cache_dir: directory of compiled steps, or None.
    """
    config, runner = parts.config, parts.runner
    mesh = runner.storage.sharding.mesh
    assert isinstance(mesh, Mesh)
    values = {
        "model": describe_model(
            parts.model_name, parts.model_config, runner.dtype, runner.weights_bytes, runner.weights_dtype
        ),
        "device": describe_devices(mesh),
        "kernels": {name: describe_choice(choice) for name, choice in runner.kernels._asdict().items()},
        "cache": _cache(parts),
        "steps": {
            "buckets": sorted(runner.layouts),
            "max_context_tokens": config.resolve_context_tokens(parts.model_config.max_position_embeddings),
            "max_num_running": config.scheduler.running_limit,
            "max_num_rows": config.scheduler.row_limit,
            "num_layer_groups": len(runner.storage.groups),
            "prompt_order": config.scheduler.prompt_order,
            "target_tpot_ms": config.scheduler.target_tpot_ms,
        },
        "compilation_cache_dir": config.runner.compilation_cache_dir,
    }
    return Description(values)


def _cache(parts: Assembled) -> dict[str, Any]:
    cache, storage = parts.config.cache, parts.runner.storage
    return {
        "stateful": parts.config.stateful,
        "policy": cache.policy,
        "order": parts.engine.cache.turns.describe(),
        "chunk_tokens": cache.chunk_tokens,
        "kv_dtype": cache.kv_dtype or parts.runner.dtype.name,
        "page_bytes": storage.page_bytes,
        "gpu_pages": cache.num_gpu_pages,
        "gpu_bytes": cache.num_gpu_pages * storage.page_bytes,
        "gpu_tokens": cache.num_gpu_pages * cache.chunk_tokens,
        "packed": _packing(parts),
        "slot_bytes": storage.slot_bytes,
        "cpu_slots": cache.num_cpu_pages,
        "cpu_bytes": cache.num_cpu_pages * storage.slot_bytes,
        "cpu_tokens": cache.num_cpu_pages * cache.chunk_tokens,
        "summary": memory_in_words(parts.config, storage),
        "cost_model": parts.costs.kind,
        "cost_profile": parts.costs.source,
        "cost_reason": parts.costs.reason,
        "cost_at_4096": round(parts.costs.ratio_at_4096(cache.chunk_tokens), 2),
    }


def _packing(parts: Assembled) -> str:
    cache = parts.config.cache
    if not cache.num_cpu_pages:
        return "off: there is no host tier"
    return packing_reason(parts.model_config, cache, parts.runner.dtype)
