"""The matmul of small batches: when the layers use the kernel, and when XLA."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_defs import make_mesh, preset, small_batch_matmul
from model_defs.all_reduce import AllReduce, PartialSums, SumSpec, finish_sum, summing
from model_defs.gated_decoder import GatedMLP
from model_defs.layers import Build, FusedQKV, Linear
from pallas_kernels import decode_matmul
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus


@pytest.fixture
def calls(monkeypatch, added):
    """Record the kernel's calls, with XLA as a stand-in; it supports up to eight rows."""
    found = []

    def product(x, w, bias, *, gated, relu, backend, activation="silu"):
        found.append((x.shape, w.shape, gated, backend))
        added.append((bias is not None, relu))
        assert not (gated and (relu or bias is not None)), "what the kernel has not"
        return decode_matmul_by_xla(x, w, bias, gated=gated, activation=activation, relu=relu, backend="xla")

    decode_matmul_by_xla = decode_matmul.decode_matmul
    monkeypatch.setattr(decode_matmul, "supports", lambda num_rows, *_, **__: num_rows <= 8)
    monkeypatch.setattr(decode_matmul, "decode_matmul", product)
    return found


@pytest.fixture
def added():
    """Record for each of the kernel's calls whether it had a bias, and ReLU."""
    return []


def filled(module):
    """Fill a module with random weights."""
    for i, (_, leaf) in enumerate(nnx.iter_graph(module)):
        if isinstance(leaf, nnx.Param):
            shape = leaf.get_raw_value().shape
            leaf.set_value(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) / 8)
    return module


def build(num_devices=1, **changes):
    return Build(
        preset("llama-tiny", **changes),
        jnp.dtype("bfloat16"),
        make_mesh(num_devices, jax.devices()[:num_devices]),
    )


def run(module, num_rows, backend=None):
    width = preset("llama-tiny").hidden_size
    x = jax.random.normal(jax.random.key(9), (num_rows, width), jnp.bfloat16)
    with contextlib.nullcontext() if backend is None else small_batch_matmul.multiplying_by(backend):
        return jax.tree.leaves(jax.jit(lambda x: whole(module(x)))(x))  # traced anew


def gelu_mlp(build):
    """Make a gated MLP of another function."""
    return GatedMLP(dataclasses.replace(build, config=preset("llama-tiny", activation="geglu_tanh")))


def whole(y):
    """Add up partial sums, and return anything else unchanged."""
    return finish_sum(y) if isinstance(y, PartialSums) else y


@pytest.mark.parametrize(
    "make",
    [GatedMLP, gelu_mlp, lambda b: FusedQKV(b, bias=False), lambda b: FusedQKV(b, bias=True)],
    ids=["mlp", "gelu mlp", "qkv", "qkv with biases"],
)
def test_same_numbers(make, calls):
    module = filled(make(build()))
    plain = run(module, 8)
    assert not calls, "only where a step asks"
    for one, other in zip(run(module, 8, "pallas_mosaic_gpu"), plain, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0.05, atol=0.02)
        assert one.shape == other.shape and one.dtype == other.dtype
    assert calls and all(backend == "pallas_mosaic_gpu" for *_, backend in calls)


def test_a_gate_that_the_kernel_does_not_have_follows_a_plain_product(calls):
    module, x = filled(Linear(build(), (64,), (2, 128))), jnp.ones((8, 64), jnp.bfloat16)
    with small_batch_matmul.multiplying_by("pallas_mosaic_gpu"):
        found = {gate: module.gated(x, gate) for gate in ("silu", "gelu_tanh", "gelu")}
    assert [gated for *_, gated, _ in calls] == [True, True, False]
    assert len({np.asarray(y, np.float32).tobytes() for y in found.values()}) == 3


def test_which_products(calls):
    config = preset("llama-tiny")
    wide, hidden = config.intermediate_size, config.hidden_size
    run(filled(GatedMLP(build())), 8, "pallas_mosaic_gpu")
    assert [call[1:3] for call in calls] == [((hidden, 2 * wide), True), ((wide, hidden), False)]
    calls.clear()
    run(filled(GatedMLP(build())), 9, "pallas_mosaic_gpu")  # more rows than it supports
    run(filled(GatedMLP(build())), 8, small_batch_matmul.XLA)
    assert not calls


