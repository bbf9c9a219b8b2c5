"""Models that exceed a device's memory, and their errors."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar

import jax
import pytest

from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, SchedulerConfig, assembly
from pensieve_jax.assembly import make_runner
from pensieve_jax.decoding.device import weights
from pensieve_jax.device.page_budget import PagesDoNotFitError
from pensieve_jax.runtime import device_memory
from pensieve_jax.runtime.device_memory import VARIABLE, allow_device_memory, check_weights_fit, jax_share


def device(limit_bytes, used_bytes):
    stats = None if limit_bytes is None else {"bytes_limit": limit_bytes, "bytes_in_use": used_bytes}
    return SimpleNamespace(memory_stats=lambda: stats, device_kind="a device", platform="gpu")


def test_weights_that_do_not_fit_are_refused():
    check_weights_fit("a model", 1000, [device(1000, 0)])
    check_weights_fit("a model", 1000, [device(None, 0)])
    with pytest.raises(ConfigError, match=r"model is 'a model'.*1,000 bytes.*'?a device.*take 1,001 bytes"):
        check_weights_fit("a model", 1001, [device(1000, 0)])
    with pytest.raises(ConfigError) as refused:
        check_weights_fit("a model", 2500, [device(2600, 0), device(2000, 0)])
    assert str(refused.value) == (
        "model is 'a model', but must be one whose parameters take at most the 2,000 bytes that JAX may use "
        "of a device; its parameters take 2,500 bytes of each of 2 devices; raise "
        "runner.tensor_parallel_size to 3 or more."
    )


def test_a_model_beyond_the_machine_is_refused_before_it_is_loaded(monkeypatch):
    """On a CPU, it would be created until the system kills the process."""
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(weights, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"model is 'random:opt-125m'.*1,048,576 bytes that the machine"):
        make_runner("random:opt-125m", "float32", EngineConfig(), progress=False)


def test_weights_that_run_out_of_memory_while_loading_are_refused_in_a_line(monkeypatch):
    """They would have fit by their size; another program may use the device. Other errors are kept."""

    def load(text):
        def fail(*_, **__):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(weights, "load_model", fail)
        make_runner("random:llama-tiny", "float32", EngineConfig(), progress=False)

    says = r"model is 'random:llama-tiny'.* parameters take [\d,]+ bytes.*tensor_parallel_size.*2\.50GiB"
    with pytest.raises(ConfigError, match=says) as refused:
        load("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB.\nBufferAssignment\n...")
    assert "\n" not in str(refused.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        load("INTERNAL: illegal address")


def test_a_cpu_reports_no_limit():
    assert jax.default_backend() != "cpu" or device_memory.memory_limit_bytes(jax.devices()[0]) is None
    config = EngineConfig(cache=CacheConfig(gpu_memory_fraction=0.125))
    with pytest.raises(ConfigError, match=r"cache\.gpu_memory_fraction is 0\.125.*give cache\.gpu_pages"):
        make_runner("random:llama-tiny", "float32", config, progress=False)


@pytest.fixture
def unset(monkeypatch):
    """Restore both names of the variable afterwards, and unset them first; JAX has no client yet."""
    for name in (VARIABLE, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.setattr(device_memory, "has_clients", lambda: False)


def test_jax_is_given_most_of_a_gpu(unset):
    assert jax_share() == 0.75
    allow_device_memory()
    assert os.environ[VARIABLE] == "0.94" and jax_share() == 0.94


@pytest.mark.parametrize("name", [VARIABLE, "XLA_CLIENT_MEM_FRACTION"])
def test_a_share_that_the_user_has_set_stays(unset, monkeypatch, name):
    """Jaxlib refuses both names at a time."""
    monkeypatch.setenv(name, "0.5")
    allow_device_memory()
    assert jax_share() == 0.5
    assert [one for one in (VARIABLE, "XLA_CLIENT_MEM_FRACTION") if one in os.environ] == [name]


def test_no_share_is_set_once_jax_has_clients(unset, monkeypatch):
    monkeypatch.setattr(device_memory, "has_clients", lambda: True)
    allow_device_memory()
    assert VARIABLE not in os.environ and jax_share() == 0.75


@pytest.mark.parametrize("name", [VARIABLE, "XLA_CLIENT_MEM_FRACTION"])
@pytest.mark.parametrize("value", ["most", "0", "-0.5", "nan", "inf", "90%"])
def test_a_share_that_is_no_number_is_refused_by_the_name_of_its_variable(unset, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for read in (allow_device_memory, jax_share):
        with pytest.raises(ConfigError, match=rf"{name} is '{value}', but must be a number above 0"):
            read()


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ({"gpu_memory_fraction": 0.5}, r"cache\.gpu_memory_fraction is 0\.5.*give cache\.gpu_pages"),
        ({"gpu_memory_fraction": 0.5, "cpu_pages": 0}, r"does not report how much memory"),
    ],
)
def test_a_share_of_an_unknown_memory_is_refused_before_anything_is_loaded_or_made(
    tmp_path, monkeypatch, cache, says
):
    assert jax.default_backend() == "cpu"
    monkeypatch.setattr(weights, "load_model", lambda *_, **__: pytest.fail("loaded"))
    config = EngineConfig(cache=CacheConfig(**cache))
    with pytest.raises(ConfigError, match=says):
        make_runner("random:llama-tiny", "float32", config, progress=False)
    history = tmp_path / "history.sqlite"
    with pytest.raises(ConfigError, match=says):
        LLM("random:llama-tiny", dtype="float32", history=history, config=config)
    assert not history.exists()


def test_a_start_with_fewer_pages_derives_the_batch_again(monkeypatch):
    """A step takes more memory than was expected, so the pages hold fewer requests."""
    started = []

    class Runner:
        """A runner whose steps leave room for a quarter of the pages."""

        layouts: ClassVar[dict[int, object]] = {16: None}
        storage = None
        device_pools: ClassVar[dict[str, object]] = {}

        def __init__(self, model, config, mesh, *, given):
            self.config = config

        def warm_up(self, bar):
            started.append(self.config)
            if len(started) == 1:
                error = PagesDoNotFitError("cache.gpu_memory_fraction", 0.9, "lower")
                error.most = self.config.cache.gpu_pages // 4
                raise error

    monkeypatch.setattr(assembly, "ModelRunner", Runner)
    monkeypatch.setattr(assembly, "memory_in_words", lambda config, storage: "")
    _, config = make_runner("random:llama-tiny", "float32", EngineConfig(), progress=False)
    pages = [one.cache.gpu_pages for one in started]
    assert config is started[-1] and pages[1] == pages[0] // 4
    assert [one.scheduler.max_num_running for one in started] == [32, 16], "one for 512 tokens, 16 at least"
    started.clear()
    asked = EngineConfig(scheduler=SchedulerConfig(max_num_running=20))
    make_runner("random:llama-tiny", "float32", asked, progress=False)
    assert [one.scheduler.max_num_running for one in started] == [20, 20]
