"""Steps of padded batches by the kernel that reads each row's own columns, interpreted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from model_defs import make_mesh
from pallas_kernels import ring_decode
from pallas_kernels.ring_decode import DecodeBlock
from pensieve_jax import ConfigError, SamplingParams
from pensieve_jax.rebatching import PaddedLLM, RebatchingConfig
from pensieve_jax.rebatching.device import attention, programs
from pensieve_jax.rebatching.device.attention import RingAttention
from pensieve_jax.rebatching.device.ring_state import RING_SPEC, RingState
from tests.kernels.cross_lower import lower_for_cuda
from tests.rebatching.real_models import judge

CONFIG = RebatchingConfig(
    max_batch=2,
    kv_bytes=2**18,
    lengths=(32, 64),
    prefill_batch=1,
    preemptive=True,
    decode_backend="pallas_triton",
)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel runs here, slowly, in parts; gives what it is traced with."""
    traced = []
    row = ring_decode.TABLE["pallas_triton"]._replace(device_limit=lambda device: None)
    monkeypatch.setitem(ring_decode.TABLE, "pallas_triton", row)

    def call(*args: jax.Array, backend: str, **options: float) -> jax.Array:
        traced.append(backend)
        how = {"interpret": True, "block": DecodeBlock(16, 4, 2, 2)}
        return ring_decode.ring_decode_attention(*args, backend=backend, **how, **options)

    monkeypatch.setattr(attention, "ring_decode_attention", call)
    programs.decode.clear_cache()
    yield traced
    programs.decode.clear_cache()  # what was traced with it


def test_answers_are_those_of_a_dense_model(interpreted):
    """Of queries that join a running batch, make it longer, and preempt."""
    config = dataclasses.replace(CONFIG, random_seed=1)
    with PaddedLLM("random:llama-tiny", dtype="float32", config=config, progress=False) as llm:
        queries = [llm.engine.submit([9] * 30, GREEDY), llm.engine.submit([5, 6, 7], GREEDY)]
        for _ in range(4):
            llm.engine.step()
        queries.append(llm.engine.submit([3] * 12, GREEDY, priority=1))
        while llm.engine.has_unfinished:
            llm.engine.step()
        stats = llm.stats()
    assert stats["num_compilations"] == 0
    assert stats["num_suspensions"] and stats["num_resizes"]
    assert set(interpreted) == {"pallas_triton"}
    assert sum(judge("llama-tiny", query) for query in queries) > 0.9 * 3 * GREEDY.max_tokens


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_equals_plain_xla(num_devices, interpreted):
    """Free columns may hold NaN, and the new column is written before it is read."""
    rng = np.random.default_rng(num_devices)
    batch, num_heads, num_kv_heads, length, head_dim, place = 3, 4, 2, 48, 32, 5
    num_columns = np.array([1, 48, 9], np.int32)
    free = (place - np.arange(length)) % length >= num_columns[:, None]
    draw = rng.standard_normal
    pools = [draw((batch, num_kv_heads, length, head_dim)).astype(np.float32) for _ in "kv"]
    q = jnp.asarray(draw((batch, num_heads, head_dim)), jnp.float32)
    k, v = (jnp.asarray(draw((batch, num_kv_heads, head_dim)), jnp.float32) for _ in "kv")
    mesh = make_mesh(num_devices)
    found = []
    for backend in ("xla", "pallas_triton"):
        if backend != "xla":
            for pool in pools:
                pool.swapaxes(1, 2)[free] = np.nan
        ring = [jax.device_put(pool, NamedSharding(mesh, RING_SPEC)) for pool in pools]
        one = RingAttention(
            RingState([ring[0]], [ring[1]], None),
            jnp.int32(place),
            jnp.int32(1),
            jnp.asarray(num_columns),
            mesh=mesh,
            backend=backend,
        )
        found.append(np.asarray(one(0, q, k, v)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_lowers_for_cuda(num_devices):
    """With the ring donated, and one kernel, with its merge, for all layers."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh(
        (num_devices,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )

    def attend(layers: list[jax.Array], q: jax.Array, k: jax.Array, place: jax.Array, columns: jax.Array):
        state = RingState(list(layers[:2]), list(layers[2:]), None)
        one = RingAttention(state, place, jnp.int32(1), columns, mesh=mesh, backend="pallas_triton")
        for layer in range(2):
            q = one(layer, q, k, k)
        return one.state, q

    def array(spec: PartitionSpec, dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    pool = array(RING_SPEC, "bfloat16", 8, 8, 4096, 128)
    heads, whole = PartitionSpec(None, "tp", None), PartitionSpec()
    text = lower_for_cuda(
        jax.jit(attend, donate_argnums=0),
        [pool] * 4,
        array(heads, "bfloat16", 8, 32, 128),
        array(heads, "bfloat16", 8, 8, 128),
        array(whole, "int32"),
        array(whole, "int32", 8),
    )
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") in (2, 4)


def test_what_cannot_be_served_is_named():
    if jax.default_backend() == "cpu":
        with pytest.raises(ConfigError, match=r"decode_backend is .* 'auto' or 'xla' on this device.*NVIDIA"):
            PaddedLLM("random:llama-tiny", config=CONFIG, progress=False)


def test_a_model_that_the_kernel_does_not_serve_is_named(interpreted, monkeypatch):
    row = ring_decode.TABLE["pallas_triton"]._replace(head_dims=(128,))
    monkeypatch.setitem(ring_decode.TABLE, "pallas_triton", row)
    with pytest.raises(ConfigError, match=r"decode_backend is .* for this model.*head_dim = 32"):
        PaddedLLM("random:llama-tiny", config=CONFIG, progress=False)