@pytest.mark.parametrize(
    ("shape", "num_in_dims", "gated", "depth", "width"),
    [
        ((64, 128), 1, False, 64, 128),
        ((4, 16, 2, 8), 2, False, 64, 16),
        ((64, 2, 128), 1, True, 64, 128),
    ],
)
def test_the_kernel_is_asked_with_the_size_of_the_result(
    monkeypatch, shape, num_in_dims, gated, depth, width
):
    """The result of a gated product is half as wide as its weights."""
    asked = []

    def supports(*sizes, **options):
        asked.append((sizes, options))
        return False

    monkeypatch.setattr(decode_matmul, "supports", supports)
    gate = "silu" if gated else None
    with small_batch_matmul.multiplying_by("pallas_mosaic_gpu"):
        assert small_batch_matmul.product(8, shape, num_in_dims, jnp.bfloat16, gate=gate) is None
    assert asked == [((8, depth, width), {"gated": gated, "dtype": jnp.bfloat16})]


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("split", [{"out_axis": 0}, {"in_axis": 0}], ids=str)
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_an_activation(name, split, num_devices, calls, added):
    """The kernel applies ReLU with each device's bias; other activations follow it, or the all-reduce."""
    are_parts = "in_axis" in split and num_devices > 1
    module = filled(Linear(build(num_devices), (128,), (256,), **split, bias=not are_parts))
    x = jax.random.normal(jax.random.key(1), (3, 128), jnp.bfloat16)
    want = module.activated(x, name)
    assert not calls
    with small_batch_matmul.multiplying_by("pallas_mosaic_gpu"):
        got = module.activated(x, name)
    out_parts = num_devices if "out_axis" in split else 1
    assert [call[1] for call in calls] == [(128 * out_parts // num_devices, 256 // out_parts)]
    assert added == [(not are_parts, name == "relu" and not are_parts)]
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.02)
    assert name != "relu" or ((got == 0).any() and (got >= 0).all())


@pytest.mark.parametrize(("own_sums", "bias"), [(False, False), (False, True), (True, False), (True, True)])
def test_parts_of_two_devices(own_sums, bias, calls):
    """Each device multiplies its part; the parts are added up if they belong to a sum.

    The all-reduce adds a sum's bias, not XLA; with a bias the gate follows the product.
    """
    config = preset("llama-tiny")
    one, two = (filled(GatedMLP(build(num_devices, mlp_bias=bias))) for num_devices in (1, 2))
    sums = AllReduce(
        SumSpec("xla", 16 * config.hidden_size), jnp.zeros((2, 14), jnp.int32), two.down.build.mesh
    )
    plain = run(one, 8)[0]
    with summing(sums if own_sums else None):
        found = run(two, 8, "pallas_mosaic_gpu")[0]
    # With a bias, XLA rounds the gate and up projections before and after the addition; the kernel rounds
    # once.
    atol = 0.04 if bias else 0.02
    np.testing.assert_allclose(found.astype(np.float32), plain.astype(np.float32), rtol=0.05, atol=atol)
    wide, hidden = config.intermediate_size // 2, config.hidden_size
    up, down = ((hidden, 2 * wide), not bias), ((wide, hidden), False)
    assert [call[1:3] for call in calls] == [up, *([down] if own_sums or not bias else [])]
    calls.clear()
    run(filled(FusedQKV(build(2), bias=False)), 8, "pallas_mosaic_gpu")
    assert [call[1] for call in calls] == [
        (hidden, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim // 2)
    ]


def test_several_dimensions(calls):
    """Heads are dimensions on both sides."""
    module = filled(Linear(build(), (4, 16), (2, 8), in_axis=0))
    x = jax.random.normal(jax.random.key(1), (3, 4, 16), jnp.bfloat16)
    with small_batch_matmul.multiplying_by("pallas_mosaic_gpu"):
        got = module(x)
    want = jnp.einsum("tab,abcd->tcd", x.astype(jnp.float32), module.kernel[...].astype(jnp.float32))
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=0.02, atol=0.02)
    assert calls == [((3, 64), (64, 16), False, "pallas_mosaic_gpu")]


@pytest.mark.parametrize("num_rows", [1, 128])
def test_parts_are_lowered_for_two_gpus(num_rows):
    """Sums are XLA's; the layer is Llama-2-70B's."""
    config = preset("llama2-70b")
    mesh = mesh_of_gpus(2)
    graph, state = nnx.split(GatedMLP(Build(config, jnp.dtype("bfloat16"), mesh)))
    leaves, treedef = jax.tree.flatten(state)

    def mlp(leaves, x):
        with small_batch_matmul.multiplying_by("pallas_mosaic_gpu"):
            return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))(x)

    x = jax.ShapeDtypeStruct((num_rows, config.hidden_size), jnp.bfloat16)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    text = lower_for_cuda(mlp, shapes, x, mesh=mesh)
    assert text.count("@mosaic_gpu") == 2 and text.count("all_reduce") == 1, text


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("num_rows", [1, 32, 128])
def test_two_gpus(num_rows):
    """Each device has half of the weights of a Llama-2-70B layer; the results are compared with XLA's."""
    config, mesh = preset("llama2-70b"), make_mesh(2)
    x = jax.random.normal(jax.random.key(2), (num_rows, config.hidden_size), jnp.bfloat16)
    for make in (GatedMLP, lambda b: FusedQKV(b, bias=False)):
        graph, state = nnx.split(make(Build(config, jnp.dtype("bfloat16"), mesh)))
        leaves, treedef = jax.tree.flatten(state)
        values = [
            jax.device_put(jax.random.normal(jax.random.key(i), leaf.shape, jnp.bfloat16) / 90, leaf.sharding)
            for i, leaf in enumerate(leaves)
        ]

        def run(values, x, backend, graph=graph, treedef=treedef):
            with small_batch_matmul.multiplying_by(backend):
                return nnx.merge(graph, jax.tree.unflatten(treedef, values))(x)

        texts, answers = [], []
        for backend in ("pallas_mosaic_gpu", small_batch_matmul.XLA):
            compiled = jax.jit(run, static_argnames="backend").lower(values, x, backend=backend).compile()
            texts.append(compiled.as_text())
            answers.append(
                jax.tree.map(lambda y: np.asarray(y, np.float32), jax.tree.leaves(compiled(values, x)))
            )
        assert "mosaic_gpu" in texts[0] and "mosaic_gpu" not in texts[1]
        for one, other in zip(*answers, strict=True):
            np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02 * np.abs(other).max())
