"""The error of pages that leave too little memory: one line with numbers, wherever it is detected."""

from __future__ import annotations

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
from pensieve_jax.device import model_runner
from pensieve_jax.device.kv_storage import chunk_bytes
from pensieve_jax.device.page_budget import PageBudget, num_pages_in, reserved_bytes
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


def test_the_error_says_which_fraction_fits():
    """The fraction applies to the pages; the rest is for the steps."""
    said = refusal(budget(0.98).check, 3 * GB)
    assert said.startswith(
        "cache.gpu_memory_fraction is 0.98, but must be at most 0.97 (6,369 pages): steps of up"
    )
    stats = {"bytes_limit": 105 * GB, "bytes_in_use": 70 * GB}
    device = SimpleNamespace(memory_stats=lambda: stats, device_kind="a device")
    assert num_pages_in(0.97, [device], 5 * MB, 0) == 6369
    budget(0.97, gpu_pages=6369).check(3 * GB)


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
    assert "must be at most 0.96" in refusal(failing, budget(0.98), kind(REPORT), GB)
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


def start_by_default(name, num_devices, limit_bytes):
    """Return the budget of weights and pages with default flags, on devices of that size."""
    stats = {"bytes_limit": limit_bytes}
    devices = [
        SimpleNamespace(memory_stats=lambda: stats, device_kind="NVIDIA H200", platform="gpu")
    ] * num_devices
    model, cache = preset(name), BY_DEFAULT.cache
    device_memory.check_weights_fit(f"random:{name}", weights_bytes(name, num_devices), devices)
    budget = PageBudget(
        devices[0],
        cache.gpu_pages,
        cache.gpu_memory_fraction,
        page_bytes=chunk_bytes(model, cache.chunk_tokens, "bfloat16", cache.kv_dtype) // num_devices,
        weights_bytes=weights_bytes(name, num_devices),
        staging_bytes=0,
        max_step_tokens=BY_DEFAULT.scheduler.max_num_batched_tokens,
    )
    budget.check()  # before pools are created
    budget.check(GB)  # when steps are compiled, which take less


@pytest.mark.parametrize("share", [0.94, 0.75])
def test_large_models_fit_two_devices_and_13b_one_by_default(share):
    """On H200s JAX uses three quarters of the memory by default."""
    for name, num_devices in (("llama2-70b", 2), ("opt-66b", 2), ("opt-13b", 1)):
        start_by_default(name, num_devices, int(H200_BYTES / 0.94 * share))


def test_a_model_too_large_for_one_device_is_reported_in_a_line():
    """Either the weights alone fit, and their pages do not; or the weights do not fit."""
    assert refusal(start_by_default, "llama2-70b", 1, H200_BYTES).startswith(
        "cache.gpu_pages is 512, but must be at most 299: weights (138.0 GB) and 512 pages (5.4 GB) are "
        "more than the 141.1 GB that JAX may use of the device; lower it, or raise runner."
    )
    assert refusal(start_by_default, "llama2-70b", 1, int(H200_BYTES / 0.94 * 0.75)) == (
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
    monkeypatch.setattr(assembly, "num_pages_in", lambda *_: 64)
    monkeypatch.setattr(device_memory, "memory_limit_bytes", lambda _: GB)
    config = EngineConfig(
        cache=CacheConfig(gpu_memory_fraction=0.9), scheduler=SchedulerConfig(max_num_buckets=1)
    )
    said = refusal(make_runner, "random:llama-tiny", "float32", config, False)
    assert "cache.gpu_memory_fraction is 0.9, but must be lower, and then not even 2 pages" in said
    assert "steps of up to 512 tokens need 3.5 GB beside weights" in said


def device(limit_bytes, used_bytes):
    stats = None if limit_bytes is None else {"bytes_limit": limit_bytes, "bytes_in_use": used_bytes}
    return SimpleNamespace(memory_stats=lambda: stats, device_kind="a device", platform="gpu")


def test_pages_use_what_the_weights_leave():
    """The fullest device counts, with chunks in transit and the dummy page."""
    assert num_pages_in(0.9, [device(1000, 100)], 10, 0) == 79
    assert num_pages_in(0.9, [device(1000, 100)], 10, 300) == 49
    assert num_pages_in(0.9, [device(1000, 100)], 10, 200, 0, 100) == 49
    assert num_pages_in(1.0, [device(1000, 100), device(1000, 505)], 10, 0) == 48


def test_a_fraction_is_the_same_share_of_one_device_and_of_several():
    """Each device counts its own usage and exchange buffers, which one device does not have by default."""
    assert num_pages_in(0.9, [device(1000, 100)] * 2, 10, 0) == num_pages_in(0.9, [device(1000, 100)], 10, 0)
    assert num_pages_in(0.9, [device(1000, 100)] * 2, 10, 300, 200) == 29
    assert num_pages_in(0.9, [device(1000, 100), device(700, 100)], 10, 0, 200) == 32
    assert (reserved_bytes(None, 1), reserved_bytes(None, 2), reserved_bytes(0, 2)) == (0, 2**30, 0)
    assert least_device([device(3, 0), device(None, 0), device(2, 0)]).memory_stats()["bytes_limit"] == 2


def test_invalid_sizes_are_refused_with_numbers():
    with pytest.raises(
        ConfigError, match=r"gpu_memory_fraction is 0\.9, .*'a device' does not report.*gpu_pages"
    ):
        num_pages_in(0.9, [device(None, 0)], 10, 0)
    numbers = r"of the device's 1,000 bytes, what is loaded takes 600, chunks in transit 280, and a page 10"
    with pytest.raises(ConfigError, match=numbers):
        num_pages_in(0.9, [device(1000, 600)], 10, 280)
    with pytest.raises(ConfigError, match=r"in transit 80, exchanges 200, and a page 10"):
        num_pages_in(0.9, [device(1000, 600)], 10, 80, 200)


@pytest.fixture
def uncompiled(monkeypatch):
    """Create runners without compiling: sizes are settled before."""
    monkeypatch.setattr(assembly.ModelRunner, "warm_up", lambda self, progress=None: None)


def test_a_runner_has_as_many_pages_as_fit(monkeypatch, uncompiled):
    """The returned config has the number. Memory in use, such as weights, is counted."""
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
    count_bytes = counts_bytes(config.scheduler.max_num_running, 320)
    assert config.cache.gpu_pages == (limit_bytes // 8 - used_bytes - count_bytes) // page_bytes - 1
    assert config.cache.gpu_memory_fraction is None
    num_buckets = 8 if jax.default_backend() == "gpu" else 4
    assert config.scheduler.max_num_buckets == len(runner.layouts) == num_buckets
    assert runner.storage.num_pages == config.cache.gpu_pages + 1


def test_a_runner_stages_what_a_gigabyte_holds(monkeypatch, uncompiled):
    """The returned config has the number; the requested one is the maximum."""
    monkeypatch.setattr(config_module, "_STAGED_BYTES", 0)
    monkeypatch.setattr(config_module, "_MIN_STAGED_PAGES", 3)
    config = EngineConfig(cache=CacheConfig(cpu_pages=8), scheduler=SchedulerConfig(max_num_buckets=1))
    _, config = make_runner("random:llama-tiny", "float32", config, progress=False)
    assert config.runner.max_num_staged_pages == 3
