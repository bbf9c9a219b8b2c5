"""A TreeLSTM: a recursion over trees, in batches of nodes of many trees."""

import random

import jax
import numpy as np
import pytest

from model_defs.recurrent import TreeLSTM
from tests.models.recurrent.literal import best, random_weights, tree_lstm, tree_shapes
from tests.models.recurrent.serving import served, small_engine
from tests.seeds import new_seed

VOCAB_SIZE = 40


def random_tree(rng: random.Random, num_leaves: int):
    """Draw a tree of any shape: the position of each split is random."""
    if num_leaves == 1:
        return rng.randrange(VOCAB_SIZE)
    left = rng.randint(1, num_leaves - 1)
    return random_tree(rng, left), random_tree(rng, num_leaves - left)


def nodes_of(tree):
    """Return this node and every node below it."""
    below = [node for one in tree for node in nodes_of(one)] if isinstance(tree, tuple) else []
    return [*below, tree]


@pytest.fixture(scope="module")
def weights():
    return random_weights(3, tree_shapes(VOCAB_SIZE, 24, 32, 5), 0.3)


@pytest.fixture(scope="module")
def model(weights):
    return TreeLSTM.from_torch(weights)


@pytest.fixture(scope="module")
def engine(model):
    with small_engine(model) as engine:
        yield engine


def test_trees_that_join_and_leave(weights, model, engine):
    seed = new_seed()
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, 20)) for _ in range(30)]
    outputs = served(engine, [model.request(tree) for tree in trees], seed)
    for tree, output in zip(trees, outputs, strict=True):
        h, c = tree_lstm(weights, tree)
        np.testing.assert_allclose(output.states[0]["h"], h, atol=2e-5, rtol=0)
        np.testing.assert_allclose(output.states[0]["c"], c, atol=2e-5, rtol=0)


def test_every_node_has_a_label(weights, model, engine):
    """Words come in their order, then inner nodes, the root last."""
    tree = random_tree(random.Random(5), 16)
    output = engine.run([model.request(tree)])[0]
    nodes = nodes_of(tree)
    states = [tree_lstm(weights, one)[0] for one in nodes]
    expected = [best(weights["linear.weight"] @ h + weights["linear.bias"]) for h in states]
    assert min(margin for _, margin in expected) > 1e-4
    labels = output.emitted["label"].tolist()
    assert len(labels) == 31 and labels[-1] == expected[-1][0] == int(output.states[0]["label"])
    assert sorted(labels) == sorted(label for label, _ in expected)
    words = [(one, label) for one, (label, _) in zip(nodes, expected, strict=True) if isinstance(one, int)]
    assert list(zip(model.request(tree).words.tolist(), labels[:16], strict=True)) == words


def test_a_tree_as_arrays(weights, model, engine):
    """The tree is ((7, 8), 9), with the root first."""
    request = model.request_from_arrays([7, 8, 9], [[4, 2], [0, 1]])
    output = engine.run([request])[0]
    np.testing.assert_allclose(output.states[0]["h"], tree_lstm(weights, ((7, 8), 9))[0], atol=2e-5, rtol=0)


def test_left_and_right_children_differ(model, engine):
    one, other = engine.run([model.request((1, 2)), model.request((2, 1))])
    assert np.abs(one.states[0]["h"] - other.states[0]["h"]).max() > 1e-3


def test_without_classes_there_are_no_labels():
    model = TreeLSTM.random(hidden_size=8, vocab_size=VOCAB_SIZE)
    leaf = jax.eval_shape(lambda token: model.leaf((), token), jax.ShapeDtypeStruct((1,), "int32"))
    inner = jax.eval_shape(lambda *children: model.inner(children), leaf, leaf)
    assert inner.keys() == leaf.keys() == model.inner.state.keys() == {"h", "c"}
    assert model.leaf.emits == model.inner.emits == ()


def test_inner_nodes_go_first():
    leaf, inner = TreeLSTM.random(hidden_size=8, vocab_size=VOCAB_SIZE).cells(max_batch=64)
    assert inner.priority > leaf.priority and leaf.max_batch == inner.max_batch == 64
