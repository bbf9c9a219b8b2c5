"""What an engine turned out to be on this machine, as plain values.

Owns: the keys of `LLM.describe`, and what each means.
Does not know: how anything was chosen; the parts say.
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


def describe(parts: Assembled) -> Description:
    """Plain values, which JSON can hold; printed, they are a line each.

    Keys:
      model: `name` as it was given, `architecture`, `num_layers`, `hidden_size`, `num_heads`, `num_kv_heads`,
        `head_dim`, `intermediate_size`, `vocab_size`, `num_parameters`, and the `dtype` that it runs in, with
        `weights_bytes` a device.
      device: `platform`, `kind` and `count` of the devices that share the model.
      kernels: for `attention`, `residual_norm`, `decode_matmul`, `all_reduce`, `sampling_cutoff` and
        `page_copy` the `backend` and the `reason` for it; None for a kernel that nothing calls.
      cache: `stateful`, `policy`, for one that learns the `order` that it follows now and why (else None),
        `chunk_tokens`, the `kv_dtype` that pages are stored as, `page_bytes` of a page on one device, and
        what both tiers hold: `gpu_pages`, `gpu_bytes` a device and `gpu_tokens`, the dummy page not counted;
        `cpu_slots`, `cpu_bytes` of all devices together and `cpu_tokens`. `packed` says whether chunks are
        packed in host memory and on the way there, and why or why not; `slot_bytes` is what one takes there,
        all devices together. `cost_model` says by what costs chunks are evicted: "file", "shipped", "cached"
        (by an earlier start), "measured at start" or "analytic"; `cost_profile` is the path of the profile,
        the name of a shipped one, or None; `cost_reason` says why, and `cost_at_4096` what the chunk at 4,096
        tokens costs over the first.
      steps: `buckets` in tokens, ascending; `max_context_tokens`, `max_num_running`, `max_num_rows` and
        `num_layer_groups`.
      compilation_cache_dir: where compiled steps are kept, or None.
    """
    config, runner = parts.config, parts.runner
    mesh = runner.storage.sharding.mesh
    assert isinstance(mesh, Mesh)
    values = {
        "model": describe_model(parts.model_name, parts.model_config, runner.dtype, runner.weights_bytes),
        "device": describe_devices(mesh),
        "kernels": {name: describe_choice(choice) for name, choice in runner.kernels._asdict().items()},
        "cache": _cache(parts),
        "steps": {
            "buckets": sorted(runner.layouts),
            "max_context_tokens": config.resolve_context_tokens(parts.model_config.max_position_embeddings),
            "max_num_running": config.scheduler.max_num_running,
            "max_num_rows": config.scheduler.row_limit,
            "num_layer_groups": len(runner.storage.groups),
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
        "gpu_pages": cache.gpu_pages,
        "gpu_bytes": cache.gpu_pages * storage.page_bytes,
        "gpu_tokens": cache.gpu_pages * cache.chunk_tokens,
        "packed": _packing(parts),
        "slot_bytes": storage.slot_bytes,
        "cpu_slots": cache.cpu_pages,
        "cpu_bytes": cache.cpu_pages * storage.slot_bytes,
        "cpu_tokens": cache.cpu_pages * cache.chunk_tokens,
        "cost_model": parts.costs.kind,
        "cost_profile": parts.costs.source,
        "cost_reason": parts.costs.reason,
        "cost_at_4096": round(parts.costs.ratio_at_4096(cache.chunk_tokens), 2),
    }


def _packing(parts: Assembled) -> str:
    cache = parts.config.cache
    if not cache.cpu_pages:
        return "off: there is no host memory"
    return packing_reason(parts.model_config, cache, parts.runner.dtype)
