"""Sizes that a configuration leaves open: pages, slots of host memory, and requests in the batch.

Owns: the shares of memory that an engine takes by default, what it leaves to weights, steps and other
processes, and the refusal of a machine that is too small. Everything here is arithmetic on numbers that the
caller has read, so it is tested for machines that are not there.
Does not know: how memory is read (`runtime`) or allocated.

A number of pages is part of the shapes of compiled programs, so derived numbers lie on a grid: a start that
finds slightly less memory than the one before it still finds its programs. On a CPU, where free memory
varies, the grid has the powers of two. On a GPU it has 128 steps between two of them, which wastes at most
0.8%.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import jax.numpy as jnp

from model_defs.config import ExpertsConfig, ModelConfig
from pallas_kernels.grouped_matmul import GroupSpec, block_rows
from pensieve_jax.config import MAX_NUM_RUNNING, CacheConfig, EngineConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.decoding.device.adjust import counts_bytes
from pensieve_jax.device.kv_storage import KVStorage, chunk_bytes, most_byte_pages, slot_bytes
from pensieve_jax.device.page_budget import MIN_PAGES, reserved_bytes, staging_bytes
from pensieve_jax.device.step_programs import specs_of_bucket
from pensieve_jax.engine.drafting import index_bytes
from pensieve_jax.scheduler.buckets import token_buckets

GPU_SHARE: Final = 0.9
"""Default of `cache.gpu_memory_fraction`."""
GPU_HOST_SHARE: Final = 1 / 2
"""Share of free host memory that the host tier takes for GPUs by default."""
MAX_GPU_HOST_BYTES: Final = 64 * 2**30
"""The most host memory for each GPU by default; the driver pins some 3.5 GB/s, and the start waits for it."""
CPU_SHARE: Final = 1 / 4
"""Share of a CPU's memory that pages take by default."""
CPU_HOST_SHARE: Final = 1 / 8
"""Share of a CPU's memory that the host tier takes by default."""
MAX_CPU_HOST_BYTES: Final = 2**30
_CPU_TOKENS = 16_384  # a CPU clears pages at the start, so a small model does not get gigabytes of them
_CPU_CONTEXTS = 4
_MAX_TOKENS = 2**24  # of a tier: the host has some hundred bytes for each chunk
_CPU_FREE_SHARE = 1 / 2  # pages take at most this share of what is free, and the host tier half of it
_ROW_TOKENS = 512
_MIN_NUM_RUNNING = 16
_MAX_TABLE_ENTRIES = 2**18  # 1 MiB of page numbers, copied to the device in every step: about 0.4 ms
# A step's temporaries, fitted from above to XLA's figures of Llama and OPT models on H100s and H200s.
_STEP_BYTES = 128 * 2**20
_CHOICE_BYTES = 20  # for a logit of a row to sample: scores, adjusted scores, sorted ones and their order
_DECODED_PARTS_BYTES = 36 * 2**20  # of the tiles that read decoded pages: 128 rows for each of 528 parts
_GPU_STEPS = 128
_LARGEST_ATTENTION: Final = "pallas_mosaic_gpu"  # it decodes pages of 8 bits before it reads them


class DeviceMemory(NamedTuple):
    """Memory of one device once the weights are loaded, in bytes.

    Attributes:
      kind: name of the device.
      limit_bytes: what JAX may use; None if the device does not report it.
      jax_share: share of the device's memory that `limit_bytes` is.
      used_bytes: what is in use.
    """

    kind: str
    limit_bytes: int | None
    jax_share: float = 1.0
    used_bytes: int = 0


class Machine(NamedTuple):
    """Memory that an engine finds once the weights are loaded, in bytes.

    Attributes:
      is_cpu: whether the devices are CPUs, which share the host's memory.
      devices: the devices that share the model.
      host_bytes: memory of the machine, or of its container if that is less; None if unknown.
      free_bytes: how much of it can still be allocated; None if unknown.
      pinnable_bytes: the most that the runtime may pin for GPUs; None: unlimited.
    """

    is_cpu: bool
    devices: tuple[DeviceMemory, ...]
    host_bytes: int | None
    free_bytes: int | None
    pinnable_bytes: int | None = None


