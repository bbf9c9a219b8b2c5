"""The command of a serving benchmark, compared with its document's account of the run.

Owns: which flags of `benchmark_serving` a document repeats and where, and the bytes of KV cache that follow
from a model's shape, the pages and the data types.
Does not know: requests or provenance.
Called by `pages.result_documents`.

Settings are compared only if the command names them, except for the flags in `_DEFAULTS`, whose defaults have
not changed since documents were recorded.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model_defs.registry import PRESETS

PROGRAM = "benchmark_serving"
_DEFAULTS = {"system": "pensieve", "seed": "0", "max_client_lag_s": "0.01"}
_OPTIONS = {  # vLLM's option names by flag
    **{"gpu_pages": "num_gpu_blocks_override", "chunk_tokens": "block_size", "dtype": "dtype"},
    **{"max_num_running": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens"},
    **{"kv_dtype": "kv_cache_dtype", "max_position_embeddings": "max_model_len"},
    **{"tensor_parallel_size": "tensor_parallel_size", "vllm_offload_prompt_only": "offload_prompt_only"},
}
_UNNAMED = {"kv_dtype": (None, "auto"), "vllm_offload_prompt_only": (False,)}
"""The document's values if its command lacks the flag."""
_VALUES = {"float8_e4m3fn": ("float8_e4m3fn", "fp8")}  # vLLM's name is the second one
_CONVERTED = ("cpu_bytes", "cpu_pages", "gpu_memory_fraction", "gpu_reserved_bytes")
"""Flags whose values a configuration holds in another form."""
_SETTINGS = ("model", "dtype", "think", "time_scale", "mid_life_s", "warm_up_s", "window_s", "drain_s")
_SIZES = ("gpu_pages", "kv_dtype", "max_num_running", "max_num_batched_tokens")
"""Fields that a document must repeat if its command names them: of users, and of an engine."""
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SCALE_BYTES = 2  # per token, in whole rows of a page; only this engine's 8-bit pages hold scales
_PAGE_TOKENS = 32


def read_flags(command: str) -> dict[str, str]:
    """Return the text of each flag of a command; that of a flag without a value is empty."""
    found: dict[str, str] = {}
    name = None
    for word in shlex.split(command):
        if word.startswith("--"):
            name, has_value, text = word[2:].partition("=")
            found[name] = text
            name = None if has_value else name
        elif name is not None:
            found[name], name = word, None
    return found


def runs(command: str, program: str) -> bool:
    """Return whether a command runs a program, as a file or as a module; a flag's value does not count."""
    return re.search(rf"(?<![\w=-]){program}(?![\w-])", command) is not None


