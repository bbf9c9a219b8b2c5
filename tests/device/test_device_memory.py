"""How many pages fit into a share of a device's memory, and what is said where that cannot work."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig, assembly
from pensieve_jax import config as config_module
from pensieve_jax.assembly import make_runner
from pensieve_jax.device import device_memory
from pensieve_jax.device.device_memory import check_weights_fit, least_device, num_pages_in, reserved_bytes


def device(limit_bytes, used_bytes):
    stats = None if limit_bytes is None else {"bytes_limit": limit_bytes, "bytes_in_use": used_bytes}
    return SimpleNamespace(memory_stats=lambda: stats, device_kind="a device", platform="gpu")


def test_pages_are_what_the_weights_leave():
    """Of the fullest device, beside chunks in transit and the dummy page."""
    assert num_pages_in(0.9, [device(1000, 100)], 10, 0) == 79
    assert num_pages_in(0.9, [device(1000, 100)], 10, 300) == 49
    assert num_pages_in(1.0, [device(1000, 100), device(1000, 505)], 10, 0) == 48


def test_a_fraction_is_the_same_share_of_one_device_and_of_several():
    """Of each by itself: what is in use there, and what exchanges need, whose default one device has not."""
    assert num_pages_in(0.9, [device(1000, 100)] * 2, 10, 0) == num_pages_in(0.9, [device(1000, 100)], 10, 0)
    assert num_pages_in(0.9, [device(1000, 100)] * 2, 10, 300, 200) == 29
    assert num_pages_in(0.9, [device(1000, 100), device(700, 100)], 10, 0, 200) == 32
    assert (reserved_bytes(None, 1), reserved_bytes(None, 2), reserved_bytes(0, 2)) == (0, 2**30, 0)
    assert least_device([device(3, 0), device(None, 0), device(2, 0)]).memory_stats()["bytes_limit"] == 2


def test_what_cannot_work_is_refused_with_numbers():
    with pytest.raises(
        ConfigError, match=r"gpu_memory_fraction is 0\.9, .*'a device' does not say.*gpu_pages"
    ):
        num_pages_in(0.9, [device(None, 0)], 10, 0)
    numbers = r"of the device's 1,000 bytes, what is loaded takes 600, chunks in transit 280, and a page 10"
    with pytest.raises(ConfigError, match=numbers):
        num_pages_in(0.9, [device(1000, 600)], 10, 280)
    with pytest.raises(ConfigError, match=r"in transit 80, exchanges 200, and a page 10"):
        num_pages_in(0.9, [device(1000, 600)], 10, 80, 200)


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
    """On a CPU, where it would be made until the system ends the process."""
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(assembly, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"model is 'random:opt-125m'.*1,048,576 bytes that the machine"):
        make_runner("random:opt-125m", "float32", EngineConfig(), progress=False)


@pytest.fixture
def uncompiled(monkeypatch):
    """Runners are made whole, and compile nothing: sizes are settled before."""
    monkeypatch.setattr(assembly.ModelRunner, "warm_up", lambda self, progress=None: None)


def test_a_runner_has_as_many_pages_as_fit(monkeypatch, uncompiled):
    """The config that comes back has them. What is in use there already, as weights are, is counted."""
    limit_bytes, used_bytes = 2**28, 5 * 2**20
    sized = assembly.num_pages_in
    monkeypatch.setattr(
        assembly,
        "num_pages_in",
        lambda fraction, devices, *sizes: sized(fraction, [device(limit_bytes, used_bytes)], *sizes),
    )
    config = EngineConfig(cache=CacheConfig(gpu_memory_fraction=0.125))
    runner, config = make_runner("random:llama-tiny", "float32", config, progress=False)
    page_bytes = runner.memory_analysis()["page_bytes"]
    assert config.cache.gpu_pages == (limit_bytes // 8 - used_bytes) // page_bytes - 1
    assert config.cache.gpu_memory_fraction is None
    num_buckets = 8 if jax.default_backend() == "gpu" else 4
    assert config.scheduler.max_num_buckets == len(runner.layouts) == num_buckets
    assert runner.storage.num_pages == config.cache.gpu_pages + 1


def test_a_runner_stages_what_a_gigabyte_holds(monkeypatch, uncompiled):
    """The config that comes back says how many; what is asked for is the most."""
    monkeypatch.setattr(config_module, "_STAGED_BYTES", 0)
    monkeypatch.setattr(config_module, "_LEAST_STAGED_PAGES", 3)
    config = EngineConfig(cache=CacheConfig(cpu_pages=8), scheduler=SchedulerConfig(max_num_buckets=1))
    _, config = make_runner("random:llama-tiny", "float32", config, progress=False)
    assert config.runner.max_num_staged_pages == 3


def test_weights_for_which_memory_runs_out_on_the_way_are_refused_in_a_line(monkeypatch):
    """They would have fit by their size: others use the device, say. What else goes wrong is not that."""

    def load(text):
        def fail(*_, **__):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(assembly, "load_model", fail)
        make_runner("random:llama-tiny", "float32", EngineConfig(), progress=False)

    says = r"model is 'random:llama-tiny'.* parameters take [\d,]+ bytes.*tensor_parallel_size.*2\.50GiB"
    with pytest.raises(ConfigError, match=says) as refused:
        load("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB.\nBufferAssignment\n...")
    assert "\n" not in str(refused.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        load("INTERNAL: illegal address")


def test_a_cpu_does_not_say():
    assert jax.default_backend() != "cpu" or device_memory.memory_limit_bytes(jax.devices()[0]) is None
    config = EngineConfig(cache=CacheConfig(gpu_memory_fraction=0.125))
    with pytest.raises(ConfigError, match=r"cache\.gpu_memory_fraction is 0\.125.*give cache\.gpu_pages"):
        make_runner("random:llama-tiny", "float32", config, progress=False)
