"""The growth of host memory and its refusals, and how layers are cut into groups."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from model_defs import LayerKind, make_mesh
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device.kv_storage import KVStorage, layer_groups
from pensieve_jax.device.transfers import host_pool
from pensieve_jax.device.transfers.host_pool import HostPool
from tests.device.transfers.transfer_bench import CACHE, CPU_PAGES, MODEL, Bench, failing

PLAIN = (LayerKind(),)


def test_groups():
    assert layer_groups(PLAIN * 5, 2) == (range(0, 2), range(2, 5))
    assert layer_groups(PLAIN * 3, 9) == (range(0, 1), range(1, 2), range(2, 3))
    assert layer_groups(PLAIN * 4, 1) == (range(0, 4),)


def test_groups_begin_at_whole_periods_of_the_kinds():
    """So equal patterns share one program. With a rest no two groups are alike, so they are equally long."""
    pattern = (LayerKind(window=8),) * 5 + PLAIN
    assert layer_groups(pattern * 8, 2) == (range(0, 24), range(24, 48))
    assert layer_groups((pattern * 5)[:26], 2) == (range(0, 13), range(13, 26))
    assert layer_groups(pattern * 3, 2) == (range(0, 6), range(6, 18))
    assert layer_groups(pattern * 3, 3) == (range(0, 6), range(6, 12), range(12, 18))
    assert layer_groups(pattern, 2) == (range(0, 3), range(3, 6)), "one period is not divided"
    assert layer_groups(PLAIN * 3 + pattern[:1] * 2, 2) == (range(0, 2), range(2, 5)), "no period"


def test_growth_is_shown(monkeypatch):
    """The progress shows the number of bytes, and beside it what is compiled."""
    monkeypatch.setattr(host_pool, "keeps_host_memory", lambda storage: True)
    bench = Bench()
    assert len(bench.preparations) == bench.transfers.num_preparations
    num_bytes = (CPU_PAGES + 20) * bench.storage.slot_bytes
    assert bench.preparations[0] == f"{num_bytes / 1e9:.1f} GB of host memory"
    assert "gather of 4 chunks, group 0" in bench.preparations[1:]


def test_on_cpus_nothing_grows():
    """The CPU runtime returns freed memory; a gigabyte in small chunks would take ten seconds."""
    bench = Bench()
    assert len(bench.preparations) == bench.transfers.num_preparations
    assert not any(name.endswith("of host memory") for name in bench.preparations)


@pytest.mark.parametrize(("num_slots", "last"), [(1000, [64]), (977, [41]), (940, [4])])
def test_small_chunks_share_arrays(monkeypatch, num_slots, last):
    """A host tier of a small model has 100,000s of chunks, and each array takes time."""
    monkeypatch.setattr(host_pool, "keeps_host_memory", lambda storage: True)
    storage = KVStorage(MODEL, CACHE, jnp.dtype("float32"), make_mesh(1), 2)
    pool = HostPool(storage, num_slots, 24)
    device_put, pinned = jax.device_put, []

    def record(arrays, sharding):
        pinned.extend(arrays if isinstance(arrays, list) else [])
        return device_put(arrays, sharding)

    monkeypatch.setattr(host_pool.jax, "device_put", record)
    assert len(list(pool.grow())) == pool.num_pieces == 16
    assert sum(array.nbytes for array in pinned) == (num_slots + 24) * storage.slot_bytes
    assert len(pinned) == (15 + len(last)) * len(storage.groups)


def test_chunks_of_large_models_have_arrays_of_their_own():
    sizes = [2**12, 2**20, 2**20 + 1, 2**22, 2**22 + 1, 2**24]
    assert [host_pool.chunks_per_array(size) for size in sizes] == [64, 4, 2, 1, 1, 1]


def test_more_host_memory_than_there_is_is_refused(monkeypatch):
    """The check precedes the allocation; the error has the numbers, and a size that fits."""
    storage = KVStorage(MODEL, CACHE, jnp.dtype("float32"), make_mesh(1), 2)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: 20 * storage.slot_bytes)
    message = r"cache\.cpu_pages is 17, but must be at most 16 pages .* 2 pages in transit.*cache\.cpu_bytes"
    with pytest.raises(ConfigError, match=message):
        HostPool(storage, 17, 2)
    HostPool(storage, 16, 2)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: 0)
    with pytest.raises(ConfigError, match="at most 0 pages"):
        HostPool(storage, 1, 1)
    HostPool(storage, 0, 1)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: None)
    HostPool(storage, 10**12, 1)


def test_host_memory_that_the_runtime_cannot_pin_is_refused(monkeypatch):
    """The message names the variable that raises the runtime's own limit, and how much was pinned."""
    monkeypatch.setattr(host_pool, "keeps_host_memory", lambda storage: True)
    storage = KVStorage(MODEL, CACHE, jnp.dtype("float32"), make_mesh(1), 2)
    pool = HostPool(storage, 100, 10)
    device_put, num_calls = jax.device_put, itertools.count()

    def fail_later(*args):
        return device_put(*args) if next(num_calls) < 5 else failing()

    monkeypatch.setattr(host_pool.jax, "device_put", fail_later)
    message = rf"could pin {64 * storage.slot_bytes:,} of .*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.*RESOURCE_EX"
    with pytest.raises(ConfigError, match=message) as caught:
        list(pool.grow())
    assert caught.value.field == "cache.cpu_pages"
