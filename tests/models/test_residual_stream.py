"""Models with the interpreted kernel for additions and norms: the logits equal plain XLA's.

This holds on one device and on several, and the kernel sends nothing between devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from model_defs import DenseAttention, ModelConfig, abstract_model, layers, make_mesh, preset, random_model
from pallas_kernels.residual_norms import add_and_norm
from tests.models.helpers import dense_logits
from tests.models.test_presets import lower_step_for_cuda

CONFIGS = {
    "llama": preset("llama-tiny"),
    "opt": preset("opt-tiny"),
    "opt_post_norm": preset("opt-tiny", pre_norm=False, final_norm=False, word_embed_dim=32),
    "opt_not_affine": preset("opt-tiny", norm_affine=False),
}
TOKEN_IDS = np.random.default_rng(3).integers(0, 320, 17).astype(np.int32)


@pytest.fixture
def interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make models use the kernel; the list records for every call whether there was something to add."""
    calls = []

    def record(x: jax.Array, y: jax.Array | None, *rest: jax.Array | None, **how: object) -> object:
        if how["backend"] == "pallas_triton":
            calls.append(y is not None)
        return add_and_norm(x, y, *rest, **how, interpret=True)

    monkeypatch.setattr(layers, "choose_backend", lambda width, device: "pallas_triton")
    monkeypatch.setattr(layers, "add_and_norm", record)
    return calls


def logits_of(config: ModelConfig, tp: int = 1, dtype: str = "float32") -> np.ndarray:
    return dense_logits(random_model(config, dtype=dtype, mesh=make_mesh(tp)), TOKEN_IDS)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_plain_xla(name: str, request: pytest.FixtureRequest) -> None:
    expected = logits_of(CONFIGS[name])
    calls = request.getfixturevalue("interpreted_kernel")
    got = logits_of(CONFIGS[name])
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert calls == ([True] * 4 if name == "opt_post_norm" else [False, True, True, True])


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "opt"])
def test_several_devices(name: str, request: pytest.FixtureRequest) -> None:
    expected = logits_of(CONFIGS[name])
    request.getfixturevalue("interpreted_kernel")
    got = logits_of(CONFIGS[name], tp=2)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("name", ["llama", pytest.param("opt", marks=pytest.mark.long)])
def test_groups_of_layers(name: str, interpreted_kernel: list[bool]) -> None:
    """A cut between layers changes no bit, and the first norm of a group has nothing to add.

    This holds in float32: below it, XLA need not round what it adds to the stream itself, where a group ends.
    """
    model = random_model(CONFIGS[name], dtype="float32", mesh=make_mesh(1))
    positions = np.arange(len(TOKEN_IDS), dtype=np.int32)
    x = jax.jit(model.embed_tokens)(TOKEN_IDS, positions)

    def run(x: jax.Array, start: int, stop: int) -> jax.Array:
        call = functools.partial(model.run_layers, attention=DenseAttention(), start=start, stop=stop)
        return jax.jit(call)(x, positions)

    whole, parts = run(x, 0, 2), run(run(x, 0, 1), 1, 2)
    assert whole.dtype == jnp.float32
    assert interpreted_kernel == [False, True, True, True, False, True, False, True]
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(run(x, 1, 1), x)


def test_nothing_is_sent_between_devices_for_it(request: pytest.FixtureRequest) -> None:
    """Every device norms its own copy of the stream: the collectives are those of plain XLA."""
    collectives = {}
    for form in ("xla", "kernel"):
        if form == "kernel":
            request.getfixturevalue("interpreted_kernel")
        model = random_model(CONFIGS["llama"], mesh=make_mesh(2))
        graph, state = nnx.split(model)

        def hidden(state: nnx.State, graph: nnx.GraphDef = graph) -> jax.Array:
            return nnx.merge(graph, state)(TOKEN_IDS, np.arange(17, dtype=np.int32), DenseAttention())

        text = jax.jit(hidden).lower(state).compile().as_text()
        names = ("all-reduce(", "all-gather(", "all-to-all(", "collective-permute(", "reduce-scatter(")
        collectives[form] = [text.count(f" {name}") for name in names]
    assert collectives["kernel"] == collectives["xla"]
    assert collectives["xla"][0] > 0


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=pytest.mark.long if (i + tp) % 2 else ())
        for i, name in enumerate(["llama2-13b-gqa10", "opt-13b", "llama-tiny"])
        for tp in (1, 2)
    ],
)
def test_a_gpu_gets_the_kernel(name: str, tp: int) -> None:
    """It does so for a mesh of absent GPUs too; one kernel with an addition, one without."""
    dtype = "float32" if name == "llama-tiny" else "bfloat16"
    text = lower_step_for_cuda(name, tp, dtype, 16, "pallas_triton")
    kind = "layer" if name.startswith("opt") else "rms"
    assert text.count(f'name = "add_and_norm_{kind}"') == text.count(f'name = "norm_{kind}"') == 1


def test_an_abstract_mesh_of_no_device_gets_plain_xla() -> None:
    model = abstract_model(CONFIGS["llama"], dtype="float32", mesh=AbstractMesh((1,), ("tp",)))
    x = jax.ShapeDtypeStruct((3, 64), jnp.float32)
    graph, state = nnx.split(model.final_norm)
    jaxpr = str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state).add(x, x))(state, x))
    assert "pallas_call" not in jaxpr and "rsqrt" in jaxpr
