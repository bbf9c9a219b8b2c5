"""Default sizes on machines that are not there: shares, grids, containers, and too small machines."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import parameter_bytes
from model_defs.registry import preset
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.device.kv_storage import chunk_bytes, slot_bytes
from pensieve_jax.device.sizing import (
    MAX_CPU_HOST_BYTES,
    MAX_GPU_HOST_BYTES,
    DeviceMemory,
    Machine,
    default_host_bytes,
    memory_in_words,
    on_gpu_grid,
    sized,
    step_bytes,
    warn_of_short_context,
    with_fewer_pages,
)
from pensieve_jax.engine.drafting import index_bytes
from pensieve_jax.scheduler import bucket_layout

ROOT = Path(__file__).parents[2]
GIB = 2**30
H200_BYTES = int(141_104_775_168 / 0.94)
"""Memory of an H200, of which JAX reports 141.1 GB with a share of 0.94."""
BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
RANDOM = logging.getLogger("tests.sizing")


def gpus(all_bytes, *used_bytes, share=0.94, free_bytes=120 * GIB, pinnable_bytes=None):
    """Return a machine with a GPU for each of `used_bytes`."""
    devices = [DeviceMemory("a GPU", int(all_bytes * share), share, used) for used in used_bytes]
    return Machine(False, tuple(devices), 4 * GIB + 2 * free_bytes, free_bytes, pinnable_bytes)


def cpu(host_bytes, free_bytes, num_devices=1):
    return Machine(True, (DeviceMemory("cpu", None),) * num_devices, host_bytes, free_bytes)


LAPTOP = cpu(16 * GIB, 9 * GIB)
CONTAINER = cpu(2 * GIB, int(1.5 * GIB))


def h200s(name, num_devices=1):
    used_bytes = parameter_bytes(preset(name), dtype="bfloat16", tensor_parallel_size=num_devices)
    return gpus(H200_BYTES, *[used_bytes] * num_devices)


def storage(model, config, platform, num_devices=1):
    """Return the sizes of a `KVStorage` in bfloat16, without devices."""
    devices = np.array([SimpleNamespace(platform=platform)] * num_devices)
    return SimpleNamespace(
        page_bytes=chunk_bytes(model, 32, BFLOAT16) // num_devices,
        slot_bytes=slot_bytes(model, config.cache, BFLOAT16),
        sharding=SimpleNamespace(mesh=SimpleNamespace(devices=devices)),
    )


def of(cache=None, **scheduler):
    return EngineConfig(cache=cache or CacheConfig(), scheduler=SchedulerConfig(**scheduler))


def test_rows_of_experts_are_temporaries_of_a_step():
    """A token has a row for each of its experts, with its input, its result and what is between."""
    model = preset("qwen3-30b-a3b")
    dense = dataclasses.replace(model, experts=None, layer_kinds=())
    num_tokens = of().scheduler.max_num_batched_tokens
    mlp_bytes = 4 * num_tokens * model.intermediate_size
    expert_bytes = step_bytes(of(), model, BFLOAT16, 1) - step_bytes(of(), dense, BFLOAT16, 1) + mlp_bytes
    num_rows = expert_bytes / (2 * (2 * 2048 + 768))
    assert 8 * num_tokens < num_rows < 8 * num_tokens + 128 * 8 + 128


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama2-13b"])
def test_products_of_a_step_have_the_size_of_the_dtype(name):
    model, num_tokens = preset(name), of().scheduler.max_num_batched_tokens
    wide, narrow = (step_bytes(of(), model, jnp.dtype(dtype), 1) for dtype in ("float32", "bfloat16"))
    if model.experts is None:
        assert wide - narrow == 4 * num_tokens * model.intermediate_size
    else:
        num_rows = (wide - narrow) / (2 * (2 * model.hidden_size + model.experts.width))
        assert 8 * num_tokens < num_rows < 8 * num_tokens + 128 * 8 + 128


def test_an_h200_keeps_most_of_its_free_memory():
    model, machine = preset("llama2-13b-gqa10"), h200s("llama2-13b-gqa10")
    config = sized(of(), machine, model, BFLOAT16)
    pages = config.cache.gpu_pages * chunk_bytes(model, 32, BFLOAT16)
    assert pages >= 0.85 * (H200_BYTES - machine.devices[0].used_bytes)
    assert config.cache.gpu_pages == on_gpu_grid(config.cache.gpu_pages)
    assert config.scheduler.max_num_running == 256
    assert config.resolve_context_tokens(model.max_position_embeddings) == model.max_position_embeddings
    slots = config.cache.cpu_pages + config.runner.max_num_staged_pages
    host = slots * slot_bytes(model, config.cache, BFLOAT16)
    assert 59 * GIB < host <= 60 * GIB, "half of what is free, with the chunks in transit"
    line = memory_in_words(config, storage(model, config, "gpu"))
    assert f"\n{line}\n" in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_weights_steps_chunks_in_transit_and_pages_stay_within_the_share():
    model, machine = preset("llama3-8b"), h200s("llama3-8b")
    page, taken = chunk_bytes(model, 32, BFLOAT16), {}
    for share in (0.5, 0.9):
        config = sized(of(CacheConfig(gpu_memory_fraction=share, cpu_pages=0)), machine, model, BFLOAT16)
        taken[share] = config.cache.gpu_pages * page
        assert taken[share] + machine.devices[0].used_bytes < share * H200_BYTES
        assert config.cache.gpu_memory_fraction is None and config.cache.cpu_pages == 0
    assert taken[0.9] - taken[0.5] == pytest.approx(0.4 * H200_BYTES, rel=0.04)
    with_host = sized(of(CacheConfig(gpu_memory_fraction=0.9)), machine, model, BFLOAT16)
    assert taken[0.9] - with_host.cache.gpu_pages * page > 10**9, "chunks in transit take some"


def test_the_default_share_is_the_one_of_the_flag():
    model, machine = preset("llama3-8b"), h200s("llama3-8b")
    given = sized(of(CacheConfig(gpu_memory_fraction=0.9)), machine, model, BFLOAT16)
    assert sized(of(), machine, model, BFLOAT16) == given


def test_the_smallest_of_several_devices_counts():
    model = preset("llama2-70b")
    equal = sized(of(), gpus(H200_BYTES, *[70 * 10**9] * 2), model, BFLOAT16)
    fuller = sized(of(), gpus(H200_BYTES, 70 * 10**9, 90 * 10**9), model, BFLOAT16)
    page = chunk_bytes(model, 32, BFLOAT16) // 2
    difference = (equal.cache.gpu_pages - fuller.cache.gpu_pages) * page
    assert difference == pytest.approx(20 * 10**9, rel=0.1)
    none_reserved = of(CacheConfig(gpu_reserved_bytes=0, cpu_pages=0))
    reserved = of(CacheConfig(gpu_reserved_bytes=20 * 10**9, cpu_pages=0))
    pages = [
        sized(one, gpus(H200_BYTES, *[70 * 10**9] * 2), model, BFLOAT16).cache.gpu_pages
        for one in (none_reserved, reserved)
    ]
    assert (pages[0] - pages[1]) * page == pytest.approx(20 * 10**9, rel=0.1)


def test_a_gpu_of_16_gb_has_a_cut_context_and_says_so(caplog):
    model = dataclasses.replace(preset("llama3-8b"), num_layers=24)
    machine = gpus(16 * 10**9, 13 * 10**9, free_bytes=20 * GIB)
    config = sized(of(CacheConfig(cpu_pages=0)), machine, model, BFLOAT16)
    pages = config.cache.gpu_pages
    assert 2 <= pages < 400 and config.scheduler.max_num_running == 16
    tokens = config.resolve_context_tokens(model.max_position_embeddings)
    assert tokens == 32 * pages < model.max_position_embeddings
    warn_of_short_context(config, model, RANDOM)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for number in (tokens, model.max_position_embeddings, pages):
        assert f"{number:,} " in record.getMessage()


def test_a_whole_context_is_no_reason_to_warn(caplog):
    model = preset("llama2-13b-gqa10")
    warn_of_short_context(sized(of(), h200s("llama2-13b-gqa10"), model, BFLOAT16), model, RANDOM)
    asked = of(CacheConfig(gpu_pages=64), max_context_tokens=1024)
    warn_of_short_context(asked, model, RANDOM)
    assert not caplog.records


def test_a_jax_with_a_smaller_share_gets_a_smaller_pool():
    """This is the case if JAX was used before, or if the user says so."""
    model = preset("llama2-13b-gqa10")
    small = gpus(H200_BYTES, 23 * 10**9, share=0.75)
    config = sized(of(), small, model, BFLOAT16)
    assert config.cache.gpu_pages * chunk_bytes(model, 32, BFLOAT16) < 0.75 * H200_BYTES - 23 * 10**9
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction is 0\.9, but must be at most 0\.75, .* JAX"):
        sized(of(CacheConfig(gpu_memory_fraction=0.9)), small, model, BFLOAT16)


def test_a_gpu_that_is_too_small_is_refused_with_numbers():
    numbers = (
        r"cache.gpu_memory_fraction is 0\.9, but must be more: of the 14,400,000,000 bytes that it is, "
        r"what is loaded takes 14,000,000,000, counts of ids [\d,]+, steps [\d,]+, and a page 4,194,304; "
        r"raise runner"
    )
    with pytest.raises(ConfigError, match=numbers):
        model = preset("llama3-8b")
        sized(of(CacheConfig(cpu_pages=0)), gpus(16 * 10**9, 14 * 10**9), model, BFLOAT16)


def test_a_device_that_reports_no_memory_needs_a_number():
    machine = Machine(False, (DeviceMemory("a chip", None),), 64 * GIB, 32 * GIB)
    with pytest.raises(ConfigError, match=r"'a chip' does not report how much memory.*give cache\.gpu_pages"):
        sized(of(), machine, preset("llama-tiny"), FLOAT32)
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction is 0\.9, .*does not report.*gpu_pages"):
        sized(of(CacheConfig(gpu_memory_fraction=0.9)), LAPTOP, preset("llama-tiny"), FLOAT32)
    given = sized(of(CacheConfig(gpu_pages=7)), machine, preset("llama-tiny"), FLOAT32)
    assert given.cache.gpu_pages == 7


@pytest.mark.parametrize("machine", [LAPTOP, CONTAINER], ids=["laptop", "container"])
def test_a_toy_on_a_cpu_gets_what_a_toy_needs(machine):
    model = preset("llama-tiny")
    config = sized(of(), machine, model, FLOAT32)
    tokens = config.cache.gpu_pages * 32
    assert tokens == max(16_384, 4 * model.max_position_embeddings)
    assert config.cache.gpu_pages * chunk_bytes(model, 32, FLOAT32) < GIB / 2
    host = config.cache.cpu_pages * slot_bytes(model, config.cache, FLOAT32)
    assert 0 < host <= min(MAX_CPU_HOST_BYTES, machine.host_bytes / 8)


@pytest.mark.parametrize(
    ("machine", "most"),
    [
        (LAPTOP, 4 * GIB),
        (cpu(16 * GIB, 3 * GIB), 1.5 * GIB),
        (cpu(16 * GIB, 9 * GIB, num_devices=2), 4 * GIB),
        (cpu(64 * GIB, 60 * GIB), 8 * GIB),  # four contexts
    ],
    ids=["laptop", "busy laptop", "two devices", "workstation"],
)
def test_a_real_model_on_a_cpu_gets_a_quarter_or_half_of_what_is_free(machine, most):
    model = preset("llama3-8b")
    config = sized(of(), machine, model, FLOAT32)
    taken = config.cache.gpu_pages * chunk_bytes(model, 32, FLOAT32)
    assert most / 2 < taken <= most
    assert math.log2(config.cache.gpu_pages).is_integer(), "little changes of free memory change nothing"


def test_a_container_that_is_too_small_is_refused_with_numbers():
    numbers = (
        r"cache\.gpu_pages is None, but must be a number: 16,777,216 bytes of memory, 8,388,608 of them "
        r"free, hold not even 2 pages of 8,388,608 bytes"
    )
    with pytest.raises(ConfigError, match=numbers):
        sized(of(), cpu(16 * 2**20, 8 * 2**20), preset("llama3-8b"), FLOAT32)


def test_unknown_memory_is_no_obstacle_on_a_cpu():
    config = sized(of(), cpu(None, None), preset("llama-tiny"), FLOAT32)
    assert config.cache.gpu_pages >= 512 and config.cache.cpu_pages == 0


def test_exact_numbers_win():
    """With exact pages nothing is derived: there is host memory only where the caller asks for it."""
    model, machine = preset("llama3-8b"), h200s("llama3-8b")
    exact = sized(of(CacheConfig(gpu_pages=100), max_num_running=3), machine, model, BFLOAT16)
    assert (exact.cache.gpu_pages, exact.cache.cpu_pages, exact.scheduler.max_num_running) == (100, 0, 3)
    slots = sized(of(CacheConfig(cpu_pages=9)), machine, model, BFLOAT16)
    assert slots.cache.cpu_pages == 9 and slots.cache.gpu_pages > 10_000
    num_bytes = sized(of(CacheConfig(gpu_pages=100, cpu_bytes=GIB)), machine, model, BFLOAT16)
    assert num_bytes.cache.cpu_pages == GIB // slot_bytes(model, CacheConfig(), BFLOAT16)
    beside_zero = CacheConfig(gpu_pages=100, cpu_pages=0, cpu_bytes=GIB)
    assert sized(of(beside_zero), machine, model, BFLOAT16).cache == num_bytes.cache
    half = sized(of(CacheConfig(gpu_pages=100, cpu_memory_fraction=0.25)), machine, model, BFLOAT16)
    host = (half.cache.cpu_pages + half.runner.max_num_staged_pages) * slot_bytes(
        model, CacheConfig(), BFLOAT16
    )
    assert 29 * GIB < host <= 30 * GIB


def test_a_stateless_engine_takes_no_host_memory():
    config = sized(EngineConfig(stateful=False), h200s("llama3-8b"), preset("llama3-8b"), BFLOAT16)
    assert config.cache.cpu_pages == 0 and config.cache.gpu_pages > 10_000


def test_host_memory_of_gpus_is_bounded_by_the_gpus_and_by_what_can_be_pinned():
    for num_gpus in (1, 2):
        config = EngineConfig(runner=RunnerConfig(tensor_parallel_size=num_gpus))
        assert default_host_bytes(config, 2**42, num_gpus) == num_gpus * MAX_GPU_HOST_BYTES
        assert default_host_bytes(config, 10 * GIB, num_gpus) == 5 * GIB
        assert default_host_bytes(config, None, num_gpus) == 0
    model = preset("llama3-8b")
    machine = h200s("llama3-8b")._replace(pinnable_bytes=20 * GIB)
    config = sized(of(), machine, model, BFLOAT16)
    slots = config.cache.cpu_pages + config.runner.max_num_staged_pages
    assert slots * slot_bytes(model, config.cache, BFLOAT16) <= 20 * GIB


def test_engines_of_one_host_divide_its_memory():
    """No engine takes more than it would alone, whether the share is given or not."""
    model, machine = preset("llama3-8b"), h200s("llama3-8b")._replace(free_bytes=400 * GIB)
    slot = slot_bytes(model, CacheConfig(), BFLOAT16)

    def host_bytes(machine, dtype, **cache):
        config = sized(of(CacheConfig(**cache)), machine, model, dtype)
        return config.cache.cpu_pages * slot_bytes(model, config.cache, dtype)

    assert host_bytes(machine, BFLOAT16) == host_bytes(machine, BFLOAT16, engines_on_host=2) > 63 * GIB
    in_transit = 129 * slot
    for num_engines, share, most in ((8, None, 25 * GIB), (8, 0.8, 40 * GIB), (2, 0.8, 160 * GIB)):
        found = host_bytes(machine, BFLOAT16, engines_on_host=num_engines, cpu_memory_fraction=share)
        assert most - in_transit < found <= most
    assert host_bytes(cpu(64 * GIB, 60 * GIB), FLOAT32, engines_on_host=2) <= MAX_CPU_HOST_BYTES
    pages = [
        sized(of(CacheConfig(engines_on_host=n)), LAPTOP, model, FLOAT32).cache.gpu_pages for n in (1, 2, 4)
    ]
    assert pages[0] == 2 * pages[1] == 4 * pages[2]
    with pytest.raises(ConfigError, match=r"half of what is free, for each of 1000 engines; free memory"):
        sized(of(CacheConfig(engines_on_host=1000)), LAPTOP, model, FLOAT32)


@pytest.mark.parametrize(
    ("pages", "context", "options", "num_running"),
    [
        (16_384, 4096, {}, 256),
        (16_384, 131_072, {}, 32),  # the list of a step's pages is copied in every step
        (512, 1024, {}, 32),  # 512 tokens each
        (16, 4096, {}, 16),
        (16_384, 4096, {"max_num_batched_tokens": 128}, 96),
        (16_384, 4096, {"max_num_rows": 40}, 40),
        (16_384, 4096, {"max_num_running": 300}, 300),
        (16, 4096, {"max_num_batched_tokens": 40}, 8),
    ],
)
def test_the_batch_follows_pages_and_context(pages, context, options, num_running):
    model = dataclasses.replace(preset("llama2-13b-gqa10"), max_position_embeddings=context)
    config = sized(of(CacheConfig(gpu_pages=pages), **options), h200s("llama2-13b-gqa10"), model, BFLOAT16)
    assert config.scheduler.max_num_running == num_running
    EngineConfig(cache=config.cache, scheduler=config.scheduler)  # its checks accept it


def test_the_grid_wastes_little_and_has_few_numbers():
    assert [on_gpu_grid(n) for n in (2, 3, 255, 256, 257, 2049)] == [2, 3, 255, 256, 256, 2048]
    for num_pages in range(64, 40_000, 37):
        assert 0 <= num_pages - on_gpu_grid(num_pages) <= num_pages / 128
    assert len({on_gpu_grid(n) for n in range(16_384, 32_768)}) == 128


def test_small_differences_of_free_memory_change_nothing():
    """Otherwise a start would compile again."""
    model, found = preset("llama3-8b"), set()
    for more in range(0, 64 * 2**20, 2**20):
        found.add(sized(of(), gpus(H200_BYTES, 17 * 10**9 + more), model, BFLOAT16).cache.gpu_pages)
    assert len(found) == 1


def test_a_step_needs_room_for_the_choice_of_drafted_tokens():
    """A request with a draft of eight tokens samples nine ids."""
    model, plain = preset("llama3-8b"), of(max_num_running=4)
    drafting = of(max_num_running=4, speculation="history")
    num_rows = bucket_layout(drafting, 512, context_tokens=4096).max_num_samples
    more = step_bytes(drafting, model, BFLOAT16, 1) - step_bytes(plain, model, BFLOAT16, 1)
    assert num_rows == 36
    assert more == 20 * (num_rows - 4) * model.vocab_size


def test_one_line_says_what_is_taken_and_what_it_holds():
    model = preset("llama2-13b-gqa10")
    config = EngineConfig(cache=CacheConfig(gpu_pages=6250, cpu_pages=12_500))
    assert memory_in_words(config, storage(model, config, "gpu")) == (
        "KV cache: 38.1 GiB on the GPU (200,000 tokens), 58.4 GiB in host memory (400,000 tokens)"
    )
    tiny, few = preset("llama-tiny"), EngineConfig(cache=CacheConfig(gpu_pages=64))
    assert memory_in_words(few, storage(tiny, few, "cpu", 2)) == (
        "KV cache: 1.0 MiB on 2 CPUs (2,048 tokens), nothing in host memory"
    )


def test_fewer_pages_in_8_bits_are_not_of_a_size_that_no_kernel_addresses():
    model, machine = preset("llama2-13b"), h200s("llama2-13b")
    asked = of(CacheConfig(kv_dtype="int8", cpu_pages=0))
    config = sized(asked, machine, model, BFLOAT16)
    page_bytes = chunk_bytes(model, 32, BFLOAT16, "int8") // model.num_layers
    num_pages = 3 * 2**30 // page_bytes
    fewer = with_fewer_pages(config, num_pages, model, asked=asked, num_devices=1)
    assert fewer.cache.gpu_pages * page_bytes < 2**31 < num_pages * page_bytes
    assert fewer.scheduler.max_num_running <= config.scheduler.max_num_running


@pytest.mark.parametrize("machine", ["h200s", "laptop"])
def test_default_host_memory_leaves_room_for_the_indexes_of_drafts(machine):
    """Half of what is free is the host tier of GPUs, and an eighth of the memory that of a CPU."""
    model, dtype = preset("llama2-13b-gqa10"), BFLOAT16
    found = gpus(H200_BYTES, 27 * 10**9, free_bytes=10 * GIB)
    if machine == "laptop":
        found, model, dtype = cpu(64 * GIB, 2 * GIB), preset("llama-tiny"), FLOAT32
    plain = sized(of(), found, model, dtype)
    drafting = sized(of(speculation="history"), found, model, dtype)
    slot = slot_bytes(model, plain.cache, dtype)
    less = (plain.cache.cpu_pages - drafting.cache.cpu_pages) * slot
    num_bytes = index_bytes(drafting.scheduler.running_limit, model.max_position_embeddings)
    share = 0.25 if machine == "laptop" else 0.5
    assert less == pytest.approx(share * num_bytes, abs=3 * slot)
    assert num_bytes > 3 * slot
