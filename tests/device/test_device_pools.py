"""Pools are made anew: the old ones first give back their memory, whoever refers to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import make_mesh
from pensieve_jax.device import device_pools
from pensieve_jax.device.device_pools import DevicePools
from pensieve_jax.device.kv_storage import KVStorage
from tests.device.transfer_bench import CACHE, MODEL


@pytest.fixture(scope="module")
def storage():
    return KVStorage(MODEL, CACHE, jnp.dtype("float32"), make_mesh(1), 2)


def test_a_reset_deletes_pools_that_others_refer_to(storage):
    pools = DevicePools(storage)
    pools.reset()
    old = pools.by_layer
    pools.reset()
    assert all(pool.is_deleted() for pool in old)
    assert not any(pool.is_deleted() for pool in pools.by_layer)


def test_a_reset_takes_pools_that_were_donated(storage):
    """A program that took them failed before the updated ones were put back."""
    pools = DevicePools(storage)
    pools.reset()
    donate = jax.jit(lambda pools: [pool + 1 for pool in pools], donate_argnums=0)
    updated = donate(pools.groups[0])
    assert all(pool.is_deleted() for pool in pools.groups[0])
    pools.reset()
    assert not any(np.asarray(pool).any() for pool in pools.by_layer)
    del updated


def test_work_in_flight_ends_with_the_pools_it_was_given(storage):
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
        patch.setattr(device_pools.jax, "block_until_ready", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pools.reset()
    pools.reset()
    assert all(pool.is_deleted() for pool in made[0])
    assert not any(pool.is_deleted() for pool in made[1])