class _Needs(NamedTuple):
    """Bytes that the model takes.

    Attributes:
      page_bytes: one device's share of a page.
      slot_bytes: a chunk in host memory, all devices together.
      staged_bytes: one device's share of a chunk in transit.
    """

    page_bytes: int
    slot_bytes: int
    staged_bytes: int


def sized(
    config: EngineConfig,
    machine: Machine,
    model: ModelConfig,
    dtype: jnp.dtype,
    attention: str = _LARGEST_ATTENTION,
) -> EngineConfig:
    """Return a copy of `config` with a number for each size that it leaves open or gives as bytes or a share.

    Args:
      config: the configuration of the caller.
      machine: memory of the machine once the weights are loaded.
      model: the model.
      dtype: dtype of its weights.
      attention: name of the attention back end; the default is the one that takes the most memory.

    Raises:
      ConfigError: not even two pages fit, a share exceeds what JAX may use, a device does not report its
        memory, or bytes hold no chunk. The message has the numbers.
    """
    cache, num_devices = config.cache, len(machine.devices)
    host = slot_bytes(model, cache, dtype)
    pages = chunk_bytes(model, cache.chunk_tokens, dtype, cache.kv_dtype)
    needs = _Needs(pages // num_devices, host, host // num_devices)
    check_memory_is_known(config, machine)
    left = machine._replace(free_bytes=_free_beside_indexes(config, machine.free_bytes, model))
    config = _with_host_tier(config.with_staged_pages(needs.staged_bytes), left, needs)
    if cache.gpu_pages is None:
        if machine.is_cpu:
            num_pages = _cpu_pages(config, machine, model, needs)
        else:
            num_bytes = step_bytes(config, model, dtype, num_devices, attention)
            num_pages = _gpu_pages(config, machine, model, needs, num_bytes)
        config = config.with_gpu_pages(num_pages)
        config = config.with_gpu_pages(most_byte_pages(model, config.cache, num_devices))
    return _with_num_running(config, model)


def check_memory_is_known(config: EngineConfig, machine: Machine) -> None:
    """Raise ConfigError where `sized` cannot derive pages, whatever the model takes.

    So a start fails before the model is loaded: a device does not report its memory, or a share exceeds what
    JAX may use.
    """
    cache = config.cache
    if cache.gpu_pages is not None:
        return
    if not machine.is_cpu:
        for device in machine.devices:
            _bytes_for_all(device, cache)
    elif cache.gpu_memory_fraction is not None:
        raise _unreported(cache, machine.devices[0])


def with_fewer_pages(
    config: EngineConfig, num_pages: int, model: ModelConfig, *, asked: EngineConfig, num_devices: int
) -> EngineConfig:
    """Return a copy of a sized `config` with `num_pages` pages at most, and the batch that they allow.

    Args:
      config: what `sized` returned.
      num_pages: the most pages that fit.
      model: the model.
      asked: the configuration of the caller, whose `scheduler.max_num_running` may be left open.
      num_devices: devices that share the model.
    """
    config = config.with_gpu_pages(on_gpu_grid(num_pages))
    config = config.with_gpu_pages(most_byte_pages(model, config.cache, num_devices))
    if asked.scheduler.max_num_running is not None:
        return config
    return _with_num_running(config.with_num_running(None), model)


def default_host_bytes(config: EngineConfig, free_bytes: int | None, num_gpus: int) -> int:
    """Return the bytes of the host tier that `cpu_memory_fraction` or its default gives `num_gpus` GPUs.

    Args:
      config: a configuration without `cache.cpu_pages` and `cache.cpu_bytes`.
      free_bytes: free host memory of all engines on the machine; None if unknown.
      num_gpus: number of GPUs that share the model.
    """
    share, free_bytes = config.cache.cpu_memory_fraction, _part_of_host(free_bytes, config)
    if free_bytes is None or (share is None and not config.wants_host_tier):
        return 0
    if share is not None:
        return int(share * free_bytes)
    return min(int(GPU_HOST_SHARE * free_bytes), num_gpus * MAX_GPU_HOST_BYTES)


def warn_of_short_context(config: EngineConfig, model: ModelConfig, log: logging.Logger) -> None:
    """Log a warning if the pages cut the model's context, which a configured context forbids."""
    tokens, pages = config.resolve_context_tokens(model.max_position_embeddings), config.cache.num_gpu_pages
    if config.scheduler.max_context_tokens is None and tokens < model.max_position_embeddings:
        log.warning(
            "contexts are cut to %s of the model's %s tokens, because %s pages of %d tokens hold no more; "
            "cache.gpu_pages, cache.gpu_memory_fraction and cache.kv_dtype say how much they hold",
            f"{tokens:,}",
            f"{model.max_position_embeddings:,}",
            f"{pages:,}",
            config.cache.chunk_tokens,
        )


def memory_in_words(config: EngineConfig, storage: KVStorage) -> str:
    """Describe in a line what the KV cache takes, and how many tokens it holds.

    Args:
      config: configuration with numbers of pages.
      storage: shape and placement of pages and chunks.
    """
    cache, devices = config.cache, storage.sharding.mesh.devices
    pool = _gibibytes(cache.num_gpu_pages * storage.page_bytes * devices.size)
    name = devices.flat[0].platform.upper()
    where = f"the {name}" if devices.size == 1 else f"{devices.size} {name}s"
    line = f"KV cache: {pool} on {where} ({cache.num_gpu_pages * cache.chunk_tokens:,} tokens)"
    if not cache.num_cpu_pages:
        return f"{line}, nothing in host memory"
    host = _gibibytes(cache.num_cpu_pages * storage.slot_bytes)
    return f"{line}, {host} in host memory ({cache.num_cpu_pages * cache.chunk_tokens:,} tokens)"


def _with_host_tier(config: EngineConfig, machine: Machine, needs: _Needs) -> EngineConfig:
    cache = config.cache
    if cache.cpu_bytes is not None:
        return config.with_cpu_pages(needs.slot_bytes)
    if cache.cpu_pages is not None:
        return config
    if machine.is_cpu and cache.cpu_memory_fraction is None:
        num_bytes = _default_cpu_host_bytes(config, machine) if config.wants_host_tier else 0
    else:
        num_bytes = default_host_bytes(config, machine.free_bytes, len(machine.devices))
        if not machine.is_cpu and machine.pinnable_bytes is not None and cache.cpu_memory_fraction is None:
            num_bytes = min(num_bytes, machine.pinnable_bytes)
    # A chunk on its way to a slot takes memory of its own, so those in transit count.
    num_chunks = num_bytes // needs.slot_bytes
    num_slots = max(num_chunks - config.runner.max_num_staged_pages, num_chunks // 2)
    return config.with_cpu_slots(min(num_slots, _MAX_TOKENS // cache.chunk_tokens))


def _free_beside_indexes(config: EngineConfig, free_bytes: int | None, model: ModelConfig) -> int | None:
    """Return what is free on the host beside the indexes of drafts of all engines; None if unknown."""
    if free_bytes is None or not config.scheduler.draft_limit:
        return free_bytes
    context_tokens = config.resolve_context_tokens(model.max_position_embeddings)
    num_bytes = config.cache.engines_on_host * index_bytes(_most_running(config), context_tokens)
    return max(free_bytes - num_bytes, 0)


def _part_of_host(num_bytes: int | None, config: EngineConfig) -> int | None:
    """Return one engine's part of host memory; None if that is unknown."""
    return None if num_bytes is None else num_bytes // config.cache.engines_on_host


def _default_cpu_host_bytes(config: EngineConfig, machine: Machine) -> int:
    host_bytes = _part_of_host(machine.host_bytes, config)
    free_bytes = _part_of_host(machine.free_bytes, config)
    if host_bytes is None or free_bytes is None:
        return 0
    most = int(free_bytes * _CPU_FREE_SHARE / 2)
    return min(int(host_bytes * CPU_HOST_SHARE), most, MAX_CPU_HOST_BYTES)


def _cpu_pages(config: EngineConfig, machine: Machine, model: ModelConfig, needs: _Needs) -> int:
    """Return the pages of all CPU devices together, which share one memory."""
    chunk_tokens, all_bytes = config.cache.chunk_tokens, needs.page_bytes * len(machine.devices)
    num_tokens = max(_CPU_TOKENS, _CPU_CONTEXTS * model.max_position_embeddings)
    num_pages = -(-min(num_tokens, _MAX_TOKENS) // chunk_tokens)
    host_bytes = _part_of_host(machine.host_bytes, config)
    free_bytes = _part_of_host(machine.free_bytes, config)
    if host_bytes is not None:
        num_pages = min(num_pages, int(host_bytes * CPU_SHARE) // all_bytes)
    if free_bytes is not None:
        num_pages = min(num_pages, int(free_bytes * _CPU_FREE_SHARE) // all_bytes)
    if num_pages < MIN_PAGES:
        num_engines = config.cache.engines_on_host
        limit = (
            f"a number: {_number(machine.host_bytes)} bytes of memory, {_number(machine.free_bytes)} of them "
            f"free, hold not even {MIN_PAGES} pages of {all_bytes:,} bytes in a quarter of the memory and "
            f"half of what is free{f', for each of {num_engines} engines' if num_engines > 1 else ''}"
        )
        raise ConfigError("cache.gpu_pages", None, limit, "free memory, or choose a smaller model")
    return _floor_power(num_pages)


def _gpu_pages(
    config: EngineConfig, machine: Machine, model: ModelConfig, needs: _Needs, step_bytes: int
) -> int:
    """Return the pages of each GPU; the one with the least memory to spare counts."""
    num_devices = len(machine.devices)
    beside = {
        "chunks in transit": staging_bytes(
            config.cache.num_cpu_pages, config.runner.max_num_staged_pages, needs.staged_bytes
        ),
        "exchanges": reserved_bytes(config.cache.gpu_reserved_bytes, num_devices),
        "counts of ids": counts_bytes(
            _most_running(config) if config.runner.penalties else 0, model.vocab_size
        ),
        "steps": step_bytes,
    }
    least = min(_pages_of(one, config.cache, needs.page_bytes, beside) for one in machine.devices)
    return on_gpu_grid(min(least, _MAX_TOKENS // config.cache.chunk_tokens))


def _bytes_for_all(device: DeviceMemory, cache: CacheConfig) -> tuple[float, int]:
    """Return the share of a GPU that an engine takes, and how many bytes these are, weights included."""
    fraction, limit_bytes = cache.gpu_memory_fraction, device.limit_bytes
    if limit_bytes is None:
        raise _unreported(cache, device)
    if fraction is None:
        fraction = min(GPU_SHARE, device.jax_share)
    elif fraction > device.jax_share:
        limit = f"at most {device.jax_share:g}, the share of the GPU that JAX may use in this process"
        hint = (
            "raise XLA_PYTHON_CLIENT_MEM_FRACTION; a start without it raises the share itself, unless JAX "
            "was used before"
        )
        raise ConfigError("cache.gpu_memory_fraction", fraction, limit, hint)
    return fraction, min(int(fraction * limit_bytes / device.jax_share), limit_bytes)


def _pages_of(device: DeviceMemory, cache: CacheConfig, page_bytes: int, beside: dict[str, int]) -> int:
    fraction, all_bytes = _bytes_for_all(device, cache)
    num_pages = (all_bytes - device.used_bytes - sum(beside.values())) // page_bytes - 1
    if num_pages < MIN_PAGES:
        others = "".join(f", {name} {size:,}" for name, size in beside.items() if size)
        limit = (
            f"more: of the {all_bytes:,} bytes that it is, what is loaded takes {device.used_bytes:,}"
            f"{others}, and a page {page_bytes:,}"
        )
        hint = "raise runner.tensor_parallel_size, or lower scheduler.max_num_batched_tokens"
        raise ConfigError("cache.gpu_memory_fraction", fraction, limit, hint)
    return num_pages


def _unreported(cache: CacheConfig, device: DeviceMemory) -> ConfigError:
    limit = f"None: {device.kind!r} does not report how much memory it has"
    return ConfigError("cache.gpu_memory_fraction", cache.gpu_memory_fraction, limit, "give cache.gpu_pages")


def step_bytes(
    config: EngineConfig,
    model: ModelConfig,
    dtype: jnp.dtype,
    num_devices: int,
    attention: str = _LARGEST_ATTENTION,
) -> int:
    """Return an upper estimate of a step's temporaries on each device, in bytes.

    The start compares what XLA reports with the memory that is left. See `sized` for the arguments.
    """
    num_tokens = config.scheduler.max_num_batched_tokens
    # The residual stream in float32, with a copy; the two products of the feed-forward part in the dtype.
    mlp_bytes = num_tokens * 2 * -(-model.intermediate_size // num_devices) * jnp.dtype(dtype).itemsize
    if model.experts is not None:
        expert_bytes = _expert_bytes(model.experts, model.hidden_size, num_tokens, num_devices, dtype)
        mlp_bytes = max(mlp_bytes, expert_bytes)
    config = config.with_num_running(max(_most_running(config), 1))
    num_rows = min(config.scheduler.sample_limit, num_tokens)
    stream_bytes = num_tokens * 8 * model.hidden_size
    num_bytes = _STEP_BYTES + stream_bytes + mlp_bytes + _CHOICE_BYTES * num_rows * model.vocab_size
    return num_bytes + _scratch_bytes(config, model, dtype, num_devices, attention)


def _expert_bytes(
    experts: ExpertsConfig, hidden_size: int, num_tokens: int, num_devices: int, dtype: jnp.dtype
) -> int:
    """Return the bytes of the rows of all chosen experts: inputs, results and what is between."""
    rows = block_rows(num_tokens * experts.num_chosen, experts.num_experts)
    spec = GroupSpec(num_tokens, experts.num_chosen, experts.num_experts, rows)
    num_elements = spec.num_rows * (2 * hidden_size + -(-experts.width // num_devices))
    return num_elements * jnp.dtype(dtype).itemsize


def _scratch_bytes(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, num_devices: int, attention: str
) -> int:
    """Return the bytes of pages in 8 bits that one layer decodes, and of partial results over them.

    The largest step decodes the most pages, if the back end decodes any.
    """
    if config.cache.kv_dtype is None:
        return 0
    bucket = token_buckets(config.scheduler)[-1]
    specs = specs_of_bucket(model, config, dtype, attention, num_devices, bucket)
    num_pages = max(spec.scratch_pages for spec in specs)
    page_elements = config.cache.chunk_tokens * 2 * -(-model.num_kv_heads // num_devices) * model.head_dim
    return 2 * num_pages * page_elements + (_DECODED_PARTS_BYTES if num_pages else 0)


def _most_running(config: EngineConfig) -> int:
    """Return the most requests in the batch that a start may derive, before the pages are known."""
    scheduler = config.scheduler
    if scheduler.max_num_running is not None:
        return scheduler.max_num_running
    most = min(MAX_NUM_RUNNING, scheduler.max_num_batched_tokens - config.cache.chunk_tokens)
    return min(most, scheduler.max_num_rows or most)


def _with_num_running(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return a copy with `scheduler.max_num_running`, which follows the pages and the context."""
    if config.scheduler.max_num_running is not None:
        return config
    cache, most = config.cache, _most_running(config)
    pages_each = -(-config.resolve_context_tokens(model.max_position_embeddings) // cache.chunk_tokens)
    by_pages = cache.num_gpu_pages * cache.chunk_tokens // _ROW_TOKENS
    by_table = _MAX_TABLE_ENTRIES // (2 * pages_each)  # a request has up to two rows
    wanted = max(_floor_power(max(min(by_pages, by_table), 1)), _MIN_NUM_RUNNING)
    return config.with_num_running(max(min(wanted, most), 1))


def on_gpu_grid(num_pages: int) -> int:
    """Return the largest number of the grid that is at most `num_pages`; small numbers are on it."""
    step = max(_floor_power(num_pages) // _GPU_STEPS, 1)
    return num_pages // step * step


def _floor_power(number: int) -> int:
    """Return the largest power of two that is at most `number`, which is positive."""
    return 1 << (number.bit_length() - 1)


def _gibibytes(num_bytes: int) -> str:
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def _number(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
