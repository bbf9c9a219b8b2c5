"""jaxlib may pin what an engine is to keep in host memory, unless it is told otherwise or too late."""

from __future__ import annotations

import os

import pytest

from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, RunnerConfig, assembly
from pensieve_jax.runtime import pinned_memory
from pensieve_jax.runtime.pinned_memory import VARIABLE, allow_pinning
from tests.launching import TINY_MODEL

_GIB = 2**30


@pytest.mark.parametrize(
    ("num_bytes", "before", "has_clients", "after"),
    [
        (50 * _GIB, None, False, None),  # 60 of 64
        (100 * _GIB, None, False, "120"),
        (100 * _GIB + 1, None, False, "121"),
        (100 * _GIB, "70", False, "70"),
        (100 * _GIB, None, True, None),
    ],
    ids=["little", "much", "more", "environment", "too late"],
)
def test_the_limit_is_raised(monkeypatch, num_bytes, before, has_clients, after):
    monkeypatch.setenv(VARIABLE, "1")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    monkeypatch.setattr(pinned_memory, "has_clients", lambda: has_clients)
    allow_pinning(num_bytes)
    assert os.environ.get(VARIABLE) == after


@pytest.mark.parametrize("sizes", [{"cpu_bytes": 10**15}, {"cpu_pages": 10**10}], ids=["bytes", "pages"])
def test_an_engine_asks_for_what_it_keeps(monkeypatch, sizes):
    """And for what is on its way there; before the machine is found to have less."""
    asked = []
    monkeypatch.setattr(assembly, "allow_pinning", asked.append)
    config = EngineConfig(cache=CacheConfig(**sizes), runner=RunnerConfig(max_num_staged_pages=100))
    with pytest.raises(ConfigError, match=r"at most [\d,]+ pages"):
        LLM(TINY_MODEL, dtype="float32", config=config)
    page = 2 * 32 * 2 * 2 * 32 * 4  # 2 layers, 32 tokens, keys and values of 2 heads of 32, float32
    assert asked == [sizes.get("cpu_bytes", 10**10 * page) + 100 * page]
