"""Flags of the two tiers: how they become a configuration, and what is refused."""

from __future__ import annotations

import pytest
from absl import flags

from model_defs import source_config
from pensieve_jax import ConfigError
from pensieve_jax.assembly import DEFAULT_MODEL, resolve_model
from tests.launching import load

engine_flags = load("pensieve_jax.commands.engine_flags")


@pytest.fixture
def config(launch):
    """What `engine_config` makes of flags given by name; `launch` takes the flags away again."""

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
def test_no_bytes(text):
    with pytest.raises(ValueError, match="no number of bytes"):
        engine_flags.parse_bytes(text)


def test_defaults_are_the_library_s(config):
    made = config()
    assert made.cache.cpu_pages == 0 and made.cache.cpu_bytes is None
    assert made.cache.prefetch and made.cache.retrieval_priority


def test_a_launcher_may_have_a_default_model_of_its_own(launch):
    engine_flags.define_engine_flags(model="random:opt-tiny")
    assert flags.FLAGS["model"].default == "random:opt-tiny"


@pytest.mark.parametrize("script", ["benchmark_step", "benchmark_swaps"])
def test_sizes_that_a_benchmark_derives_fit_its_default_model(launch, monkeypatch, script):
    """Without `--model`; the contexts are longer than those of the library's default model."""
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


def test_pages_and_bytes_are_one_too_many(config):
    with pytest.raises(ConfigError, match=r"--cpu_bytes is '2GiB'.*beside --cpu_pages"):
        config(cpu_bytes="2GiB", cpu_pages=4)


def test_device_memory_may_be_given_as_a_share(config):
    assert config(gpu_memory_fraction=0.8).cache.gpu_memory_fraction == 0.8


def test_unreadable_bytes_name_the_flag(config):
    with pytest.raises(ConfigError, match=r"--cpu_bytes is 'much'.*16GiB"):
        config(cpu_bytes="much")
