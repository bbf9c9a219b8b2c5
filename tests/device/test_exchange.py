"""All-reduces by our kernels, in whole steps: the same tokens, and errors when a device is lost."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model_defs import load_model, make_mesh
from model_defs.all_reduce import SumSpec
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Affine
from pallas_kernels.residual_norms import NormSpec
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.decoding.device import sampler
from pensieve_jax.device import exchange
from pensieve_jax.device.model_runner import ModelRunner
from tests.collectives import collectives
from tests.device.test_model_runner import (
    Row,
    Stepper,
    Talk,
    assert_equals_reference,
    engine_config,
    random_ids,
)


def config_of(num_devices=2):
    """Return a configuration with one bucket, so that little is compiled."""
    config = engine_config(num_devices)
    return dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, all_reduce="jax_triton"),
        scheduler=dataclasses.replace(config.scheduler, token_buckets=(64,)),
    )


@functools.cache
def model_on_two(preset):
    return load_model(f"random:{preset}", dtype="float32", mesh=make_mesh(2), seed=1)


@pytest.fixture
def by_psum(monkeypatch):
    """Replace the kernel by `psum`, which runs on any device; everything else is unchanged."""
    monkeypatch.setattr(all_reduce, "devices_limit", lambda devices: None)
    monkeypatch.setattr(exchange, "SumSpec", lambda backend, capacity: SumSpec("xla", capacity))
    modes = sampler.all_modes()[:1]
    monkeypatch.setattr(sampler, "all_modes", lambda: modes)


class WideStepper(Stepper):
    """Stepper with a single bucket."""

    buckets = (64,)


def check_a_talk(preset, runner):
    """Run a prompt in pieces and decode, greedily; compare with the dense reference."""
    runner.reset()
    stepper, talk = WideStepper(runner), Talk(random_ids(30, seed=12), pages=[3, 6, 8])
    stepper.step(Row(talk, 0, 20))
    stepper.step(Row(talk, 20, 30, samples=True))
    for _ in range(4):
        stepper.step(Row(talk, len(talk.ids) - 1, len(talk.ids), samples=True))
    assert_equals_reference(preset, talk)


@pytest.mark.parametrize("preset", ["llama-tiny", pytest.param("opt-tiny", marks=pytest.mark.long)])
def test_tokens_are_the_references(by_psum, preset):
    """Without biases (Llama) and with them (OPT); a lost device fails this step, and no other."""
    runner = ModelRunner(model_on_two(preset), config_of(), make_mesh(2))
    alone = runner._exchange.arrays[0].tolist()
    runner.warm_up()
    assert runner._exchange.arrays[0].tolist() != alone, "devices would not wait for each other"
    check_a_talk(preset, runner)
    for (_, kinds), executable in runner._executables.run_layers.items():
        assert collectives(executable.as_text()) == {"all-reduce": 2 * len(kinds)}
    before = runner._exchange.arrays[1]
    runner._exchange._memory.words = before.at[1, 0].set(1)
    stepper, talk = WideStepper(runner), Talk(random_ids(9, seed=2), pages=[1])
    runner._next_step_id = None
    with pytest.raises(StepFailedError, match="timed out waiting"):
        stepper.step(Row(talk, 0, 9, samples=True))
    check_a_talk(preset, runner)
    assert not runner._exchange.arrays[1].any() and runner._exchange.arrays[1] is not before


@pytest.mark.parametrize("preset", [pytest.param("llama-tiny", marks=pytest.mark.long), "opt-tiny"])
def test_many_rows_are_reduced_in_shares(preset, by_psum, monkeypatch):
    """Tokens are equal although each device keeps its share of the stream from a part's second sum on."""
    capacity = 16 * model_on_two(preset).config.hidden_size * 4  # bytes
    monkeypatch.setattr(exchange, "SumSpec", lambda backend, _: SumSpec("xla", capacity))
    runner = ModelRunner(model_on_two(preset), config_of(), make_mesh(2))
    runner.warm_up()
    check_a_talk(preset, runner)
    for (_, kinds), executable in runner._executables.run_layers.items():
        found = collectives(executable.as_text())
        assert found["reduce-scatter"] == 2 * len(kinds) - 1 and found["all-gather"] >= 2 * len(kinds) - 1


