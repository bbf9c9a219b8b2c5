"""The error of pages that leave too little memory: one line with numbers, wherever it is detected."""

from __future__ import annotations

import dataclasses
import functools
import logging
from types import SimpleNamespace

import jax
import pytest

from model_defs import parameter_bytes, preset
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig, assembly
from pensieve_jax import config as config_module
from pensieve_jax.assembly import make_runner
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.decoding.device.adjust import counts_bytes
from pensieve_jax.device import model_runner, sizing
from pensieve_jax.device.kv_storage import chunk_bytes
from pensieve_jax.device.page_budget import PageBudget, PagesDoNotFitError, reserved_bytes
from pensieve_jax.device.sizing import DeviceMemory, Machine, on_gpu_grid
from pensieve_jax.runtime import device_memory
from pensieve_jax.runtime.device_memory import least_device
from pensieve_jax.runtime.errors import in_a_line, is_out_of_memory, requested_bytes, step_failed

BY_DEFAULT = EngineConfig()
H200_BYTES = 141_104_775_168
"""Bytes that JAX reports as usable on an H200 with `XLA_PYTHON_CLIENT_MEM_FRACTION=0.94`."""
GB = 10**9
MB = 10**6
# XLA's wording for GPUs; some 25 lines of buffers follow.
REPORT = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.25GiB.
BufferAssignment OOM Debugging.
Largest program allocations in bfc:
  Size: 1.00GiB
  Operator: op_name="jit(step)/dot_general"
