"""Tensors of a checkpoint that are split over devices before a parameter is assembled from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from model_defs import ExpertsConfig, preset
from model_defs.tensor_recipes import (
    ExpertNames,
    attention_recipes,
    expert_recipes,
    from_one_tensor,
    gated_mlp_recipes,
    transposed,
)

CONFIG = preset("llama-tiny")
HALF_CONFIG = dataclasses.replace(
    CONFIG,
    num_heads=CONFIG.num_heads // 2,
    num_kv_heads=CONFIG.num_kv_heads // 2,
    head_dim=CONFIG.head_dim,
    intermediate_size=CONFIG.intermediate_size // 2,
)
NAMES = ExpertNames(router="router", gate="{}.gate", up="{}.up", down="{}.down")


def recipes_of(config):
    """Return all recipes, with those of more experts than are stacked in one part."""
    experts = ExpertsConfig(num_experts=21, num_chosen=2, width=config.intermediate_size)
    mixture = expert_recipes(config.hidden_size, experts, NAMES)
    return attention_recipes(config, "o_proj") | gated_mlp_recipes(config) | mixture


WHOLE, HALF = map(recipes_of, (CONFIG, HALF_CONFIG))


@pytest.mark.parametrize("name", [name for name, recipe in WHOLE.items() if recipe.assemble is not None])
def test_halves_of_the_tensors_are_assembled_as_halves_of_the_whole(name):
    recipe, half = WHOLE[name], HALF[name]
    assert recipe.assemble is not None and half.assemble is not None and recipe.split_axis is not None
    rng = np.random.default_rng(1)
    tensors = [rng.normal(size=shape).astype(np.float32) for shape in recipe.shapes]
    split = [np.split(tensor, 2, recipe.split_axis) for tensor in tensors]
    assert tuple(first.shape for first, _ in split) == half.shapes
    expected = np.asarray(recipe.assemble(*tensors))
    parts = [np.asarray(half.assemble(*(one[index] for one in split))) for index in range(2)]
    (axis,) = (axis for axis, size in enumerate(expected.shape) if parts[0].shape[axis] != size)
    np.testing.assert_array_equal(np.concatenate(parts, axis), expected)


def test_experts_are_stacked_in_their_order():
    recipe = WHOLE["mlp.experts.gate_up"]
    assert recipe.names[:3] == ("0.gate", "0.up", "1.gate") and recipe.names[-1] == "20.up"
    tensors = [np.full((2, 3), number, np.float32) for number in range(42)]
    found = np.asarray(recipe.assemble(*tensors))
    assert found.shape == (21, 2, 2, 3)
    np.testing.assert_array_equal(found[:, :, 0, 0].ravel(), np.arange(42))
    found = np.asarray(WHOLE["mlp.experts.down"].assemble(*tensors[:21]))
    np.testing.assert_array_equal(found[:, 1, 2], np.arange(21))


@pytest.mark.parametrize("name", ["qkv.proj.kernel", "mlp.gate_up.kernel", "qkv.proj.bias"])
def test_sections_of_one_tensor_are_the_tensors_of_the_recipe(name):
    recipe = WHOLE[name]
    fused = from_one_tensor(recipe, "one")
    rng = np.random.default_rng(1)
    tensors = [rng.normal(size=shape).astype(np.float32) for shape in recipe.shapes]
    one = np.concatenate(tensors, recipe.split_axis)
    assert set(fused.names) == {"one"} and set(fused.shapes) == {one.shape}
    for (begin, end), tensor in zip(fused.sections, tensors, strict=True):
        np.testing.assert_array_equal(one[begin:end], tensor)


def test_transposed_tensors_are_split_along_the_other_axis():
    recipe = from_one_tensor(transposed(WHOLE["qkv.proj.kernel"]), "one")
    plain = WHOLE["qkv.proj.kernel"]
    assert recipe.assemble is not None and plain.assemble is not None and recipe.split_axis == 1
    rng = np.random.default_rng(1)
    tensors = [rng.normal(size=shape).astype(np.float32) for shape in plain.shapes]
    one = np.concatenate(tensors).T
    assert set(recipe.shapes) == {one.shape}
    parts = [one[:, begin:end] for begin, end in recipe.sections]
    np.testing.assert_array_equal(recipe.assemble(*parts), plain.assemble(*tensors))


def test_adjacent_pairs_become_pairs_of_halves():
    """The first elements of a query or key are put in the order of `rotate`; values keep theirs."""
    dim, num = CONFIG.head_dim, CONFIG.head_dim // 2
    recipes = {
        n: attention_recipes(CONFIG, "o_proj", num_adjacent=n)["qkv.proj.kernel"] for n in (0, num, dim)
    }
    rng = np.random.default_rng(1)
    tensors = [rng.normal(size=shape).astype(np.float32) for shape in recipes[0].shapes]
    plain, part, whole = (np.asarray(recipe.assemble(*tensors)) for recipe in recipes.values())
    np.testing.assert_array_equal(part[:, :, -1], plain[:, :, -1])
    np.testing.assert_array_equal(whole[:, :, -1], plain[:, :, -1])
    for index in range(num // 2):
        np.testing.assert_array_equal(part[:, :, :-1, index], plain[:, :, :-1, 2 * index])
        np.testing.assert_array_equal(part[:, :, :-1, num // 2 + index], plain[:, :, :-1, 2 * index + 1])
    np.testing.assert_array_equal(part[..., num:], plain[..., num:])
    np.testing.assert_array_equal(whole[:, :, :-1, dim // 2 :], plain[:, :, :-1, 1::2])


def test_biases_of_outputs_are_not_split():
    assert WHOLE["out.bias"].split_axis is None and WHOLE["mlp.down.bias"].split_axis is None