def test_unsupported_devices_are_refused():
    with pytest.raises(
        ConfigError, match=r"runner\.all_reduce is 'jax_triton', but must be 'auto' or 'xla' here.*NVIDIA"
    ):
        ModelRunner(model_on_two("llama-tiny"), config_of(), make_mesh(2))


def test_one_device_needs_no_all_reduce():
    model = load_model("random:llama-tiny", dtype="float32", mesh=make_mesh(1), seed=1)
    assert ModelRunner(model, config_of(1), make_mesh(1))._exchange.arrays == ()


needs_two_gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two NVIDIA GPUs"
)


WIDTH = 8192
NUM_GPUS = min(len(jax.devices()), all_reduce.MAX_DEVICES)


def norm_and_affine(kind):
    """Return a layer norm with all options, or the other kind with its scale."""
    rng = np.random.default_rng(7)
    sum_bias, scale, bias = (rng.normal(size=WIDTH).astype(jnp.bfloat16) for _ in range(3))
    affine = Affine(sum_bias, scale, bias) if kind == "layer" else Affine(scale=scale)
    return NormSpec(kind, 1e-5, jnp.bfloat16), affine


def summed(part):
    """Add in the order of devices, and round once; XLA uses its own order."""
    return functools.reduce(lambda total, one: total + one.astype(np.float32), part, np.float32(0)).astype(
        part.dtype
    )


def expected_stream(part, stream, affine):
    """Compute it by numpy, since XLA need not round what it adds to a stream."""
    total = summed(part)
    total = total if affine.sum_bias is None else total + affine.sum_bias
    return stream + total.astype(np.float32)


def expected_norm(stream, norm, affine):
    """Compute it by numpy: XLA's bfloat16 sum of four addends differs."""
    wide = np.asarray(stream, np.float64)
    if norm.kind == "layer":
        wide = wide - wide.mean(axis=1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + norm.eps)
    scale, bias = (None if one is None else np.asarray(one, np.float64) for one in affine[1:])
    return wide * (1 if scale is None else scale) + (0 if bias is None else bias)


def assert_nobody_is_lost(memory):
    """Check the current status words: JAX does not know that kernels write to them."""
    assert not np.asarray(jnp.copy(memory.words))[:, 0].any()


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("kind", [None, "rms", "layer"])
@pytest.mark.parametrize("num_rows", [1, 32, 129, 512])
def test_sums_of_few_rows(kind, num_rows):
    """Results are bit-identical on all GPUs; many launches alternate between the buffers."""
    mesh = make_mesh(NUM_GPUS)
    memory = all_reduce.ExchangeMemory(mesh, WIDTH, "bfloat16")
    split, whole = PartitionSpec("tp"), PartitionSpec()
    rng = np.random.default_rng(num_rows)
    parts = [rng.normal(size=(NUM_GPUS, num_rows, WIDTH)).astype(jnp.bfloat16) for _ in range(5)]
    stream = rng.normal(size=(num_rows, WIDTH)).astype(np.float32)
    norm, affine = norm_and_affine(kind)

    def run(part, table, stream, affine):
        arguments = {"axis": "tp", "capacity": memory.capacity}
        if kind is None:
            return all_reduce.sum_over_devices(part[0], table, **arguments)
        return all_reduce.sum_and_norm(part[0], table, stream, affine, norm=norm, **arguments)

    own = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=whole, check_vma=False)
    )
    jax.block_until_ready(own(parts[0], memory.table, stream, affine))
    assert_nobody_is_lost(memory)
    memory.renew()
    for part in parts:
        found = jax.tree.leaves(own(part, memory.table, stream, affine))
        total = summed(part) if kind is None else expected_stream(part, stream, affine)
        for shard in found[0].addressable_shards:
            np.testing.assert_array_equal(shard.data, total)
        if kind is not None:
            normed = expected_norm(total, norm, affine)
            np.testing.assert_allclose(np.asarray(found[1]).astype(np.float64), normed, rtol=2**-8, atol=1e-3)
    assert_nobody_is_lost(memory)