def system_faults(system: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield the contradictions between a system's part of a document and its command."""
    flags = read_flags(command)
    name, *changes = str(system.get("system")).split(", ")
    if name not in _systems(flags):
        yield f"system is {name}; the command has {' and '.join(_systems(flags))}"
    if ("prompts only" in changes) != ("vllm_offload_prompt_only" in flags):
        yield f"system is {system.get('system')}; the command says otherwise of --vllm_offload_prompt_only"
    loop = "closed loop" if "closed_loop" in flags else "open loop"
    if system.get("loop") != loop:
        yield f"loop is {system.get('loop')}; by the command it is {loop}"
    settings = {flag: system[flag] for flag in ("model", "dtype") if flag in system}
    settings |= dict(system.get("settings", {}))
    yield from _differences(settings, {"seed": _DEFAULTS["seed"]} | flags, _SETTINGS)
    if "config" in system:
        yield from _differences(_leaves(system["config"]), flags, _SIZES)
    if "options" in system:
        options = _leaves(system["options"])
        named = {flag: options[option] for flag, option in _OPTIONS.items() if option in options}
        yield from _differences(named, flags, _SIZES)
    expected = kv_bytes(system, flags)
    if expected is not None and system.get("kv_bytes") != expected:
        yield f"kv_bytes is {system.get('kv_bytes')}; the model's shape and the pages give {expected}"


def point_faults(point: Mapping[str, Any], system: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield the contradictions between a load point and its command."""
    flags = read_flags(command)
    is_closed = "closed_loop" in flags
    if is_closed or "recorded_arrivals" in flags:
        rates: list[float | None] | None = [None]
    elif "loads" in flags:
        loads = [load.partition(":") for load in flags["loads"].split(",")]
        rates = [float(rate) for name, _, rate in loads if name == str(system.get("system")).split(", ")[0]]
    else:
        rates = [float(rate) for rate in flags["rates"].split(",")] if "rates" in flags else None
    if rates is not None and point.get("rate") not in rates:
        yield f"rate is {point.get('rate')}; the command has {rates}"
    seeds = flags.get("seeds") or flags.get("seed", _DEFAULTS["seed"])
    if str(point.get("seed")) not in seeds.split(","):
        yield f"seed is {point.get('seed')}; the command has {seeds}"
    arrivals = flags.get("arrivals", "poisson").split(",")
    if (point.get("arrivals") or "poisson") not in arrivals:
        yield f"arrivals is {point.get('arrivals')}; the command has {arrivals}"
    lag = flags.get("max_client_lag_s", _DEFAULTS["max_client_lag_s"])
    allowed = None if is_closed or lag == "inf" else float(lag)
    if point.get("max_client_lag_s") != allowed:
        yield f"max_client_lag_s is {point.get('max_client_lag_s')}; the command has {allowed}"


def kv_bytes(system: Mapping[str, Any], flags: Mapping[str, str]) -> int | None:
    """Return the bytes of KV cache on all devices, or None if the document lacks the inputs."""
    config, options = _leaves(system.get("config")), _leaves(system.get("options"))
    if "kv_bytes" in config:
        return int(config["kv_bytes"] * config["tensor_parallel_size"])
    model = PRESETS.get(str(system.get("model")).removeprefix("random:"))
    pages = config.get("gpu_pages") or options.get("num_gpu_blocks_override") or flags.get("gpu_pages")
    if model is None or pages is None:
        return None
    dtype = str(system.get("dtype"))
    item_bytes = 1 if "kv_dtype" in flags else _ITEM_BYTES.get(model.dtype if dtype == "auto" else dtype)
    if item_bytes is None:
        return None
    is_ours = bool(config) or system.get("system") == "http"
    rows = int(config.get("chunk_tokens") or options.get("block_size") or _PAGE_TOKENS)
    if is_ours and item_bytes == 1:
        rows += math.ceil(_SCALE_BYTES * rows / model.head_dim)
    return int(pages) * rows * 2 * model.num_layers * model.num_kv_heads * model.head_dim * item_bytes


def _systems(flags: Mapping[str, str]) -> list[str]:
    if "loads" in flags:
        return [load.partition(":")[0] for load in flags["loads"].split(",")]
    return [flags.get("system", _DEFAULTS["system"])]


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the values of nested mappings, by the innermost name."""
    found: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        found |= _leaves(value) if isinstance(value, Mapping) else {name: value}
    return found


def _differences(
    settings: Mapping[str, Any], flags: Mapping[str, str], needed: Sequence[str]
) -> Iterator[str]:
    """Yield values that contradict the command, and missing values of `needed` that the command names."""
    for name in needed:
        if name in flags and name not in settings:
            yield f"{name} is missing; the command has {flags[name]}"
    for name, value in settings.items():
        if name in _CONVERTED:
            continue
        if name in flags:
            if not _is_value_of(value, flags[name]):
                yield f"{name} is {value}; the command has --{name}={flags[name]}".removesuffix("=")
        elif f"no{name}" in flags:
            if value is not False:
                yield f"{name} is {value}; the command has --no{name}"
        elif value not in _UNNAMED.get(name, (value,)):
            yield f"{name} is {value}; the command does not name it"


def _is_value_of(value: Any, text: str) -> bool:
    """Return whether a flag's text gives this value."""
    if isinstance(value, bool):
        return value is (text.lower() in ("", "true", "1"))
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    if isinstance(value, list):
        return [str(one) for one in value] == text.split(",")
    return value in _VALUES.get(text, (text,))