"""


def budget(fraction=None, *, limit_bytes=105 * GB, gpu_pages=6600, staging_bytes=0, counts_bytes=0):
    stats = None if limit_bytes is None else {"bytes_limit": limit_bytes}
    device = SimpleNamespace(memory_stats=lambda: stats, device_kind="a device", platform="gpu")
    return PageBudget(
        device,
        gpu_pages,
        fraction,
        page_bytes=5 * MB,
        weights_bytes=70 * GB,
        staging_bytes=staging_bytes,
        max_step_tokens=2048,
        counts_bytes=counts_bytes,
    )


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def failing(budget, error, step_bytes=0):
    with budget.out_of_memory_as_config_error(lambda: step_bytes):
        raise error


def test_a_fitting_number_of_pages_is_accepted():
    budget().check(2 * GB - 10 * MB)
    budget(limit_bytes=None).check(10**15)


def test_the_error_says_how_many_pages_fit():
    assert refusal(budget().check, 3 * GB) == (
        "cache.gpu_pages is 6600, but must be at most 6,399: steps of up to 2048 tokens need 3.0 GB beside "
        "weights (70.0 GB) and 6,600 pages (33.0 GB), and 2.0 GB of 105.0 GB is left; lower it or "
        "scheduler.max_num_batched_tokens, or raise runner.tensor_parallel_size or "
        "XLA_PYTHON_CLIENT_MEM_FRACTION, JAX's share of the device."
    )
    budget(gpu_pages=6399).check(3 * GB)


def test_the_error_of_a_share_says_how_many_pages_fit():
    said = refusal(budget(0.98).check, 3 * GB)
    assert said.startswith(
        "cache.gpu_memory_fraction is 0.98, but must be lower, for at most 6,399 pages: steps of up"
    )
    budget(0.98, gpu_pages=6399).check(3 * GB)
    with pytest.raises(PagesDoNotFitError) as refused:
        dataclasses.replace(budget(0.98), reserved_bytes=GB).check(3 * GB)
    assert refused.value.most == 6199


def test_before_steps_are_known_the_error_does_not_name_them():
    said = refusal(budget(gpu_pages=7100, staging_bytes=GB).check)
    assert (
        "at most 6,799: chunks in transit (1.0 GB), weights (70.0 GB) and 7,100 pages (35.5 GB) are more"
        in said
    )
    assert "max_num_batched_tokens" not in said
    said = refusal(budget(gpu_pages=7100, counts_bytes=GB).check)
    assert "at most 6,799: weights (70.0 GB), counts of ids (1.0 GB) and 7,100 pages" in said


def test_if_not_even_one_page_fits_the_error_does_not_suggest_fewer():
    said = refusal(budget(0.9).check, 36 * GB)
    assert (
        "but must be lower, and then not even 2 pages fit: steps" in said
        and "; lower scheduler.max_num_batched_tokens, or raise runner" in said
    )


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, StepFailedError])
def test_out_of_memory_is_explained_by_the_known_sizes(kind):
    """It uses the known size of steps, or else the failed allocation: 3.25 GiB."""
    assert "must be lower, for at most 6,301 pages" in refusal(failing, budget(0.98), kind(REPORT), GB)
    assert "need 3.5 GB beside" in refusal(failing, budget(0.98), kind(REPORT))
    with pytest.raises(kind, match="INTERNAL"):
        failing(budget(), kind("INTERNAL: illegal address"))


def test_out_of_memory_against_the_known_sizes_is_reported_as_it_happened():
    """The cause is another process, or fragmentation, or the device reports no size."""
    said = refusal(failing, budget(gpu_pages=100), jax.errors.JaxRuntimeError(REPORT))
    assert said.startswith(
        "cache.gpu_pages is 100, but must be fewer: steps of up to 2048 tokens need 3.5 GB, which the "
        "device, 105.0 GB for JAX, did not have beside 100 pages (0.5 GB); lower it or scheduler.max_num"
    )
    assert said.endswith("; RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.25GiB..")
    said = refusal(
        failing, budget(0.5, limit_bytes=None), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no")
    )
    assert (
        "cache.gpu_memory_fraction is 0.5, but must be lower" in said
        and "need more than the device did" in said
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (REPORT, 3.25 * 2**30),
        ("Failed to allocate request for 512.5MiB (537395200B) on device ordinal 0", 512.5 * 2**20),
        ("Out of memory allocating 5 bytes", 0),
        ("Out of memory while trying to allocate 2684354560 bytes.", 2684354560),
        ("trying to allocate 12B", 12),
    ],
)
def test_the_failed_allocation_is_read_from_the_report(text, num_bytes):
    assert requested_bytes(RuntimeError(text)) == num_bytes


def test_the_whole_report_is_only_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        assert in_a_line(RuntimeError(REPORT)) == REPORT.splitlines()[0]
    assert "dot_general" in caplog.text
    assert len(in_a_line(RuntimeError("x" * 1000))) == 200


def test_a_step_that_fails_while_serving_says_what_to_lower():
    for text in (REPORT, "INTERNAL: Failed to load: CUDA_ERROR_OUT_OF_MEMORY: out of memory\nmore"):
        error = step_failed("a step failed on the device", RuntimeError(text))
        assert is_out_of_memory(error) and "\n" not in str(error) and "lower cache.gpu_pages" in str(error)
    assert str(step_failed("a step failed", RuntimeError("INTERNAL: x"))) == "a step failed: INTERNAL: x"


@functools.cache
def weights_bytes(name, num_devices):
    return parameter_bytes(preset(name), dtype="bfloat16", tensor_parallel_size=num_devices)


def start_with_512_pages(name, num_devices, limit_bytes):
    """Check the budget of weights and 512 pages, on devices of that size."""
    stats = {"bytes_limit": limit_bytes}
    devices = [
        SimpleNamespace(memory_stats=lambda: stats, device_kind="NVIDIA H200", platform="gpu")
    ] * num_devices
    model, cache = preset(name), BY_DEFAULT.cache
    device_memory.check_weights_fit(f"random:{name}", weights_bytes(name, num_devices), devices)
    budget = PageBudget(
        devices[0],
        512,
        cache.gpu_memory_fraction,
        page_bytes=chunk_bytes(model, cache.chunk_tokens, "bfloat16", cache.kv_dtype) // num_devices,
        weights_bytes=weights_bytes(name, num_devices),
        staging_bytes=0,
        max_step_tokens=BY_DEFAULT.scheduler.max_num_batched_tokens,
    )
    budget.check()  # before pools are created
    budget.check(GB)  # when steps are compiled, which take less


@pytest.mark.parametrize("share", [0.94, 0.75])
def test_large_models_fit_two_devices_and_13b_one(share):
    """On H200s JAX uses three quarters of the memory by default."""
    for name, num_devices in (("llama2-70b", 2), ("opt-66b", 2), ("opt-13b", 1)):
        start_with_512_pages(name, num_devices, int(H200_BYTES / 0.94 * share))


def test_a_model_too_large_for_one_device_is_reported_in_a_line():
    """Either the weights alone fit, and their pages do not; or the weights do not fit."""
    assert refusal(start_with_512_pages, "llama2-70b", 1, H200_BYTES).startswith(
        "cache.gpu_pages is 512, but must be at most 299: weights (138.0 GB) and 512 pages (5.4 GB) are "
        "more than the 141.1 GB that JAX may use of the device; lower it, or raise runner."
    )
    assert refusal(start_with_512_pages, "llama2-70b", 1, int(H200_BYTES / 0.94 * 0.75)) == (
        "model is 'random:llama2-70b', but must be one whose parameters take at most the 112,583,597,208 "
        "bytes that JAX may use of NVIDIA H200; its parameters take 137,953,296,384 bytes; raise "
        "runner.tensor_parallel_size to 2 or more."
    )


@pytest.mark.parametrize("stage", ["compile", "run"])
def test_a_start_that_runs_out_of_memory_names_the_fraction(monkeypatch, stage):
    """Steps of a tiny model are compiled, or run first, on a device that reports its memory."""

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(REPORT)

    if stage == "compile":
        monkeypatch.setattr(model_runner, "compile_all", lambda *_: (fail() for _ in "x"))
    else:
        monkeypatch.setattr(model_runner.ModelRunner, "forward", fail)
    monkeypatch.setattr(assembly, "_machine", lambda _: gpu(3 * GB // 100, 0))
    monkeypatch.setattr(device_memory, "memory_limit_bytes", lambda _: GB)
    monkeypatch.setattr(sizing, "step_bytes", lambda *_: 0)
    config = EngineConfig(
        cache=CacheConfig(gpu_memory_fraction=0.9), scheduler=SchedulerConfig(max_num_buckets=1)
    )
    said = refusal(make_runner, "random:llama-tiny", "float32", config, False)
    assert "cache.gpu_memory_fraction is 0.9, but must be lower, and then not even 2 pages" in said
    assert "steps of up to 512 tokens need 3.5 GB beside weights" in said


def device(limit_bytes, used_bytes):
    stats = None if limit_bytes is None else {"bytes_limit": limit_bytes, "bytes_in_use": used_bytes}
    return SimpleNamespace(memory_stats=lambda: stats, device_kind="a device", platform="gpu")


def test_exchanges_need_memory_on_several_devices():
    assert (reserved_bytes(None, 1), reserved_bytes(None, 2), reserved_bytes(0, 2)) == (0, 2**30, 0)
    assert least_device([device(3, 0), device(None, 0), device(2, 0)]).memory_stats()["bytes_limit"] == 2


@pytest.fixture
def uncompiled(monkeypatch):
    """Create runners without compiling: sizes are settled before."""
    monkeypatch.setattr(assembly.ModelRunner, "warm_up", lambda self, progress=None: None)


def gpu(limit_bytes, used_bytes):
    """Return a machine with one GPU, all of it for JAX."""
    return Machine(False, (DeviceMemory("a GPU", limit_bytes, 1.0, used_bytes),), None, None)


def test_a_runner_has_as_many_pages_as_fit(monkeypatch, uncompiled):
    """The returned config has the number. Memory in use, such as weights, is counted."""
    limit_bytes, used_bytes = 2**28, 5 * 2**20
    monkeypatch.setattr(assembly, "_machine", lambda _: gpu(limit_bytes, used_bytes))
    monkeypatch.setattr(sizing, "step_bytes", lambda *_: 2**20)
    config = EngineConfig(cache=CacheConfig(gpu_memory_fraction=0.125))
    runner, config = make_runner("random:llama-tiny", "float32", config, progress=False)
    page_bytes = runner.memory_analysis()["page_bytes"]
    count_bytes = counts_bytes(256, 320)
    most = (limit_bytes // 8 - used_bytes - count_bytes - 2**20) // page_bytes - 1
    assert config.cache.gpu_pages == on_gpu_grid(most)
    assert config.cache.gpu_memory_fraction is None and config.cache.cpu_pages == 0
    num_buckets = 8 if jax.default_backend() == "gpu" else 4
    assert config.scheduler.max_num_buckets == len(runner.layouts) == num_buckets
    assert runner.storage.num_pages == config.cache.gpu_pages + 1


@pytest.mark.parametrize("given", [None, 0.9], ids=["default", "share"])
def test_steps_that_take_more_than_expected_get_it_from_the_pages(monkeypatch, given):
    """The start repeats with fewer pages, and ends with a runner that has them."""
    monkeypatch.setattr(assembly, "_machine", lambda _: gpu(2**26, 0))
    monkeypatch.setattr(sizing, "step_bytes", lambda *_: 0)
    monkeypatch.setattr(device_memory, "memory_limit_bytes", lambda _: 2**26)
    starts = []

    def warm_up(runner, progress=None):
        starts.append(runner)
        runner._budget.check(2**25)

    monkeypatch.setattr(assembly.ModelRunner, "warm_up", warm_up)
    config = EngineConfig(cache=CacheConfig(gpu_memory_fraction=given))
    runner, config = make_runner("random:llama-tiny", "float32", config, progress=False)
    first, second = (one.storage.num_pages for one in starts)
    assert runner is starts[1] and config.cache.gpu_pages + 1 == second < first
    assert runner.storage.pool_bytes + runner.weights_bytes <= 2**25 < starts[0].storage.pool_bytes
    assert not starts[0].device_pools.groups and runner.device_pools.groups
    with pytest.raises(ConfigError, match=r"cache\.gpu_pages is 9000, but must be at most"):
        exact = EngineConfig(cache=CacheConfig(gpu_pages=9000))
        make_runner("random:llama-tiny", "float32", exact, progress=False)


def test_a_start_says_what_it_takes(monkeypatch, uncompiled, caplog, capsys):
    monkeypatch.setattr(assembly, "_machine", lambda _: gpu(2**28, 0))
    with caplog.at_level(logging.INFO):
        _, config = make_runner("random:llama-tiny", "float32", EngineConfig(), progress=True)
    (line,) = (one for one in caplog.messages if one.startswith("KV cache: "))
    assert f"({32 * config.cache.gpu_pages:,} tokens), nothing in host memory" in line
    assert line in capsys.readouterr().err
    assert not any(one.startswith("contexts are cut") for one in caplog.messages)


def test_a_start_warns_if_the_pages_cut_the_context(uncompiled, caplog):
    """Exact pages cut it too."""
    make_runner("random:llama-tiny", "float32", EngineConfig(cache=CacheConfig(gpu_pages=3)), progress=False)
    (record,) = (one for one in caplog.records if one.getMessage().startswith("contexts are cut to 96 of"))
    assert record.levelno == logging.WARNING


def test_a_runner_stages_what_a_gigabyte_holds(monkeypatch, uncompiled):
    """The returned config has the number; the requested one is the maximum."""
    monkeypatch.setattr(config_module, "_STAGED_BYTES", 0)
    monkeypatch.setattr(config_module, "_MIN_STAGED_PAGES", 3)
    config = EngineConfig(cache=CacheConfig(cpu_pages=8), scheduler=SchedulerConfig(max_num_buckets=1))
    _, config = make_runner("random:llama-tiny", "float32", config, progress=False)
    assert config.runner.max_num_staged_pages == 3
