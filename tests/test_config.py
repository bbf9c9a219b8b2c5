"""Every invalid configuration value raises an error that names the field and the limit."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pensieve_jax.config import (
    POLICIES,
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SchedulerConfig,
)
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.options import options_of

ONE_OF_TWO = ": give one of the two."
BAD = [
    *[(CacheConfig, "gpu_pages", value, "at least 2") for value in (1, 0, -3, 2.5, True, "8")],
    *[
        (CacheConfig, field, value, "above 0")
        for field in ("gpu_memory_fraction", "cpu_memory_fraction")
        for value in (0, -0.5, 1.01, math.nan, "a", True)
    ],
    *[(CacheConfig, "cpu_pages", value, "at least 0") for value in (-1, 0.5, True)],
    *[(CacheConfig, "cpu_bytes", value, "at least 0") for value in (-1, 1e9, True, "1GB")],
    *[(CacheConfig, "swap_out_fraction", value, r"\[0, 1\)") for value in (-0.1, 1, math.nan, "a", None)],
    *[(CacheConfig, "retrieval_priority", value, "True or False") for value in (0, None)],
    *[(CacheConfig, "prefetch", value, "True or False") for value in (1, "yes")],
    *[(CacheConfig, "cost_profile", value, "'analytic'.*path") for value in (3, True, None, "")],
    *[(CacheConfig, "chunk_tokens", value, "16, 32, 64") for value in (0, 8, 33, 128, 32.0, True)],
    *[(CacheConfig, "policy", value, "retention") for value in ("", "LRU", "fifo", None, 3)],
    *[(CacheConfig, "reserve_fraction", value, r"\[0, 1\)") for value in (-0.1, 1, 1.5, math.nan, "a", None)],
    *[(CacheConfig, "max_idle_conversations", value, "at least 1") for value in (0, -1, 1.5, True)],
    *[(CacheConfig, "idle_ttl_s", value, "above 0") for value in (0, -1.0, math.nan, "a")],
    *[(SchedulerConfig, "max_num_running", value, "at least 1") for value in (0, -1, 1.5, True)],
    *[(SchedulerConfig, "max_num_batched_tokens", value, "at least 1") for value in (0, -1, 64.0, None)],
    *[(SchedulerConfig, "max_num_rows", value, "at least max_num_running") for value in (0, -1, 64.5)],
    *[(SchedulerConfig, "max_context_tokens", value, "at least 2") for value in (0, 1, 3.5, True)],
    *[
        (SchedulerConfig, "token_buckets", value, r"ends? with max_num_batched_tokens \(512\)")
        for value in ((), (16, 1024), (512, 16), (16, 16, 512), (0, 512), (16.0, 512), ("a", 512), 512)
    ],
    *[(SchedulerConfig, "max_num_buckets", value, "at least 1") for value in (0, -1, True, 2.0)],
    *[(RunnerConfig, "attention_backend", value, "xla") for value in ("", "cuda", None)],
    *[(RunnerConfig, "tensor_parallel_size", value, "at least 1") for value in (0, -2, 1.0, True)],
    *[(RunnerConfig, "num_layer_groups", value, "at least 1") for value in (0, 1.5)],
    *[(RunnerConfig, "max_num_staged_pages", value, "at least 1") for value in (0, None)],
    *[(RunnerConfig, "max_logprobs", value, "at least 1") for value in (0, -1, 2.0)],
    *[(RunnerConfig, "max_banned_ids", value, "at least 1") for value in (0, -1, None)],
    *[(RunnerConfig, "random_seed", value, "at least 0") for value in (-1, 0.5, None, True)],
    *[(RunnerConfig, "max_position_embeddings", value, "at least 2") for value in (0, 1, 2.5)],
]


@pytest.mark.parametrize(("kind", "field", "value", "limit"), BAD, ids=lambda value: repr(value)[:30])
def test_an_impossible_value_names_its_field_and_limit(kind, field, value, limit):
    group = kind.__name__.removesuffix("Config").lower()
    with pytest.raises(ConfigError, match=limit) as caught:
        kind(**{field: value})
    assert caught.value.field == f"{group}.{field}" and caught.value.value is value
    assert f"{group}.{field} is {value!r}" in str(caught.value)


def test_a_share_of_memory_is_not_yet_a_number_of_pages():
    config = EngineConfig(cache=CacheConfig(gpu_memory_fraction=0.9))
    assert config.resolve_context_tokens(10**6) == 10**6, "the pool is still to be sized"
    assert config.with_gpu_pages(100).resolve_context_tokens(10**6) == 3200


def test_there_are_at_least_as_many_engines_on_a_host_as_replicas():
    assert EngineConfig().with_engines_on_host(1) == EngineConfig()
    assert EngineConfig().with_engines_on_host(4).cache.engines_on_host == 4
    beside_others = EngineConfig(cache=CacheConfig(engines_on_host=8))
    assert beside_others.with_engines_on_host(4) == beside_others


def test_defaults_and_limits_work():
    assert EngineConfig() == EngineConfig(
        cache=CacheConfig(), scheduler=SchedulerConfig(), runner=RunnerConfig()
    )
    for policy in POLICIES:
        CacheConfig(policy=policy, gpu_pages=2, reserve_fraction=0, idle_ttl_s=math.inf)
    SchedulerConfig(max_num_running=1, max_num_batched_tokens=8, max_num_rows=1, token_buckets=(8,))


@pytest.mark.parametrize("kind", [CacheConfig, SchedulerConfig, RunnerConfig, EngineConfig])
def test_the_docstring_lists_every_field_with_its_limit_and_default(kind):
    told = " ".join(kind.__doc__.split())
    assert told.index("Attributes:") > 0 and len(options_of(kind)) == len(dataclasses.fields(kind))
    for option in options_of(kind):
        assert f" {option.name}: {option.text}" in told
        if not dataclasses.is_dataclass(option.kind):
            assert f"{option.text} Default: {option.default!r}." in told
    if kind is CacheConfig:
        assert "or four contexts. Must be None or an integer of at least 2. Default: None." in told


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (
            CacheConfig,
            {"gpu_pages": 1},
            "cache.gpu_pages is 1, but must be None or an integer of at least 2.",
        ),
        (CacheConfig, {"policy": "x"}, f"cache.policy is 'x', but must be one of {POLICIES}."),
        (CacheConfig, {"idle_ttl_s": 0}, "cache.idle_ttl_s is 0, but must be None or above 0 seconds."),
        (
            CacheConfig,
            {"cpu_bytes": 1.5},
            "cache.cpu_bytes is 1.5, but must be None or an integer number of bytes, at least 0.",
        ),
        (
            CacheConfig,
            {"cpu_bytes": 4, "cpu_pages": 3},
            "cache.cpu_bytes is 4, but must be None beside cache.cpu_pages (3): give one of the two.",
        ),
        (
            CacheConfig,
            {"gpu_memory_fraction": 0.5, "gpu_pages": 3},
            f"cache.gpu_memory_fraction is 0.5, but must be None beside cache.gpu_pages (3){ONE_OF_TWO}",
        ),
        (
            CacheConfig,
            {"cpu_memory_fraction": 0.5, "cpu_pages": 0},
            f"cache.cpu_memory_fraction is 0.5, but must be None beside cache.cpu_pages (0){ONE_OF_TWO}",
        ),
        (
            CacheConfig,
            {"cpu_memory_fraction": 0.5, "cpu_bytes": 9},
            f"cache.cpu_memory_fraction is 0.5, but must be None beside cache.cpu_bytes (9){ONE_OF_TWO}",
        ),
        (
            SchedulerConfig,
            {"max_num_rows": 3, "max_num_running": 4},
            "scheduler.max_num_rows is 3, but must be None or at least max_num_running (4).",
        ),
        (
            RunnerConfig,
            {"compilation_cache_dir": 3},
            "runner.compilation_cache_dir is 3, but must be None or a path as a string.",
        ),
        (EngineConfig, {"stateful": 1}, "stateful is 1, but must be True or False."),
        (EngineConfig, {"cache": 4}, "cache is 4, but must be a CacheConfig."),
    ],
)
def test_messages_are_whole_sentences(kind, value, message):
    with pytest.raises(ConfigError) as caught:
        kind(**value)
    assert str(caught.value) == message


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="gpu_page"):
        CacheConfig(gpu_page=4)


def test_groups_of_the_wrong_kind_are_refused():
    for name in ("cache", "scheduler", "runner"):
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{name: {"gpu_pages": 4}})


def test_a_step_must_have_room_for_a_chunk_beside_every_decode():
    for options, least in (({"max_num_running": 64}, 96), ({}, 33)):
        with pytest.raises(
            ConfigError, match=rf"scheduler.max_num_batched_tokens is {least - 1}.*\({least}\)"
        ):
            EngineConfig(scheduler=SchedulerConfig(**options, max_num_batched_tokens=least - 1))
        EngineConfig(scheduler=SchedulerConfig(**options, max_num_batched_tokens=least))


def test_the_context_is_the_requested_one_or_what_model_and_pool_allow():
    config = EngineConfig(cache=CacheConfig(gpu_pages=4))
    assert config.resolve_context_tokens(1000) == 128
    assert config.resolve_context_tokens(100) == 100
    asked = EngineConfig(cache=CacheConfig(gpu_pages=4), scheduler=SchedulerConfig(max_context_tokens=128))
    assert asked.resolve_context_tokens(1000) == 128
    with pytest.raises(ConfigError, match=r"max_context_tokens is 128.*the model's 127 positions"):
        asked.resolve_context_tokens(127)
    few = EngineConfig(cache=CacheConfig(gpu_pages=3), scheduler=SchedulerConfig(max_context_tokens=97))
    with pytest.raises(ConfigError, match=r"cache.gpu_pages is 3, but must be at least 4"):
        few.resolve_context_tokens(1000)


def test_staging_holds_a_gigabyte():
    """Small pages use the requested number; large ones fewer, but enough for a long history."""
    config = EngineConfig(runner=RunnerConfig(max_num_staged_pages=110))
    held = [config.with_staged_pages(size).runner.max_num_staged_pages for size in (10**6, 10**7, 10**9)]
    assert held == [110, 100, 64]
    few = EngineConfig(runner=RunnerConfig(max_num_staged_pages=4))
    assert few.with_staged_pages(10**9) == few


@pytest.mark.parametrize(("on_gpu", "num_buckets"), [(True, 12), (False, 4)])
def test_step_sizes_follow_the_device_unless_they_are_given(on_gpu, num_buckets):
    config = EngineConfig().with_num_buckets(on_gpu=on_gpu)
    assert config.scheduler.max_num_buckets == config.scheduler.bucket_limit == num_buckets
    given = EngineConfig(scheduler=SchedulerConfig(max_num_buckets=3))
    assert given.with_num_buckets(on_gpu=on_gpu) == given and given.scheduler.bucket_limit == 3


def test_the_reserve_is_a_share_of_the_pool_rounded_up():
    for gpu_pages, reserve_pages in ((40, 4), (70, 7), (9, 1), (11, 2), (30, 3)):  # 70 * 0.1 is above 7
        assert CacheConfig(gpu_pages=gpu_pages).reserve_pages == reserve_pages
    assert CacheConfig(gpu_pages=9, reserve_fraction=0.0).reserve_pages == 0
