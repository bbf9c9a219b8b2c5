"""Steps of padded batches by the interpreted kernel, which reads only each row's own columns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from model_defs import make_mesh
from pallas_kernels import ring_decode
from pallas_kernels.ragged_paged_attention import AttentionHeads
from pallas_kernels.ring_decode import DecodeBlock
from pensieve_jax import ConfigError, SamplingParams
from pensieve_jax.rebatching import PaddedLLM, RebatchingConfig
from pensieve_jax.rebatching.device import attention, programs
from pensieve_jax.rebatching.device.attention import RingAttention
from pensieve_jax.rebatching.device.backends import AttentionBackends
from pensieve_jax.rebatching.device.ring_state import RING_SPEC, RingState
from tests.launching import load
from tests.rebatching.real_models import judge

CONFIG = RebatchingConfig(
    max_batch=2,
    kv_bytes=2**18,
    lengths=(32, 64),
    prefill_batch=1,
    preemptive=True,
    decode_backend="pallas_triton",
)
rebatching_runners = load("pensieve_lab.rebatching.runners")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret the kernel here in small parts; yield the arguments of its traces."""
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
    programs.decode.clear_cache()  # it was traced with the kernel


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(64,), pytest.param((32, 64), marks=pytest.mark.long)])
def test_answers_equal_a_dense_models(lengths, interpreted):
    """Queries join a running batch, make it longer, and preempt; the back end is reported."""
    config = dataclasses.replace(CONFIG, random_seed=1, lengths=lengths)
    with PaddedLLM("random:llama-tiny", dtype="float32", config=config, progress=False) as llm:
        queries = [llm.engine.submit([9] * 30, GREEDY), llm.engine.submit([5, 6, 7], GREEDY)]
        for _ in range(4):
            llm.engine.step()
        queries.append(llm.engine.submit([3] * 12, GREEDY, priority=1))
        while llm.engine.has_unfinished:
            llm.engine.step()
        stats, told = llm.stats(), rebatching_runners.memory(llm.engine._runner, config.kv_bytes)
    assert stats["num_compilations"] == 0
    assert stats["num_suspensions"] and stats["num_resizes"] >= len(lengths)
    assert set(interpreted) == {"pallas_triton"}
    assert told["decode_backend"] == {"name": "pallas_triton", "reason": "named in decode_backend"}
    assert told["attention_backend"]["name"] == "xla" and "NVIDIA GPU" in told["attention_backend"]["reason"]
    assert sum(judge("llama-tiny", query) for query in queries) > 0.9 * 3 * GREEDY.max_tokens


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.long), 2])
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
    """The ring is donated, and one kernel, with its merge, serves all layers."""
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
    traced = jax.jit(attend, donate_argnums=0).trace(
        [pool] * 4,
        array(heads, "bfloat16", 8, 32, 128),
        array(heads, "bfloat16", 8, 8, 128),
        array(whole, "int32"),
        array(whole, "int32", 8),
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") in (2, 4)
    # A known output of one device; of several it is left to the compiler which.
    donated = "tf.aliasing_output" if num_devices == 1 else "jax.buffer_donor"
    assert text.count(donated) == 4, text[:2000]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a device without the kernel")
def test_an_unsupported_model_is_named():
    with pytest.raises(ConfigError, match=r"decode_backend is .* 'auto' or 'xla' on this device.*NVIDIA"):
        PaddedLLM("random:llama-tiny", config=CONFIG, progress=False)


def test_rings_with_holes_are_for_plain_xla(interpreted):
    """This holds for any device; without a name the device's kernel is chosen."""
    heads, device = AttentionHeads(4, 2, 32, jnp.float32), jax.devices()[0]
    for insertion, name, reason in (("shape", "xla", "holes"), ("embed", "pallas_triton", "the fastest")):
        config = dataclasses.replace(CONFIG, insertion=insertion, decode_backend="auto")
        found = AttentionBackends.chosen(config, heads, device)
        assert found.decode_backend.name == name and reason in found.decode_backend.reason
        assert found.describe()["decode_backend"]["name"] == name


def test_a_model_that_the_kernel_does_not_serve_is_named(interpreted, monkeypatch):
    row = ring_decode.TABLE["pallas_triton"]._replace(head_dims=(128,))
    monkeypatch.setitem(ring_decode.TABLE, "pallas_triton", row)
    with pytest.raises(ConfigError, match=r"decode_backend is .* for this model.*head_dim = 32"):
        PaddedLLM("random:llama-tiny", config=CONFIG, progress=False)
