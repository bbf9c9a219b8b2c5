"""A mesh of 1, 2 or 4 devices gives the same logits to 1e-5 of the largest.

Sizes that do not divide are refused.
"""

import numpy as np
import pytest

from model_defs import ExpertsConfig, ModelConfig, ShardingError, make_mesh, preset, random_model
from model_defs.parameters import named_parameters
from tests.collectives import collectives
from tests.models.helpers import PagedStep, dense_logits

CONFIGS = {
    "llama": preset(
        "llama-tiny", num_heads=8, num_kv_heads=4, attention_bias=True, mlp_bias=True, initial_norm_scale=1.0
    ),
    "llama_tied_odd_vocab": preset(
        "llama-tiny", num_kv_heads=4, vocab_size=321, tie_word_embeddings=True, initial_norm_scale=1.0
    ),
    "opt": preset("opt-tiny", initial_norm_scale=1.0),
    "opt_post_norm": preset(
        "opt-tiny", pre_norm=False, final_norm=False, word_embed_dim=32, initializer_range=0.1
    ),
    "qwen2": preset("qwen2-tiny", initial_norm_scale=1.0),
    "qwen3": preset("qwen3-tiny", num_heads=8, num_kv_heads=4, attention_bias=True, initial_norm_scale=1.0),
    "mistral": preset("mistral-tiny", initial_norm_scale=1.0),
    "gpt2": preset("gpt2-tiny", initial_norm_scale=1.0),
    "granite": preset("granite-tiny", initial_norm_scale=1.0, attention_bias=True),
    "seed_oss": preset("seed_oss-tiny", initial_norm_scale=1.0, mlp_bias=True),
    "ministral3": preset("ministral3-tiny", initial_norm_scale=1.0),
    "phi3": preset("phi3-tiny", initial_norm_scale=1.0),
    "olmo2": preset("olmo2-tiny", initial_norm_scale=1.0, attention_bias=True),
    "qwen3_moe": preset("qwen3_moe-tiny", num_kv_heads=4, initial_norm_scale=1.0),
    "mixtral": preset("mixtral-tiny", initial_norm_scale=1.0),
    "glm4": preset("glm4-tiny", initial_norm_scale=1.0),
    "smollm3": preset("smollm3-tiny", initial_norm_scale=1.0),
    "olmo3": preset("olmo3-tiny", initial_norm_scale=1.0),
    "cohere2": preset("cohere2-tiny", attention_bias=True),
    "gemma3": preset("gemma3-tiny", initial_norm_scale=1.0),
    "gemma2": preset("gemma2-tiny"),
}
PAGES = np.array([5, 2, 7, 1])


def paged_logits(config: ModelConfig, tp: int) -> np.ndarray:
    """Run two chunks of one sequence through the paged pools."""
    mesh = make_mesh(tp)
    step = PagedStep(random_model(config, mesh=mesh), mesh, num_pages=8, max_num_rows=2, pages_per_row=4)
    for pool in step.pools:
        assert pool.addressable_shards[0].data.shape[2] == 2 * config.num_kv_heads // tp
    token_ids = np.random.default_rng(5).integers(0, 320, 50).astype(np.int32)
    first = step([(token_ids[:31], 0, PAGES)])
    return np.concatenate(first + step([(token_ids[31:], 31, PAGES)]))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", (4,)),
        ("opt", (2,)),
        ("qwen3_moe", (4,)),
        ("llama_tied_odd_vocab", (2,)),
        *(
            pytest.param(name, sizes, marks=pytest.mark.long)
            for name, sizes in {
                **{
                    "llama": (2,),
                    "opt": (1, 4),
                    "opt_post_norm": (4,),
                    "qwen2": (2,),
                    "qwen3": (2,),
                    "mistral": (2,),
                    "gpt2": (2,),
                    "granite": (2,),
                    "seed_oss": (2,),
                    "ministral3": (2,),
                    "phi3": (2,),
                    "olmo2": (2,),
                    "mixtral": (2,),
                    "glm4": (2,),
                    "smollm3": (2,),
                    "olmo3": (2,),
                    "cohere2": (2,),
                    "gemma3": (2,),
                    "gemma2": (2,),
                }
            }.items()
        ),
    ],
)
def test_logits_are_equal(name: str, sizes: tuple[int, ...]) -> None:
    """The tolerance is 1e-5 of the largest logit, which is 9 here; another order of sums adds up to 2e-5."""
    config = CONFIGS[name]
    token_ids = np.random.default_rng(5).integers(0, 320, 50).astype(np.int32)
    expected = dense_logits(random_model(config, mesh=make_mesh(1)), token_ids)
    assert expected.std() > 0.3
    scale = np.abs(expected).max()
    for tp in sizes:
        np.testing.assert_allclose(paged_logits(config, tp) / scale, expected / scale, atol=1e-5, rtol=0)


@pytest.mark.long
def test_norms_over_all_heads_add_one_sum_to_a_layer() -> None:
    """It has two numbers for each token: the sums of squares of queries and of keys."""
    mesh, config = make_mesh(2), CONFIGS["olmo2"]
    text = PagedStep(random_model(config, mesh=mesh), mesh, num_pages=8).compiled.as_text()
    assert collectives(text) == {"all-reduce": 3 * config.num_layers + 1}


def test_nothing_large_is_replicated() -> None:
    """Every matrix is split, except what a vocabulary or a learned position table forbids."""
    for name in ("llama", "opt", "qwen3", "qwen3_moe"):
        for key, parameter in named_parameters(random_model(CONFIGS[name], mesh=make_mesh(4))):
            value = parameter.get_value()
            if value.ndim > 1 and key != "position_table" and not key.endswith(".router"):
                assert value.addressable_shards[0].data.size * 4 == value.size, key


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, "num_heads=6 is not divisible by tp=4"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 is not divisible by tp=4"),
        ({"num_kv_heads": 4, "intermediate_size": 130}, "intermediate_size=130 is not divisible by tp=4"),
        (
            {"num_kv_heads": 4, "experts": ExpertsConfig(4, 2, 90)},
            r"experts.width=90 is not divisible by tp=4 \(the model has num_heads=4, .* experts.width=90\)",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(overrides: dict[str, int], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        random_model(preset("llama-tiny", **overrides), mesh=make_mesh(4))


@pytest.mark.parametrize("size", [0, 1000])
def test_mesh_size(size: int) -> None:
    with pytest.raises(ShardingError, match=f"tensor_parallel_size={size} must be between 1 and"):
        make_mesh(size)


def test_the_vocabulary_table_is_never_gathered() -> None:
    """The lookup in a split table adds partial rows, and logits stay where they are."""
    mesh = make_mesh(4)
    text = PagedStep(random_model(CONFIGS["llama"], mesh=mesh), mesh, num_pages=8).compiled.as_text()
    assert " all-gather(" not in text


@pytest.mark.parametrize(
    "name", ["opt", *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "qwen3", "mixtral"))]
)
def test_a_layer_has_two_all_reduces(name: str) -> None:
    """They follow attention and the MLP, plus one for the embedding; nothing else is exchanged."""
    mesh, config = make_mesh(2), CONFIGS[name]
    text = PagedStep(random_model(config, mesh=mesh), mesh, num_pages=8).compiled.as_text()
    assert collectives(text) == {"all-reduce": 2 * config.num_layers + 1}
