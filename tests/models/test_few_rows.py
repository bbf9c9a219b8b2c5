"""Who multiplies the few rows of a small step: the layers ask, and fall back to XLA."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_defs import few_rows, make_mesh, preset
from model_defs.gated_decoder import GatedMLP
from model_defs.layers import Build, FusedQKV, Linear
from pallas_kernels import decode_matmul


@pytest.fixture
def calls(monkeypatch):
    """Of the kernel, for which XLA stands; it serves up to eight rows."""
    found = []

    def product(x, w, *, gated, backend):
        found.append((x.shape, w.shape, gated, backend))
        return decode_matmul_by_xla(x, w, gated=gated, backend="xla")

    decode_matmul_by_xla = decode_matmul.decode_matmul
    monkeypatch.setattr(decode_matmul, "serves", lambda num_rows, *_, **__: num_rows <= 8)
    monkeypatch.setattr(decode_matmul, "decode_matmul", product)
    return found


def filled(module):
    """With random weights."""
    for i, (_, leaf) in enumerate(nnx.iter_graph(module)):
        if isinstance(leaf, nnx.Param):
            shape = leaf.get_raw_value().shape
            leaf.set_value(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) / 8)
    return module


def build(num_devices=1):
    return Build(
        preset("llama-tiny"), jnp.dtype("bfloat16"), make_mesh(num_devices, jax.devices()[:num_devices])
    )


def run(module, num_rows, backend=None):
    width = preset("llama-tiny").hidden_size
    x = jax.random.normal(jax.random.key(9), (num_rows, width), jnp.bfloat16)
    with contextlib.nullcontext() if backend is None else few_rows.multiplying_by(backend):
        return jax.tree.leaves(jax.jit(lambda x: module(x))(x))  # traced anew


@pytest.mark.parametrize("make", [GatedMLP, lambda b: FusedQKV(b, bias=False)], ids=["mlp", "qkv"])
def test_same_numbers(make, calls):
    module = filled(make(build()))
    plain = run(module, 8)
    assert not calls, "only where a step asks"
    for one, other in zip(run(module, 8, "pallas_mosaic_gpu"), plain, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0.05, atol=0.02)
        assert one.shape == other.shape and one.dtype == other.dtype
    assert calls and all(backend == "pallas_mosaic_gpu" for *_, backend in calls)


def test_which_products(calls):
    config = preset("llama-tiny")
    wide, hidden = config.intermediate_size, config.hidden_size
    run(filled(GatedMLP(build())), 8, "pallas_mosaic_gpu")
    assert [call[1:3] for call in calls] == [((hidden, 2 * wide), True), ((wide, hidden), False)]
    calls.clear()
    run(filled(GatedMLP(build())), 9, "pallas_mosaic_gpu")  # more rows than it serves
    run(filled(FusedQKV(build(), bias=True)), 8, "pallas_mosaic_gpu")
    run(filled(GatedMLP(build(2))), 8, "pallas_mosaic_gpu")  # weights that are split
    run(filled(GatedMLP(build())), 8, few_rows.XLA)
    assert not calls


def test_several_dimensions(calls):
    """Of heads, on both sides."""
    module = filled(Linear(build(), (4, 16), (2, 8), in_axis=0))
    x = jax.random.normal(jax.random.key(1), (3, 4, 16), jnp.bfloat16)
    with few_rows.multiplying_by("pallas_mosaic_gpu"):
        got = module(x)
    want = jnp.einsum("tab,abcd->tcd", x.astype(jnp.float32), module.kernel[...].astype(jnp.float32))
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=0.02, atol=0.02)
    assert calls == [((3, 64), (64, 16), False, "pallas_mosaic_gpu")]
