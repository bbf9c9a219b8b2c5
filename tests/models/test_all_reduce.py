"""Models with all-reduces of our own, with `psum` for the kernels: the logits equal those of XLA's sums.

Every sum except a group's last one goes to the norm that follows, with the bias of its projection.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import ModelConfig, make_mesh, preset, random_model
from model_defs.all_reduce import AllReduce, PartialSums, SumSpec, add_terms, finish_sum, summing
from pallas_kernels import all_reduce
from tests.models.helpers import dense_logits

CONFIGS = {
    "llama_biases": preset("llama-tiny", attention_bias=True, mlp_bias=True),
    "llama_one_bias": preset("llama-tiny", attention_bias=True),
    "experts": preset("qwen3_moe-tiny"),
    "opt": preset("opt-tiny"),
    "opt_post_norm": preset("opt-tiny", pre_norm=False, final_norm=False, word_embed_dim=32),
    "opt_not_affine": preset("opt-tiny", norm_affine=False),
    "opt_no_biases": preset("opt-tiny", attention_bias=False, mlp_bias=False),
}
IN_SHORT = {
    ("llama_one_bias", False),
    ("llama_biases", True),
    ("experts", False),
    ("opt_post_norm", True),
    ("opt_not_affine", False),
}
TOKEN_IDS = np.random.default_rng(3).integers(0, 320, 18).astype(np.int32)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str, set[str]]]:
    """Record of every sum with a norm: whether in shares, the kind of norm, the arrays that are present."""
    found = []

    def recorded(name: str) -> object:
        call = getattr(all_reduce, name)

        def record(
            partial: object, table: object, stream: object, affine: all_reduce.Affine, **rest
        ) -> object:
            arrays = {array for array, value in affine._asdict().items() if value is not None}
            found.append((name == "sum_and_norm_of_shares", rest["norm"].kind, arrays))
            return call(partial, table, stream, affine, **rest)

        return record

    for name in ("sum_and_norm", "sum_and_norm_of_shares"):
        monkeypatch.setattr(all_reduce, name, recorded(name))
    return found


def arrays_of(config: ModelConfig) -> list[set[str]]:
    """Return the arrays that are present after attention, and after the MLP."""
    is_opt = config.architecture == "opt"
    norm = ({"scale", "bias"} if is_opt else {"scale"}) if config.norm_affine else set()
    biases = (config.attention_bias, config.mlp_bias)
    return [norm | {"sum_bias"} if bias else norm for bias in biases]


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        pytest.param(name, shares, marks=[] if (name, shares) in IN_SHORT else pytest.mark.long)
        for name in CONFIGS
        for shares in (False, True)
    ],
)
def test_logits_equal_those_of_xlas_sums(
    name: str, shares: bool, norms: list[tuple[bool, str, set[str]]]
) -> None:
    config, mesh = CONFIGS[name], make_mesh(2)
    model = random_model(config, dtype="float32", mesh=mesh)
    expected = dense_logits(model, TOKEN_IDS)
    assert not norms
    capacity = 16 if shares else len(TOKEN_IDS) * config.hidden_size * 4  # bytes
    with summing(AllReduce(SumSpec("xla", capacity), jnp.zeros((2, 14), jnp.int32), mesh)):
        found = dense_logits(model, TOKEN_IDS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    num_sums = 2 * config.num_layers - config.pre_norm  # in post-norm layers a norm follows the last one too
    kind = "layer" if config.architecture == "opt" else "rms"
    assert norms == [(shares, kind, arrays) for arrays in arrays_of(config) * config.num_layers][:num_sums]


@pytest.mark.parametrize(
    ("name", "num_sums_with_norm"),
    [
        ("cohere2-tiny", 1),  # both blocks of a layer in one sum, and the last one before no norm
        pytest.param("gemma3-tiny", 0, marks=pytest.mark.long),  # norms of outputs need whole sums
        pytest.param("olmo2-tiny", 0, marks=pytest.mark.long),
    ],
)
def test_layers_of_other_structures(
    name: str, num_sums_with_norm: int, norms: list[tuple[bool, str, set[str]]]
) -> None:
    config, mesh = preset(name), make_mesh(2)
    model = random_model(config, dtype="float32", mesh=mesh)
    expected = dense_logits(model, TOKEN_IDS)
    capacity = len(TOKEN_IDS) * config.hidden_size * 4  # bytes
    with summing(AllReduce(SumSpec("xla", capacity), jnp.zeros((2, 14), jnp.int32), mesh)):
        found = dense_logits(model, TOKEN_IDS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert len(norms) == num_sums_with_norm


@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_terms_that_are_added_take_one_sum(biases: tuple[bool, bool]) -> None:
    """Partial sums stay partial, and each of the terms keeps its bias."""
    sums = AllReduce(SumSpec("xla", 4096), jnp.zeros((2, 14), jnp.int32), make_mesh(2))
    rng = np.random.default_rng(1)
    parts, terms = rng.normal(size=(2, 2, 3, 128)).astype(np.float32), []
    for part, has_bias in zip(parts, biases, strict=True):
        bias = jnp.asarray(rng.normal(size=128), jnp.float32) if has_bias else None
        terms.append(PartialSums(sums, jnp.asarray(part), bias))
    whole = [finish_sum(term) for term in terms]
    both = add_terms(*terms)
    assert isinstance(both, PartialSums)
    np.testing.assert_allclose(finish_sum(both), whole[0] + whole[1], rtol=1e-6, atol=1e-6)
    mixed = add_terms(terms[0], whole[1].astype(jnp.bfloat16))
    assert not isinstance(mixed, PartialSums) and mixed.dtype == jnp.float32
    np.testing.assert_allclose(mixed, whole[0] + whole[1], atol=0.05)


@pytest.mark.parametrize(("num_tokens", "shares"), [(64, False), (66, False), (68, True)])
def test_four_devices_share_out_few_rows_as_well(
    num_tokens: int, shares: bool, norms: list[tuple[bool, str, set[str]]]
) -> None:
    """From 65 rows on, if the devices divide them; the last sum, before no norm, is then XLA's."""
    config, mesh = CONFIGS["opt"], make_mesh(4)
    model = random_model(config, dtype="float32", mesh=mesh)
    token_ids = np.random.default_rng(num_tokens).integers(0, 320, num_tokens).astype(np.int32)
    expected = dense_logits(model, token_ids)
    spec = SumSpec("xla", 512 * config.hidden_size * 4)
    with summing(AllReduce(spec, jnp.zeros((4, 22), jnp.int32), mesh)):
        found = dense_logits(model, token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert {in_shares for in_shares, _, _ in norms} == {shares}
