"""Flags of the two tiers: the resulting configuration, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
from absl import flags

from model_defs import source_config
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.options import options_of
from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model
from tests.launching import load

engine_flags = load("pensieve_jax.commands.engine_flags")


@pytest.fixture
def config(launch):
    """Return the function that builds `engine_config` from named flags; `launch` restores the flags."""

    def make(**values):
        engine_flags.define_engine_flags()
        flags.FLAGS(["test", *(f"--{name}={value}" for name, value in values.items())])
        return engine_flags.engine_config()

    return make


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("16GiB", 16 * 2**30),
        ("40GB", 40 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("2tb", 2 * 10**12),
        ("7B", 7),
        ("1e9", 10**9),
    ],
)
def test_bytes(text, num_bytes):
    assert engine_flags.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "16G", "16 apples", "-1GB", "1GBs", "1e999"])
def test_invalid_byte_sizes_are_refused(text):
    with pytest.raises(ValueError, match="not a number of bytes"):
        engine_flags.parse_bytes(text)


def test_all_commands_have_the_same_defaults(launch, monkeypatch):
    """Then each loads the steps that another one has compiled."""
    seen = [engine_flags.command_config(str(engine_flags.CACHE_DIR))]
    for command in ("chat", "generate", "serve"):
        monkeypatch.setattr(load(command), "main", lambda: seen.append(engine_flags.engine_config()) or 0)
        assert launch(command, shared_llm=False) == 0
    assert seen == seen[:1] * 4


def test_defaults_are_the_library_s(config):
    made = config()
    assert made.cache.cpu_pages is None and made.cache.cpu_bytes is None and made.cache.gpu_pages is None
    assert made.cache.prefetch and made.cache.retrieval_priority


SAID_BY_OTHERS = ("max_num_batched_tokens",)


def test_every_field_has_a_flag_with_its_help_and_default(config):
    """The help is the field's, without None; the default too, unless another flag determines it."""
    assert config() == EngineConfig(), "flags that are left out change nothing"
    for kind in (CacheConfig, SchedulerConfig, RunnerConfig):
        for field in dataclasses.fields(kind):
            (option,) = (option for option in options_of(kind) if option.name == field.name)
            flag = flags.FLAGS[field.name]
            choices = f"<{'|'.join(option.limit.choices)}>: " if option.kind is str else ""  # absl's
            said = flag.help.removeprefix(choices if option.limit.choices else "")
            assert "None" not in said
            if "None" not in option.text:
                assert said.startswith(option.text)
            assert said == option.text or field.default is None or field.name in SAID_BY_OTHERS, field.name
            if field.name not in SAID_BY_OTHERS:
                assert flag.default == field.default, field.name
    assert flags.FLAGS["stateful"].help == options_of(EngineConfig)[0].text


NOT_THE_DEFAULTS = {
    EngineConfig: {"stateful": False, "tool_call_parser": "hermes", "reasoning_parser": "think"},
    CacheConfig: {
        **{"gpu_memory_fraction": 0.7, "cpu_pages": 12, "chunk_tokens": 16, "policy": "lru"},
        **{
            "engines_on_host": 3,
            "kv_dtype": "int8",
            "pack_host": False,
            "cost_profile": "costs.json",
            "reserve_fraction": 0.2,
            "swap_out_fraction": 0.5,
        },
        **{"retrieval_priority": False, "prefetch": False, "max_idle_conversations": 7, "idle_ttl_s": 60.5},
    },
    SchedulerConfig: {
        **{"max_num_running": 9, "max_num_batched_tokens": 640, "max_num_rows": 11, "prompt_steps": 8},
        **{"speculation": "history", "max_draft_tokens": 5},
        **{"max_context_tokens": 99, "max_num_buckets": 3, "unified": False, "prompt_order": "arrival"},
        "target_tpot_ms": 21.5,
    },
    RunnerConfig: {
        **{"attention_backend": "xla", "tensor_parallel_size": 2, "num_layer_groups": 3},
        **{"max_num_staged_pages": 5, "max_logprobs": 2, "max_banned_ids": 4, "random_seed": 6},
        **{"max_position_embeddings": 512, "compilation_cache_dir": "compiled", "all_reduce": "jax_triton"},
        **{"decode_matmul": "xla", "expert_matmul": "xla", "penalties": False, "weights_dtype": "int8"},
    },
}


def test_every_flag_reaches_its_field(config):
    """Flags with another format are excluded: bytes and `token_buckets`."""
    every = {name: value for values in NOT_THE_DEFAULTS.values() for name, value in values.items()}
    made = config(**every)
    left = set()
    for group in (made, made.cache, made.scheduler, made.runner):
        for option in options_of(type(group)):
            if option.name in every:
                value = getattr(group, option.name)
                assert value == every[option.name] != option.default, option.name
            elif not dataclasses.is_dataclass(option.kind):
                left.add(option.name)
    assert left == {
        *("gpu_pages", "cpu_memory_fraction", "cpu_bytes", "gpu_reserved_bytes", "token_buckets"),
    }


