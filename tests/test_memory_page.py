"""docs/memory.md: its example makes configurations, and its bytes per token are those of the models."""

from __future__ import annotations

import re

import jax.numpy as jnp

from model_defs.registry import preset
from pensieve_jax import CacheConfig, EngineConfig
from pensieve_jax.device.kv_storage import chunk_bytes, slot_bytes
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_example_makes_configurations():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "memory.md", "exec"), names)
    configs = [value for value in names.values() if isinstance(value, EngineConfig)]
    assert [config.cache.kv_dtype for config in configs] == [None, "int8"]


def test_bytes_per_token_are_those_of_the_models():
    rows = re.findall(r"^\| (`.*`) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    dtype, cache = jnp.dtype("bfloat16"), CacheConfig()
    num_models = 0
    for names, *shown in rows:
        for name in re.findall(r"`([^`]*)`", names):
            model, size = preset(name), cache.chunk_tokens
            sizes = (
                chunk_bytes(model, size, dtype),
                slot_bytes(model, cache, dtype),
                chunk_bytes(model, size, dtype, "int8"),
            )
            assert [f"{num // size:,}" for num in sizes] == shown, name
            num_models += 1
    assert num_models == 7
