"""The number of pages of a pool; new pools are created after the old ones have freed their memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import make_mesh, preset
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device import kv_storage
from pensieve_jax.device.kv_storage import (
    DevicePools,
    KVStorage,
    check_addresses,
    chunk_bytes,
    host_packing,
    most_byte_pages,
    num_layer_groups_on,
    packing_reason,
    slot_bytes,
)
from tests.device.transfers.transfer_bench import CACHE
from tests.device.transfers.transfer_bench import MODEL as SMALL_MODEL

MODEL = preset("llama2-7b")  # 32 layers, 32 heads of 128
PAGE_BYTES = 33 * 64 * 128  # of a layer, in 8 bits


def cache(gpu_pages: int, kv_dtype: str | None = "int8") -> CacheConfig:
    return CacheConfig(gpu_pages=gpu_pages, kv_dtype=kv_dtype)


def test_bytes_of_a_chunk():
    assert chunk_bytes(MODEL, 32, "bfloat16") == 32 * 32 * 64 * 128 * 2
    for kv_dtype in ("int8", "float8_e4m3fn"):
        assert chunk_bytes(MODEL, 32, "bfloat16", kv_dtype) == 32 * PAGE_BYTES


def test_bytes_of_a_slot():
    """Packed if possible: 49 rows of bytes for 32 tokens."""
    model, dtype = MODEL, jnp.dtype("bfloat16")
    assert slot_bytes(model, CacheConfig(), dtype) == 32 * 49 * 64 * 128
    assert slot_bytes(model, CacheConfig(pack_host=True), dtype) == 32 * 49 * 64 * 128
    assert slot_bytes(model, CacheConfig(pack_host=False), dtype) == 32 * 32 * 64 * 128 * 2
    assert slot_bytes(model, CacheConfig(), jnp.dtype("float16")) == 32 * 32 * 64 * 128 * 2
    assert slot_bytes(model, CacheConfig(kv_dtype="int8"), dtype) == 32 * PAGE_BYTES
    assert "on: 76.6% of the bytes" in packing_reason(model, CacheConfig(), dtype)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "why"),
    [
        (128, "float32", None, "float32 is not packed"),
        (128, "float16", None, "float16 is not packed"),
        (128, "bfloat16", "int8", "int8 is not packed"),
        (2, "bfloat16", None, "a head of 2 elements is odd, or too small"),
    ],
)
def test_an_impossible_packing_is_refused_if_requested(head_dim, dtype, kv_dtype, why):
    """Without a request the chunks stay unpacked."""
    model, dtype = preset("llama-tiny", head_dim=head_dim), jnp.dtype(dtype)
    assert host_packing(model, CacheConfig(kv_dtype=kv_dtype), dtype) is None
    assert why in packing_reason(model, CacheConfig(kv_dtype=kv_dtype), dtype)
    why = "beside cache.kv_dtype .'int8'.: only bfloat16" if kv_dtype else why
    with pytest.raises(ConfigError, match=f"cache.pack_host is True, but must be None or False.*{why}"):
        host_packing(model, CacheConfig(kv_dtype=kv_dtype, pack_host=True), dtype)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_pools_of_bytes_that_kernels_cannot_address_are_refused(num_devices):
    """Offsets are signed 32-bit byte counts up to 4 GiB."""
    most = (2**31 - 1) // (PAGE_BYTES // num_devices) - 1
    for gpu_pages in (most, 2**32 // (PAGE_BYTES // num_devices) + 1):
        check_addresses(MODEL, cache(gpu_pages), num_devices)
        assert most_byte_pages(MODEL, cache(gpu_pages), num_devices) == gpu_pages
    for gpu_pages in (most + 1, 2**32 // (PAGE_BYTES // num_devices) - 1):
        assert most_byte_pages(MODEL, cache(gpu_pages), num_devices) == most
        with pytest.raises(
            ConfigError, match=f"cache.gpu_pages is {gpu_pages}, but must be at most {most:,} .2 GiB"
        ):
            check_addresses(MODEL, cache(gpu_pages), num_devices)
        check_addresses(MODEL, dataclasses.replace(cache(gpu_pages), kv_dtype=None), num_devices)


def test_layers_form_two_groups_on_one_device_and_one_on_several_by_default():
    assert [num_layer_groups_on(num_devices, None) for num_devices in (1, 2, 4)] == [2, 1, 1]
    assert [num_layer_groups_on(num_devices, 3) for num_devices in (1, 4)] == [3, 3]


@pytest.fixture(scope="module")
def storage():
    return KVStorage(SMALL_MODEL, CACHE, jnp.dtype("float32"), make_mesh(1), 2)


def test_a_reset_deletes_pools_that_are_referenced_elsewhere(storage):
    pools = DevicePools(storage)
    pools.reset()
    old = pools.by_layer
    pools.reset()
    assert all(pool.is_deleted() for pool in old)
    assert not any(pool.is_deleted() for pool in pools.by_layer)


def test_a_reset_works_after_pools_were_donated(storage):
    """A program that took them failed before the updated ones were stored."""
    pools = DevicePools(storage)
    pools.reset()
    donate = jax.jit(lambda pools: [pool + 1 for pool in pools], donate_argnums=0)
    updated = donate(pools.groups[0])
    assert all(pool.is_deleted() for pool in pools.groups[0])
    pools.reset()
    assert not any(np.asarray(pool).any() for pool in pools.by_layer)
    del updated


def test_work_in_flight_finishes_on_the_old_pools(storage):
    pools = DevicePools(storage)
    pools.reset()
    pools.replace([jnp.full(storage.shape, layer, storage.dtype) for layer in range(MODEL.num_layers)])
    read = jax.jit(lambda pools: [jnp.tanh(pool).sum() for pool in pools])
    expected = [float(each) for each in read(pools.by_layer)]
    results = read(pools.by_layer)
    pools.reset()
    assert [float(each) for each in results] == expected


def test_new_pools_that_an_interrupt_kept_from_use_are_deleted_as_well(storage, monkeypatch):
    pools, made = DevicePools(storage), []
    new_pools = storage.new_pools

    def kept():
        made.append(new_pools())
        return made[-1]

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "new_pools", kept)
    with monkeypatch.context() as patch:
        patch.setattr(kv_storage.jax, "block_until_ready", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pools.reset()
    pools.reset()
    assert all(pool.is_deleted() for pool in made[0])
    assert not any(pool.is_deleted() for pool in made[1])
