"""A real bfloat16 model whose conversations exceed the device: packing does not change a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    assembly,
)

NUM_ROUNDS, NUM_USERS = 4, 4
PARAMS = SamplingParams(max_tokens=7, ignore_eos=True, logprobs=2)


def config_of(compilation_cache: str | None = None, **cache: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(
            **{"gpu_pages": 10, "cpu_pages": 60, "chunk_tokens": 16, "swap_out_fraction": 0.5} | cache
        ),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(max_logprobs=2, compilation_cache_dir=compilation_cache),
    )


def talk(config: EngineConfig) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Run several interleaved turns; return outputs with logprobs, counters, and the description."""
    rng, outputs = np.random.default_rng(5), []
    with LLM("random:llama-tiny", dtype="bfloat16", config=config, progress=False) as llm:
        for _ in range(NUM_ROUNDS):
            for user in range(NUM_USERS):
                prompt = rng.integers(3, 250, 20).tolist()
                (output,) = llm.generate([prompt], PARAMS, conversation_ids=[f"user {user}"])
                outputs.append((output.token_ids, output.logprobs, output.usage))
        return outputs, llm.stats(), llm.describe()["cache"]


@pytest.mark.long
def test_packed_kv_cache_gives_identical_results(compilation_cache: str) -> None:
    """Histories came back from host memory, in 26 of 32 bytes; tokens and log-probabilities are equal."""
    packed, stats, cache = talk(config_of(compilation_cache))
    raw, raw_stats, raw_cache = talk(config_of(compilation_cache, pack_host=False))  # its steps are the same
    assert packed == raw
    assert stats["num_lost_copies"] == raw_stats["num_lost_copies"] == 0
    assert sum(usage.swapped_in_tokens for _, _, usage in packed) > 500
    for name in ("swapped_in_bytes", "swapped_out_bytes", "num_swap_in_copies"):
        share = 1 if name.startswith("num") else 26 / 32
        assert stats[name] == share * raw_stats[name] > 0
    assert cache["packed"] == "on: 81.2% of the bytes of bfloat16, lossless"
    assert raw_cache["packed"] == "off: cache.pack_host is False"
    assert (
        cache["slot_bytes"] * 32 == raw_cache["slot_bytes"] * 26
        and cache["page_bytes"] == raw_cache["page_bytes"]
    )


def test_the_same_host_memory_holds_more_packed_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the reported sizes; nothing is compiled for that."""
    monkeypatch.setattr(assembly.ModelRunner, "warm_up", lambda self, progress=None: None)
    page_bytes = 2 * 16 * 2 * 2 * 32 * 2
    config = config_of(cpu_pages=0, cpu_bytes=50 * page_bytes)
    with LLM("random:llama-tiny", dtype="bfloat16", config=config, progress=False) as llm:
        cache = llm.describe()["cache"]
    assert cache["cpu_slots"] == 50 * 32 // 26 == 61
    assert cache["cpu_bytes"] == 61 * cache["slot_bytes"] <= 50 * page_bytes


def test_an_impossible_packing_is_refused() -> None:
    config = EngineConfig(cache=CacheConfig(pack_host=True, cpu_pages=10))
    with pytest.raises(ConfigError, match=r"cache\.pack_host is True, but must be None or False.*float32"):
        LLM("random:llama-tiny", dtype="float32", config=config, progress=False)
