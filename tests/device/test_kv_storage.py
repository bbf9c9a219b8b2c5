"""How many pages a pool may have, before any is made."""

from __future__ import annotations

import dataclasses

import pytest

from model_defs import preset
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device.kv_storage import check_addresses, chunk_bytes, most_byte_pages

MODEL = preset("llama2-7b")  # 32 layers, 32 heads of 128
PAGE_BYTES = 33 * 64 * 128  # of a layer, in 8 bits


def cache(gpu_pages: int, kv_dtype: str | None = "int8") -> CacheConfig:
    return CacheConfig(gpu_pages=gpu_pages, kv_dtype=kv_dtype)


def test_bytes_of_a_chunk():
    assert chunk_bytes(MODEL, 32, "bfloat16") == 32 * 32 * 64 * 128 * 2
    for kv_dtype in ("int8", "float8_e4m3fn"):
        assert chunk_bytes(MODEL, 32, "bfloat16", kv_dtype) == 32 * PAGE_BYTES


@pytest.mark.parametrize("num_devices", [1, 2])
def test_pools_of_bytes_that_kernels_cannot_address_are_refused(num_devices):
    """Offsets are signed and of 32 bits up to 4 GiB, and count bytes."""
    most = (2**31 - 1) // (PAGE_BYTES // num_devices) - 1
    for gpu_pages in (most, 2**32 // (PAGE_BYTES // num_devices) + 1):
        check_addresses(MODEL, cache(gpu_pages), num_devices)
        assert most_byte_pages(MODEL, cache(gpu_pages), num_devices) == gpu_pages
    for gpu_pages in (most + 1, 2**32 // (PAGE_BYTES // num_devices) - 1):
        assert most_byte_pages(MODEL, cache(gpu_pages), num_devices) == most
        with pytest.raises(
            ConfigError, match=f"cache.gpu_pages is {gpu_pages}, but must be at most {most:,}, 2"
        ):
            check_addresses(MODEL, cache(gpu_pages), num_devices)
        check_addresses(MODEL, dataclasses.replace(cache(gpu_pages), kv_dtype=None), num_devices)
