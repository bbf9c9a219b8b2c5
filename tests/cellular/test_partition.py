"""The fast partition of chains gives the same result as the general one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pensieve_jax.cellular import chains, partition
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.errors import GraphError
from pensieve_jax.cellular.graph import Graph
from tests.cellular.hash_cells import draw, make_cells

_TYPES = CellTypes(make_cells(dict.fromkeys(("step", "decode", "leaf", "inner", "join", "narrow"), 4)))


def _graph(rng: np.random.Generator, shapes: str) -> Graph:
    graph = Graph(_TYPES, max_nodes=1000)
    for _ in range(int(rng.integers(1, 6))):
        drawn = draw(rng, shapes)
        graph.begin()
        drawn.unfold(graph)
        graph.end()
    return graph


def test_the_fast_partition_of_chains_equals_the_general_one():
    """Compares every column of every graph that the fast one accepts; it accepts most of them."""
    num_taken = 0
    for seed in range(300):
        graph = _graph(np.random.default_rng(seed), ("c", "e", "ce")[seed % 3])
        found = chains.partition(graph, max_depth=1000)
        if found is None:
            continue
        num_taken += 1
        general = partition._partition(graph, max_depth=1000)
        for field in dataclasses.fields(general):
            ours, theirs = getattr(found, field.name), getattr(general, field.name)
            if isinstance(theirs, np.ndarray):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{field.name}, seed {seed}")
                assert ours.dtype == theirs.dtype, (field.name, seed)
            else:
                assert ours.items(0, 0) == theirs.items(0, 0), (field.name, seed)
    assert num_taken > 200


def test_a_head_is_not_a_lane():
    """A cell that leaves another kind of state than it reads cannot stay in its input's row."""
    graph = Graph(_TYPES, max_nodes=9)
    graph.begin()
    last = graph.chain("step", [1, 2, 3])[-1]
    graph.returns(graph.add("narrow", [last]))
    graph.end()
    graph.begin()
    last = graph.chain("step", [1, 2, 3])[-1]
    graph.returns(graph.chain("narrow", num=1, after=last)[0])
    graph.end()
    assert partition.partition(graph, max_depth=9).is_irregular.tolist() == [False, True, False, True]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64"])
def test_inputs_of_any_integers(dtype):
    """Small integers must not overflow, and u64 must not become float."""
    graph = Graph(_TYPES, max_nodes=1000)
    for _ in range(2):
        graph.begin()
        leaves = graph.nodes("leaf", np.empty((120, 0), np.int64), n0=np.arange(120))
        inner = graph.nodes("inner", np.arange(len(leaves), dtype=dtype).reshape(-1, 2))
        graph.returns(*inner)
        graph.end()
    read = partition.partition(graph, max_depth=9).inputs[:2, [120, 179, 300, 359]]
    assert read.T.tolist() == [[0, 1], [118, 119], [180, 181], [298, 299]]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_ids_of_any_integers(dtype):
    """Small integers must not overflow when the nodes of many requests are numbered."""
    graph = Graph(_TYPES, max_nodes=1000)
    kind = np.dtype(dtype).type
    for _ in range(400):
        graph.begin()
        graph.chain("step", range(100))
        last = graph.chain("decode", num=kind(2), after=kind(60))[-1]
        graph.add("step", [kind(last)], n0=kind(1))
        graph.returns(kind(60), kind(102))
        graph.end()
    found = partition.partition(graph, max_depth=1000)
    first = 103 * np.arange(400)
    assert (found.inputs[0, first + 100] == first + 60).all()
    assert (np.flatnonzero(found.returned >= 0).reshape(-1, 2) == first[:, None] + [60, 102]).all()


def test_a_refused_call_leaves_nothing_behind():
    """A function may catch a graph's error, and continue."""
    graph = Graph(_TYPES, max_nodes=9)
    graph.begin()
    for bad in (
        lambda: graph.chain("step", ["x"]),
        lambda: graph.add("inner", [0, 0], n0=1),
        lambda: graph.chain("step", np.array(5)),
        lambda: graph.chain("step", {1, 2}),
        lambda: graph.chain("step", [1], n0=[2]),
        lambda: graph.chain("step"),
        lambda: graph.nodes("inner", [[0], [0, 1]]),
        lambda: graph.nodes("leaf", np.empty((2, 0), int), n0={1, 2}),
    ):
        with pytest.raises(GraphError):
            bad()
    graph.returns(graph.chain("step", [1, 2])[-1])
    graph.end()
    assert partition.partition(graph, max_depth=9).sub_num_nodes.tolist() == [2]


def test_nodes_that_share_an_input_and_leave_another_unread_are_two_subgraphs():
    """As many inputs are of this call as in a tree, but one node is read twice and another is not read."""
    graph = Graph(_TYPES, max_nodes=9)
    graph.begin()
    leaves = graph.nodes("leaf", np.empty((2, 0), np.int64), n0=[1, 2])
    inner = graph.nodes("inner", [[0, 1], [2, 2], [0, 1]])
    graph.returns(*inner)
    graph.end()
    assert [graph.root(graph.label(node)) for node in (*leaves, *inner)] == [0, 1, 2, 2, 3]


def test_children_without_a_sign():
    graph = Graph(_TYPES, max_nodes=9)
    words = [np.zeros(2, np.int32)] * 2
    graph.trees("leaf", "inner", words, [np.array([[0, 1]], np.uint64), np.array([[0, 1]])])
    assert len(graph.ends) == 2


