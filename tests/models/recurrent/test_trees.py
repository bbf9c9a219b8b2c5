"""Trees as pairs and as arrays: both forms are equal, and the error of an invalid tree names its node."""

import random

import numpy as np
import pytest

from model_defs.recurrent.errors import RequestError
from model_defs.recurrent.tree import BinaryTree, from_arrays, from_pairs
from tests.models.recurrent.test_tree_lstm import VOCAB_SIZE, random_tree
from tests.seeds import new_seed


def as_pairs(tree: BinaryTree):
    """Convert from arrays, as documented: children come before their parents, the root is the last."""
    nodes = tree.words.tolist()
    for left, right in tree.children.tolist():
        assert max(left, right) < len(nodes)
        nodes.append((nodes[left], nodes[right]))
    return nodes[-1]


def test_pairs_there_and_back():
    rng = random.Random(new_seed())
    for num_leaves in (1, 2, 3, *(rng.randint(4, 60) for _ in range(50))):
        tree = random_tree(rng, num_leaves)
        found = from_pairs(tree, VOCAB_SIZE)
        assert len(found.words) == num_leaves == len(found.children) + 1
        assert as_pairs(found) == tree


def test_inner_nodes_in_any_order():
    seed = new_seed()
    rng, np_rng = random.Random(seed), np.random.default_rng(seed)
    for num_leaves in (2, 3, *(rng.randint(4, 60) for _ in range(50))):
        tree = random_tree(rng, num_leaves)
        ordered = from_pairs(tree, VOCAB_SIZE)
        place = np.concatenate([np.arange(num_leaves), num_leaves + np_rng.permutation(num_leaves - 1)])
        shuffled = np.empty_like(ordered.children)
        shuffled[place[num_leaves:] - num_leaves] = place[ordered.children]
        assert as_pairs(from_arrays(ordered.words, shuffled, VOCAB_SIZE)) == tree


def test_arrays_in_order_are_kept():
    children = np.array([[0, 1], [3, 2]])
    found = from_arrays([5, 6, 7], children, VOCAB_SIZE)
    assert found.children.tolist() == children.tolist() and found.words.tolist() == [5, 6, 7]


def test_deep_trees_need_no_recursion():
    tree = 1
    for _ in range(20_000):
        tree = (tree, 2)
    found = from_pairs(tree, VOCAB_SIZE)
    assert found.children.shape == (20_000, 2)
    assert len(from_arrays(found.words, found.children, VOCAB_SIZE).children) == 20_000


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (40, "tree is 40, but must be a word id from 0 to 39 or a tuple of two subtrees"),
        ((1, -1), r"tree\[1\] is -1, but must be a word id"),
        (((1, (2, "x")), 3), r"tree\[0\]\[1\]\[1\] is 'x', but must be a word id"),
        ((1, (2, 3, 4)), r"tree\[1\] is \(2, 3, 4\), but must be a word id"),
        ((1, [2, 3]), r"tree\[1\] is \[2, 3\], but must be a word id"),
        ((True, 1), r"tree\[0\] is True, but must be a word id"),
    ],
)
def test_pairs_that_are_not_a_tree(tree, message):
    with pytest.raises(RequestError, match=message):
        from_pairs(tree, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("num_words", "children", "message"),
    [
        (2, [[0, 3]], r"nodes\[2\].children\[1\] is 3, but must be a node from 0 to 2"),
        (2, [[-1, 1]], r"nodes\[2\].children\[0\] is -1, but must be a node from 0 to 2"),
        (3, [[0, 1], [3, 1]], r"nodes\[1\].parents is \[3, 4\], but must be one node"),
        (2, [[0, 0]], r"nodes\[0\].parents is \[2\], but must be one node, which reads it once"),
        (3, [[0, 1]], r"nodes\[2\].parents is \[\], but must be one node, since nodes\[3\] is the root"),
        (2, [], r"nodes\[0\].parents is \[\], but must be one node, since nodes\[1\] is the root"),
        (3, [[0, 3], [1, 2]], r"nodes\[3\].children is \[0, 3\], but must be nodes that are not its"),
        (1, [[0, 1]], r"nodes\[1\].children is \[0, 1\], but must be nodes that are not its"),
        (
            4,
            [[5, 0], [4, 1], [2, 3]],
            r"nodes\[[45]\].children is .*, but must be nodes that are not its",
        ),
        (2, [0, 1], r"children is \[0, 1\], but must be ints \[n, 2\]"),
        (2, [[0.0, 1.0]], r"children is \[\[0.0, 1.0\]\], but must be ints \[n, 2\]"),
        (0, [], r"words is \[\], but must be at least one token id"),
    ],
)
def test_arrays_that_are_not_a_tree(num_words, children, message):
    with pytest.raises(RequestError, match=message):
        from_arrays(list(range(num_words)), children, VOCAB_SIZE)