def test_an_exact_number_and_a_share_of_the_other_tier_reach_their_fields(config):
    cache = config(gpu_pages=40, cpu_memory_fraction=0.25).cache
    assert (cache.gpu_pages, cache.cpu_memory_fraction) == (40, 0.25)


@pytest.mark.parametrize("values", [{"gpu_pages": 4, "gpu_memory_fraction": 0.5}])
def test_a_number_and_a_share_exclude_each_other(config, values):
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction is 0\.5.*cache\.gpu_pages \(4\)"):
        config(**values)


@pytest.mark.parametrize(("text", "num_bytes"), [("2GiB", 2**31), ("0", 0)])
def test_reserved_bytes_are_read_as_bytes(config, text, num_bytes):
    assert config(gpu_reserved_bytes=text).cache.gpu_reserved_bytes == num_bytes


def test_unreadable_reserved_bytes_name_the_flag(config):
    with pytest.raises(ConfigError, match="--gpu_reserved_bytes is 'much'"):
        config(gpu_reserved_bytes="much")


def test_step_sizes_arrive_and_say_how_large_a_step_is(config):
    assert config(token_buckets="64,256").scheduler == SchedulerConfig(
        max_num_batched_tokens=256, token_buckets=(64, 256)
    )


def test_unreadable_step_sizes_name_the_flag(config):
    with pytest.raises(ConfigError, match=r"--token_buckets is 'a,b', but must be integers separated by"):
        config(token_buckets="a,b")


def test_a_value_beyond_its_limit_names_the_field(config):
    with pytest.raises(ConfigError, match=r"cache\.reserve_fraction is 1\.5, but must be in \[0, 1\)"):
        config(reserve_fraction=1.5)


@pytest.mark.parametrize(
    ("values", "num_tokens"),
    [
        ({}, 512),
        ({"max_num_running": 600, "chunk_tokens": 16}, 616),
        ({"token_buckets": "64,300"}, 300),
        ({"max_num_batched_tokens": 400}, 400),
    ],
)
def test_by_default_a_step_holds_a_chunk_beside_all_running_turns(config, values, num_tokens):
    assert config(**values).scheduler.max_num_batched_tokens == num_tokens


@pytest.mark.parametrize("name", ["gpu_pages", "cpu_bytes", "max_num_rows", "token_buckets"])
def test_sizes_that_the_benchmark_derives_are_refused_as_flags(config, name):
    config(**{name: 128})
    with pytest.raises(ConfigError, match=f"--{name} is"):
        engine_flags.refuse_sizes()


def test_a_launcher_may_have_its_own_default_model(launch):
    engine_flags.define_engine_flags(model="random:opt-tiny")
    assert flags.FLAGS["model"].default == "random:opt-tiny"


@pytest.mark.parametrize("script", ["benchmark_step", "benchmark_swaps"])
def test_sizes_that_a_benchmark_derives_fit_its_default_model(launch, monkeypatch, script):
    """This is without `--model`; the contexts are longer than those of the library's default model."""
    module = load(script)
    seen = []

    def main():
        assert flags.FLAGS["model"].using_default_value  # `launch` put no smaller one in its place
        config = module.sized_config(*([module.cases()] if script == "benchmark_step" else []))
        model, _ = engine_flags.model_limits()
        seen.append(config.resolve_context_tokens(model.max_position_embeddings))
        return 0

    monkeypatch.setattr(module, "main", main)
    assert launch(script, shared_llm=False) == 0
    library = source_config(resolve_model(DEFAULT_MODEL))
    assert seen[0] > library.max_position_embeddings


def test_every_flag_arrives(config):
    made = config(
        cpu_pages=12,
        cost_profile="costs.json",
        swap_out_fraction=0.5,
        retrieval_priority=False,
        prefetch=False,
        num_layer_groups=3,
        max_num_staged_pages=5,
    )
    cache, runner = made.cache, made.runner
    assert (cache.cpu_pages, cache.cpu_bytes, cache.cost_profile) == (12, None, "costs.json")
    assert (cache.swap_out_fraction, cache.retrieval_priority, cache.prefetch) == (0.5, False, False)
    assert (runner.num_layer_groups, runner.max_num_staged_pages) == (3, 5)


def test_bytes_arrive(config):
    assert config(cpu_bytes="2GiB").cache.cpu_bytes == 2**31


def test_pages_and_bytes_exclude_each_other(config):
    with pytest.raises(ConfigError, match=r"--cpu_bytes is '2GiB'.*with --cpu_pages"):
        config(cpu_bytes="2GiB", cpu_pages=4)


def test_device_memory_may_be_given_as_a_share(config):
    assert config(gpu_memory_fraction=0.8).cache.gpu_memory_fraction == 0.8


def test_unreadable_bytes_name_the_flag(config):
    with pytest.raises(ConfigError, match=r"--cpu_bytes is 'much'.*16GiB"):
        config(cpu_bytes="much")