@pytest.mark.parametrize("words", [b"four", bytearray(4), "four", memoryview(b"four"), [2**31], [1.0]])
def test_invalid_words_are_refused(words):
    graph = Graph(_TYPES, max_nodes=9)
    graph.begin()
    with pytest.raises(GraphError, match=r"nodes\[0\].n0 is"):
        graph.chain("step", words)


def test_nothing_is_returned_twice():
    graph = Graph(_TYPES, max_nodes=9)
    for _ in range(2):
        graph.begin()
        nodes = graph.chain("step", [1, 2, 3])
        graph.returns(*nodes)
        with pytest.raises(GraphError, match="returns is 1, but must be a node that is not returned already"):
            graph.returns(nodes[1])
        graph.end()


@pytest.mark.parametrize("shapes", ["t", "a"])
def test_other_graphs_are_left_to_the_general_way(shapes):
    """A tree is not a chain, even one with a single leaf."""
    for seed in range(30):
        assert chains.partition(_graph(np.random.default_rng(seed), shapes), max_depth=1000) is None


def test_sentences_equal_separate_chains():
    """Compares the vector form with a loop over requests."""
    words = [np.arange(num, dtype=np.int32) for num in (3, 1, 7)]
    many, single = (Graph(_TYPES, max_nodes=7) for _ in range(2))
    many.sentences("step", words[:1])
    many.sentences("step", words[1:])
    for one in words:
        single.begin()
        single.returns(single.chain("step", one)[-1])
        single.end()
    assert many.pieces == single.pieces and many.starts == single.starts
    assert many.ends == single.ends and many.joined == single.joined
    found, expected = (partition.partition(graph, max_depth=9) for graph in (many, single))
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, field.name)


@pytest.mark.parametrize(
    "words",
    [
        [],
        [["x"]],
        [np.array([True])],
        [np.array([2**40])],
        [np.array([1.0])],
        [np.empty(0, np.int32)],
        [np.zeros((2, 2), np.int32)],
        [np.int32(1)],
    ],
)
def test_invalid_sentences_are_refused(words):
    graph = Graph(_TYPES, max_nodes=7)
    with pytest.raises(GraphError, match=r"words is .* arrays i32"):
        graph.sentences("step", words)
    assert not graph.pieces and not graph.num_nodes


def test_sentences_are_not_too_long():
    graph = Graph(_TYPES, max_nodes=7)
    with pytest.raises(GraphError, match="of 1 to 7 words each, for step"):
        graph.sentences("step", [np.zeros(8, np.int32)])
    with pytest.raises(GraphError, match="arrays i32"):
        graph.sentences("join", [np.zeros(3, np.int32)])


def _trees(rng: np.random.Generator, num: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    words, children = [], []
    for _ in range(num):
        num_leaves = int(rng.integers(1, 8))
        open_nodes, pairs = list(range(num_leaves)), []
        while len(open_nodes) > 1:
            pairs.append([open_nodes.pop(int(rng.integers(len(open_nodes)))) for _ in range(2)])
            open_nodes.append(num_leaves + len(pairs) - 1)
        words.append(rng.integers(0, 9, num_leaves, dtype=np.int32))
        children.append(np.array(pairs, np.int64).reshape(-1, 2))
    return words, children


def test_trees_equal_separate_nodes():
    for seed in range(50):
        words, children = _trees(np.random.default_rng(seed), 5)
        many, single = (Graph(_TYPES, max_nodes=20) for _ in range(2))
        many.trees("leaf", "inner", words[:2], children[:2])
        many.trees("leaf", "inner", words[2:], children[2:])
        for leaves, above in zip(words, children, strict=True):
            single.begin()
            root = single.nodes("leaf", np.empty((len(leaves), 0), np.int64), n0=leaves)[-1]
            single.returns(single.nodes("inner", above)[-1] if len(above) else root)
            single.end()
        assert many.ends == single.ends and many.joined == single.joined, seed
        assert many.starts == single.starts == [piece.start for piece in many.pieces], seed
        found, expected = (partition.partition(graph, max_depth=20) for graph in (many, single))
        for field in dataclasses.fields(expected):
            ours, theirs = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(theirs, np.ndarray):
                np.testing.assert_array_equal(ours, theirs, f"{field.name}, seed {seed}")
        for ours, theirs in zip(many.immediates, single.immediates, strict=True):
            np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(theirs))


@pytest.mark.parametrize(
    ("num_leaves", "children"),
    [
        (2, [[0, 0]]),
        (2, [[0, 2]]),
        (2, [[-1, 0]]),
        (2, []),
        (3, [[0, 1]]),
        (3, [[0, 1], [0, 3]]),
        (1, [[0, 0]]),
        (8, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13]]),
    ],
)
def test_invalid_trees_are_refused(num_leaves, children):
    graph = Graph(_TYPES, max_nodes=14)
    words = [np.zeros(2, np.int32), np.zeros(num_leaves, np.int32)]
    below = [np.array([[0, 1]]), np.array(children, np.int64).reshape(-1, 2)]
    with pytest.raises(GraphError, match=r"(?s)is .* trees of at most 14 nodes each, of leaf and inner"):
        graph.trees("leaf", "inner", words, below)
    assert not graph.pieces and not graph.num_nodes and graph.has_only_chains
    for leaf, inner in (("step", "inner"), ("leaf", "join"), ("leaf", "narrow")):
        with pytest.raises(GraphError, match="trees of at most 14 nodes"):
            graph.trees(leaf, inner, words[:1], below[:1])
