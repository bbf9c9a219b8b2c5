"""What an engine turned out to be on this machine, as plain values.

Owns: the keys of `LLM.describe`, what each means, and how they print.
Does not know: how anything was chosen; the parts say.
Called by: `LLM`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from model_defs import num_parameters
from pallas_kernels.ragged_paged_attention import BackendChoice
from pensieve_jax.assembly import Assembled
from pensieve_jax.device.kv_storage import packing_reason

_COLUMNS: Final = 110


class Description(dict[str, Any]):
    """A dict like any other, which prints with a line for every value."""

    def __str__(self) -> str:
        """For people: one group under the other."""
        return "\n".join(_lines(self, ""))


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    """A line for every value, values aligned; a group's own lines stand below its name."""
    flat = [name for name, value in values.items() if not isinstance(value, Mapping) or "reason" in value]
    width = max(map(len, flat), default=0)
    for name, value in values.items():
        if name not in flat:
            yield f"{indent}{name}"
            yield from _lines(value, f"{indent}  ")
        else:
            start = f"{indent}{name:{width}}  "
            yield textwrap.fill(
                _shown(value), _COLUMNS, initial_indent=start, subsequent_indent=" " * len(start)
            )


def _shown(value: object) -> str:
    if isinstance(value, Mapping):  # a kernel
        return f"{value['backend']}: {value['reason']}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe(parts: Assembled) -> Description:
    """Plain values, which JSON can hold; printed, they are a line each.

    Keys:
      model: `name` as it was given, `architecture`, `num_layers`, `hidden_size`, `num_heads`, `num_kv_heads`,
        `head_dim`, `intermediate_size`, `vocab_size`, `num_parameters`, and the `dtype` that it runs in, with
        `weights_bytes` a device.
      device: `platform`, `kind` and `count` of the devices that share the model.
      kernels: for `attention`, `residual_norm`, `sampling_cutoff` and `page_copy` the `backend` and the
        `reason` for it; None for a kernel that nothing calls.
      cache: `stateful`, `policy`, for one that learns the `order` that it follows now and why (else None),
        `chunk_tokens`, the `kv_dtype` that pages are stored as, `page_bytes` of a page on one device, and
        what both tiers hold: `gpu_pages`, `gpu_bytes` a device and `gpu_tokens`, the dummy page not counted;
        `cpu_slots`, `cpu_bytes` of all devices together and `cpu_tokens`. `packed` says whether chunks are
        packed in host memory and on the way there, and why or why not; `slot_bytes` is what one takes there,
        all devices together. `cost_model` is "measured", with the file as `cost_profile`, or "analytic".
      steps: `buckets` in tokens, ascending; `max_context_tokens`, `max_num_running`, `max_num_rows` and
        `num_layer_groups`.
      compilation_cache_dir: where compiled steps are kept, or None.
    """
    config = parts.config
    values = {
        "model": _model(parts),
        "device": _device(parts),
        "kernels": {name: _choice(choice) for name, choice in parts.runner.kernels._asdict().items()},
        "cache": _cache(parts),
        "steps": {
            "buckets": sorted(parts.runner.layouts),
            "max_context_tokens": config.resolve_context_tokens(parts.model_config.max_position_embeddings),
            "max_num_running": config.scheduler.max_num_running,
            "max_num_rows": config.scheduler.row_limit,
            "num_layer_groups": len(parts.runner.storage.groups),
        },
        "compilation_cache_dir": config.runner.compilation_cache_dir,
    }
    return Description(values)


def _model(parts: Assembled) -> dict[str, Any]:
    model = parts.model_config
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    return {
        "name": parts.model_name,
        "architecture": model.architecture,
        **{name: getattr(model, name) for name in (*sizes, "vocab_size")},
        "num_parameters": num_parameters(model),
        "dtype": parts.runner.dtype.name,
        "weights_bytes": parts.runner.weights_bytes,
    }


def _device(parts: Assembled) -> dict[str, Any]:
    devices = list(parts.runner.storage.sharding.mesh.devices.flat)
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


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
        "slot_bytes": storage.chunk_bytes,
        "cpu_slots": cache.cpu_pages,
        "cpu_bytes": cache.cpu_pages * storage.chunk_bytes,
        "cpu_tokens": cache.cpu_pages * cache.chunk_tokens,
        "cost_model": "analytic" if cache.cost_profile is None else "measured",
        "cost_profile": cache.cost_profile,
    }


def _packing(parts: Assembled) -> str:
    cache = parts.config.cache
    if not cache.cpu_pages:
        return "off: there is no host memory"
    return packing_reason(parts.model_config, cache, parts.runner.dtype)


def _choice(choice: BackendChoice | None) -> dict[str, str] | None:
    return None if choice is None else {"backend": choice.name, "reason": choice.reason}