def check_shares(part, few, streams, normed, stream, norm, affine):
    """Check a first sum in shares, and another one of its result."""
    np.testing.assert_array_equal(few, summed(part)[:32])
    np.testing.assert_array_equal(streams[0], expected_stream(part, stream, affine))
    again = expected_stream(normed[0][None] * part, streams[0], affine)
    np.testing.assert_array_equal(streams[1], again)
    for one, other in zip(normed, streams, strict=True):
        some = slice(None, None, 37)  # numpy is slow
        expected = expected_norm(other[some], norm, affine)
        np.testing.assert_allclose(one[some].astype(np.float64), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("num_rows", [36, 132, 516, 2040, 2064])
def test_sums_in_shares(kind, num_rows):
    """Many launches, by peer buffer if they fit, else by handshake, interleaved with small batches."""
    mesh = make_mesh(NUM_GPUS)
    memory = all_reduce.ExchangeMemory(mesh, WIDTH, "bfloat16")
    split, whole = PartitionSpec("tp"), PartitionSpec()
    rng = np.random.default_rng(num_rows)
    parts = [rng.normal(size=(NUM_GPUS, num_rows, WIDTH)).astype(jnp.bfloat16) for _ in range(3)]
    stream = rng.normal(size=(num_rows, WIDTH)).astype(np.float32)
    norm, affine = norm_and_affine(kind)

    def run(part, table, share, affine):
        few = all_reduce.sum_over_devices(part[0][:32], table, axis="tp", capacity=memory.capacity)
        shares = functools.partial(
            all_reduce.sum_and_norm_of_shares,
            table=table,
            affine=affine,
            norm=norm,
            axis="tp",
        )
        share, normed = shares(part[0], share=share, capacity=memory.capacity)
        again = shares(normed * part[0], share=share, capacity=0)  # by handshake
        return few, (share, again[0]), (normed, again[1])

    specs = {"in_specs": (split, split, split, whole), "out_specs": (whole, split, whole)}
    own = jax.jit(jax.shard_map(run, mesh=mesh, **specs, check_vma=False))
    jax.block_until_ready(own(parts[0], memory.table, stream, affine))
    assert_nobody_is_lost(memory)
    memory.renew()
    answers = []
    for number in range(4 * len(parts)):
        part = parts[number % len(parts)]
        found = own(part, memory.table, stream, affine)
        for one in found[2]:
            everybodys = [np.asarray(shard.data) for shard in one.addressable_shards]
            for other in everybodys[1:]:
                np.testing.assert_array_equal(other, everybodys[0])
        few, streams, normed = jax.tree.map(np.asarray, found)
        if number < len(parts):
            check_shares(part, few, streams, normed, stream, norm, affine)
            answers.append((few, streams, normed))
        for one, other in zip(
            jax.tree.leaves((few, streams, normed)),
            jax.tree.leaves(answers[number % len(parts)]),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
    assert_nobody_is_lost(memory)


@pytest.mark.gpu
@needs_two_gpus
def test_a_peer_that_does_not_come_is_not_waited_for_for_ever():
    """If one device launches and the other does not, the result becomes NaN, and both report it."""
    from pallas_kernels.all_reduce.jax_triton import triton_sum

    memory = all_reduce.ExchangeMemory(make_mesh(2), 256, "bfloat16")
    run = jax.jit(functools.partial(triton_sum, num_devices=2, capacity=memory.capacity))
    tables = [shard.data for shard in memory.table.addressable_shards]
    part = jax.device_put(np.ones((4, 256), jnp.bfloat16), jax.devices()[0])
    jax.block_until_ready(run(part, tables[0]))
    memory.renew()
    tables = [shard.data for shard in memory.table.addressable_shards]
    total = run(part, tables[0])
    assert np.isnan(np.asarray(total).astype(np.float32)).all()
    assert np.asarray(jnp.copy(memory.words))[:, 0].all()


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("preset", ["llama-tiny", "opt-tiny"])
def test_tokens_of_whole_steps_are_the_references(preset, shares, monkeypatch):
    """As on virtual devices, with the kernels in their place."""
    if shares:
        capacity = 16 * model_on_two(preset).config.hidden_size * 4  # bytes
        monkeypatch.setattr(exchange, "SumSpec", lambda name, _: SumSpec(name, capacity))
    runner = ModelRunner(model_on_two(preset), config_of(), make_mesh(2))
    runner.warm_up()
    check_a_talk(preset, runner)
