"""Logits of tiny checkpoints equal those transformers computed, dense and through the paged pool."""

import dataclasses

import numpy as np
import pytest

from model_defs import load_model, make_mesh
from scripts.dev import make_golden_logits
from tests.models.helpers import GOLDEN, VARIANTS, PagedStep, dense_logits, golden

TOLERANCE = 1e-4
IN_SHORT = {  # paged as well
    "llama_gqa_linear",
    "mistral_short_window",
    "qwen2_late_window",
    "phi3_long",
    "gpt2_tied",
    "granite_tied",
    "ministral3_growth",
    "olmo2_bias",
    "cohere2_bias",
    "gemma2_window",
    "opt_post_norm",
    "qwen3_gqa",
    "qwen3_moe_raw",
}


def test_every_variant_is_there() -> None:
    assert sorted(make_golden_logits.VARIANTS) == VARIANTS
    seeds = [variant.seed for variant in make_golden_logits.VARIANTS.values() if variant.seed is not None]
    assert len(set(seeds)) == len(seeds) and min(seeds) > len(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense(variant: str) -> None:
    token_ids, expected = golden(variant)
    model = load_model(GOLDEN / variant, dtype="float32", mesh=make_mesh(1))
    assert expected.std() > 0.3  # logits that are all alike would agree with anything
    np.testing.assert_allclose(dense_logits(model, token_ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in IN_SHORT else pytest.mark.long) for v in VARIANTS]
)
def test_paged_over_several_steps(variant: str) -> None:
    """Chunks have uneven lengths, two sequences share a step, and a page list is out of order."""
    token_ids, expected = golden(variant)
    mesh = make_mesh(1)
    step = PagedStep(load_model(GOLDEN / variant, dtype="float32", mesh=mesh), mesh)
    first, second = np.array([9, 2, 5]), np.array([4, 14, 1])
    got = [step([(token_ids[:21], 0, first)])[0]]
    chunk, other = step([(token_ids[21:22], 21, first), (token_ids[:30], 0, second)])
    np.testing.assert_allclose(other, expected[:30], atol=TOLERANCE, rtol=0)
    got.append(chunk)
    got.append(step([(token_ids[22:], 22, first)])[0])
    np.testing.assert_allclose(np.concatenate(got), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "variant",
    [
        "mistral_short_window",
        "qwen2_late_window",
        "qwen3_early_window",
        "cohere2_window",
        "gemma2_window",
        "gemma3_ropes",
        "olmo3_window",
        "smollm3_window",
    ],
)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_that_is_off_by_one_is_found(variant: str, change: int) -> None:
    token_ids, expected = golden(variant)
    model = load_model(GOLDEN / variant, dtype="float32", mesh=make_mesh(1))
    for layer in model.layers:
        if (window := layer.options.window) is not None:
            assert 3 * window < len(token_ids)
            layer.options = dataclasses.replace(layer.options, window=window + change)
    assert np.abs(dense_logits(model, token_ids) - expected).max() > 100 * TOLERANCE


def test_recompute_as_a_second_query_range() -> None:
    """Dropped leading tokens and the new ones are two rows over one page list in one step."""
    token_ids, expected = golden("llama_gqa_linear")
    mesh = make_mesh(1)
    step = PagedStep(load_model(GOLDEN / "llama_gqa_linear", dtype="float32", mesh=mesh), mesh)
    pages = np.array([3, 8, 11])
    step([(token_ids[:30], 0, pages)])
    moved = np.array([5, 8, 11])  # the first page is lost; its tokens go to another
    recomputed, new = step([(token_ids[:16], 0, moved), (token_ids[30:], 30, moved)])
    np.testing.assert_allclose(recomputed, expected[:16], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(new, expected[30:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str) -> None:
    token_ids, expected = golden("llama_default")
    model = load_model(GOLDEN / "llama_default", dtype=dtype, mesh=make_mesh(1))
    difference = np.abs(dense_logits(model, token_ids) - expected)
    assert np.quantile(difference, 0.99) < 0.1 * expected.std()
