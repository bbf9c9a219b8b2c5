"""Invalid arguments are refused with the cause and its place, before any of them is stored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pensieve_jax.cellular import (
    NO_NODE,
    CapacityError,
    Cell,
    CellError,
    CellularEngine,
    Field,
    Float,
    Graph,
    GraphError,
    Int,
)
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import MAX_ROWS, CellularConfig
from pensieve_jax.core.errors import ConfigError

WIDE, NARROW = {"h": Float(3), "id": Int()}, {"v": Float()}


def cell(state: Any, inputs: Any = None, **attributes: Any) -> Any:
    """Return the policy's description of a module."""
    given = {} if inputs is None else {"inputs": inputs}
    return SimpleNamespace(state=state, **given, **attributes)


STEP = cell(WIDE, immediates=("token",), emits=("id",))
LEAF = cell(NARROW, (), immediates=("token", "place"))
PAIR = cell(NARROW, (NARROW, NARROW))
MIXED = cell(WIDE, (NARROW, WIDE))
SCORE = cell({"score": Float()}, emits=("score",))
TYPES = CellTypes(
    [Cell(STEP, "step"), Cell(LEAF, "leaf"), Cell(PAIR, "pair"), Cell(MIXED, "mixed"), Cell(SCORE, "score")]
)


def leaves(graph: Graph, num: int) -> range:
    return graph.nodes(LEAF, np.empty((num, 0), int), token=[1] * num, place=[0] * num)


GRAPHS: list[tuple[Callable[[Graph], object], str]] = [
    (lambda g: g.add(STEP, (0,), token=1), r"nodes\[0\].inputs\[0\] is 0, but must be an earlier node"),
    (
        lambda g: (g.add(STEP, (None,), token=1), g.add(STEP, (1,), token=1)),
        r"nodes\[1\].inputs\[0\] is 1.*cycl",
    ),
    (
        lambda g: (leaves(g, 2), g.nodes(PAIR, np.array([[0, 1], [2, 4], [1, 3]]))),
        r"nodes\[3\].inputs\[1\] is 4, but must be an earlier node: there are no cycles",
    ),
    (lambda g: g.add(STEP, (-2,), token=1), r"nodes\[0\].inputs\[0\] is -2"),
    (lambda g: g.add(STEP, (1.5,), token=1), r"nodes\[0\].inputs\[0\] is 1.5, but must be the id of a node"),
    (lambda g: (leaves(g, 1), g.add(PAIR, (0, True))), r"nodes\[1\].inputs\[1\] is True"),
    (lambda g: (leaves(g, 1), g.add(PAIR, (0, "0"))), r"nodes\[1\].inputs\[1\] is '0'"),
    (lambda g: (leaves(g, 1), g.add(PAIR, (0, leaves(g, 1)))), r"nodes\[2\].inputs\[1\] is range"),
    (lambda g: g.add(STEP, 0, token=1), r"nodes\[0\].inputs is 0, but must be a sequence of 1, for step"),
    (
        lambda g: g.add(PAIR, (None,)),
        r"nodes\[0\].inputs is \(None,\), but must be a sequence of 2, for pair",
    ),
    (
        lambda g: (leaves(g, 1), g.add(STEP, (0,), token=1)),
        r"nodes\[1\].inputs\[0\] is 0.*the state of leaf is .*'v'",
    ),
    (lambda g: g.nodes(PAIR, np.zeros((0, 2), int)), r"nodes\[0\].inputs.*ints \[n, 2\], for pair"),
    (lambda g: g.nodes(PAIR, np.full((2, 2), -1.0)), r"nodes\[0\].inputs.*ints \[n, 2\], for pair"),
    (
        lambda g: (leaves(g, 2), g.nodes(PAIR, np.array([[0, NO_NODE], [1, NO_NODE]]), extra=[1, 2])),
        r"nodes\[2\].immediates is \['extra'\], but must be \[\], for pair",
    ),
    (
        lambda g: (g.chain(STEP, [1, 2]), g.nodes(STEP, np.array([[0], [1]]), token=[1, 2, 3])),
        r"nodes\[2\].token is \[1, 2, 3\], but must be 2 ints",
    ),
    (lambda g: g.add(LEAF, token=1), r"nodes\[0\].immediates is \['token'\].*\['token', 'place'\], for leaf"),
    (
        lambda g: g.add(LEAF, token=1, place=None),
        r"nodes\[0\].place is \[None\], but must be one int of 32 bits",
    ),
    (
        lambda g: g.add(LEAF, token=1, place=0.5),
        r"nodes\[0\].place is \[0.5\], but must be one int of 32 bits",
    ),
    (lambda g: g.add(LEAF, token=1, place=2**31), r"nodes\[0\].place is \[2147483648\]"),
    (lambda g: g.chain(STEP, "abc"), r"nodes\[0\].token is 'abc', but must be 3 ints"),
    (lambda g: g.chain(STEP, iter([1, 2])), r"nodes\[0\].token is .*must be a sequence"),
    (lambda g: g.chain(STEP, np.ones((2, 2), np.int32)), r"nodes\[0\].token"),
    (lambda g: g.chain(STEP, [1, 2], num=3), r"nodes\[0\].token is \[1, 2\], but must be 3 ints"),
    (lambda g: g.chain(STEP, []), r"nodes\[0\].token is \[\], but must be at least one int of 32 bits"),
    (lambda g: g.chain(SCORE), r"nodes\[0\].num is None"),
    (lambda g: g.chain(SCORE, num=2.0), r"nodes\[0\].num is 2.0, but must be an int"),
    (lambda g: g.chain(SCORE, num=True), r"nodes\[0\].num is True, but must be an int"),
    (
        lambda g: g.chain(SCORE, [1]),
        r"nodes\[0\].words is \[1\], but must be absent: score takes no immediates",
    ),
    (
        lambda g: g.chain(PAIR, num=2),
        r"nodes\[0\].inputs is 2, but must be one input; pair cannot form a chain",
    ),
    (lambda g: g.chain(STEP, [1], after=0), r"nodes\[0\].inputs\[0\] is 0, but must be an earlier node"),
    (lambda g: g.chain(SCORE, num=2, until=1), r"nodes\[0\].until is 1.*None: score first emits float32"),
    (lambda g: g.chain(STEP, [1], until=1.5), r"nodes\[0\].until is 1.5, but must be an int of 32 bits"),
    (lambda g: g.chain(STEP, [1], until=2**40), r"nodes\[0\].until is .*must be an int of 32 bits"),
    (
        lambda g: (g.chain(STEP, [1, 2], until=3), g.returns(1)),
        r"returns is 1.*outside of chains that may end early",
    ),
    (
        lambda g: (g.chain(STEP, [1, 2], until=3), g.add(STEP, (1,), token=4)),
        r"nodes\[2\].inputs\[0\] is 1.*outside of chains that may end early",
    ),
    (
        lambda g: (leaves(g, 2), g.returns(2)),
        r"^returns is 2, but must be a node of this request, an int from 0 to 1\.",
    ),
    (lambda g: g.returns(0), r"^returns is 0, but must be a node of this request, which has none yet\."),
    (lambda g: g.add(STEP, (None,), token=1.5), r"nodes\[0\].token is .*, but must be one int of 32 bits\."),
    (lambda g: (leaves(g, 2), g.returns(leaves(g, 1))), r"returns is range"),
    (lambda g: (leaves(g, 2), g.returns(1, 1)), r"returns is 1, but must be a node that is not returned"),
    (
        lambda g: (leaves(g, 2), g.end()),
        r"returns is \(\), but must be at least one node, since no cell.* emits",
    ),
    (lambda g: g.end(), r"graph is 0, but must be at least one node"),
    (lambda g: leaves(g, 51), r"nodes\[0\] is 51, but must be at most max_nodes \(50\)"),
    (lambda g: (leaves(g, 40), leaves(g, 11)), r"nodes\[40\] is 51, but must be at most max_nodes \(50\)"),
    (
        lambda g: (leaves(g, 2), g.add("none")),
        r"nodes\[2\].cell is 'none'.*a cell of this engine: step, leaf",
    ),
]


@pytest.mark.parametrize(("write", "match"), GRAPHS, ids=[match for _, match in GRAPHS])
def test_an_invalid_graph_is_refused(write: Callable[[Graph], object], match: str) -> None:
    graph = Graph(TYPES, max_nodes=50)
    graph.begin()
    with pytest.raises((GraphError, CapacityError, CellError), match=match):
        write(graph)


def test_a_refused_node_is_not_added() -> None:
    """A function that catches an error while unfolding continues with the earlier nodes."""
    graph = Graph(TYPES, max_nodes=50)
    graph.begin()
    leaves(graph, 2)
    for _ in range(3):
        with pytest.raises(GraphError):
            graph.add(LEAF, token=1, place=2**31)
        with pytest.raises(GraphError):
            graph.add(PAIR, (0, 2))
    assert graph.add(PAIR, (0, 1)) == 2
    graph.returns(2)
    graph.end()
    assert graph.num_nodes == 3
    assert all(sum(map(len, column)) == 3 for column in graph.immediates)


CELLS: list[tuple[Any, str]] = [
    (Cell(cell(WIDE), ""), r"cells\[0\].name is ''"),
    (Cell(cell(WIDE), "a", max_batch=0), r"a.max_batch is 0, but must be an int of at least 1"),
    (Cell(cell(WIDE), "a", max_batch=2.0), r"a.max_batch is 2.0"),
    (Cell(cell(WIDE), "a", 8, batch_sizes=(4, 2, 8)), r"a.batch_sizes is \(4, 2, 8\)"),
    (Cell(cell(WIDE), "a", 8, batch_sizes=(2, 4)), r"a.batch_sizes is \(2, 4\).*end at max_batch \(8\)"),
    (Cell(cell(WIDE), "a", 8, batch_sizes=8), r"a.batch_sizes is 8"),
    (Cell(cell(WIDE), "a", 8, priority="high"), r"a.priority is 'high', but must be an int"),
    (Cell(object(), "a"), r"a.state is None, but must be a mapping"),
    (Cell(cell({"h": Float(3.0)}), "a"), r"a.state\['h'\].shape is \(3.0,\)"),
    (Cell(cell({3: Float(3)}), "a"), r"a.state\[3\]"),
    (Cell(cell(WIDE, {"h": Float(3)}), "a"), r"a.inputs is .*must be a sequence of mappings"),
    (Cell(cell(WIDE, (Float(3),)), "a"), r"a.inputs\[0\] is Field.*must be a mapping"),
    (Cell(cell(WIDE, (WIDE, {})), "a"), r"a.inputs\[1\] is \{\}.*one at least"),
    (Cell(cell(WIDE, immediates="token"), "a"), r"a.immediates is 'token', but must be distinct names"),
    (Cell(cell(WIDE, immediates=None), "a"), r"a.immediates is None, but must be distinct names"),
    (
        Cell(cell(WIDE, immediates=("x", "x")), "a"),
        r"a.immediates is \('x', 'x'\), but must be distinct names",
    ),
    (
        Cell(cell(WIDE, immediates=("x", "num")), "a"),
        r"a.immediates is 'num', but must be a name that .*chain",
    ),
    (Cell(cell(WIDE, emits=("h",)), "a"), r"a.emits is 'h'.*scalar fields"),
    (Cell(cell(WIDE, emits=("no",)), "a"), r"a.emits is 'no'.*scalar fields"),
    (Cell(cell({"h": Field((), "bfloat16")}, emits=("h",)), "a"), r"a.emits is 'h'.*four bytes"),
    (
        Cell(cell({"h": Field((3,), "float33")}), "a"),
        r"a.state\['h'\].dtype is 'float33', but must be a dtype",
    ),
]


@pytest.mark.parametrize(("one", "match"), CELLS, ids=[match for _, match in CELLS])
def test_an_invalid_cell_is_refused(one: Any, match: str) -> None:
    with pytest.raises(CellError, match=match):
        CellTypes([one])


@pytest.mark.parametrize("cells", [[STEP], Cell(STEP, "step"), ["step"]])
def test_a_module_that_is_not_in_a_cell_is_refused(cells: Any) -> None:
    with pytest.raises(CellError, match=r"cells\[0\] is .*, but must be a Cell: a module and a name for it"):
        CellTypes(cells)


def test_two_cells_with_one_name_are_refused() -> None:
    with pytest.raises(CellError, match=r"cells\[1\].name is 'a', but must be a name that no other cell has"):
        CellTypes([Cell(cell(WIDE), "a"), Cell(cell(WIDE), "a")])


def test_two_cells_of_one_module_are_distinguished_by_name() -> None:
    """They share weights, but not batches or priorities."""
    module = cell(WIDE)
    cells = [Cell(module, "encoder"), Cell(module, "decoder", priority=1)]
    types = CellTypes(cells)
    assert [types.find(one).name for one in (*cells, "encoder", "decoder")] == ["encoder", "decoder"] * 2
    with pytest.raises(CellError, match="one of encoder, decoder by name: they share this module"):
        types.find(module)


def test_fields_are_equal_however_they_are_written() -> None:
    """Otherwise a node of one cell could not read the state of the other."""
    kinds = [
        {"h": Field((3,), "float32")},
        {"h": Field([3], "f4")},  # type: ignore[arg-type]
        {"h": Float(np.int64(3), dtype=np.float32)},  # type: ignore[arg-type]
        {"h": jax.ShapeDtypeStruct((3,), jnp.float32)},
    ]
    types = CellTypes([Cell(cell(kind), f"cell {place}") for place, kind in enumerate(kinds)])
    assert len(types.kinds) == 1
    assert (
        len(
            CellTypes(
                [Cell(cell({"h": Float(3, dtype=dtype)}), str(dtype)) for dtype in (jnp.bfloat16, "bfloat16")]
            ).kinds
        )
        == 1
    )


class Computes:
    """A cell whose result the test chooses."""

    inputs: ClassVar = ({"h": Float(3)},)
    state: ClassVar = {"h": Float(3)}

    def __init__(self, function: Any, **attributes: Any) -> None:
        self.function = function
        vars(self).update(attributes)

    def __call__(self, *args: Any, **immediates: Any) -> Any:
        return self.function(*args, **immediates)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (
            Computes(lambda i: {"h": jnp.zeros((1, 3))}),
            r"wrong.state\['h'\] .*float32\[2, 3\].*float32\[1, 3\], batch 2",
        ),
        (Computes(lambda i: {"h": i[0]["h"][0]}), r"wrong.state\['h'\] .*what it returns: float32\[3\]"),
        (Computes(lambda i: {"h": i[0]["h"].astype("bfloat16")}), r"wrong.state\['h'\].*returns: bfloat16\["),
        (Computes(lambda i: {"h": 0.0}), r"wrong.state\['h'\].*returns: float"),
        (Computes(lambda i: {"h": None}), r"wrong.state\['h'\].*returns: NoneType"),
        (Computes(lambda i: {**i[0], "more": i[0]["h"]}), r"wrong.state.*returns: \['h', 'more'\]"),
        (
            Computes(lambda i: {"h": i[0]["c"]}),
            r"wrong is 'Computes', but must be callable as a cell: KeyError: 'c'",
        ),
        (Computes(lambda i: {"h": i[1]["h"]}), "wrong .*callable as a cell: IndexError"),
        (Computes(lambda i: {"h": i[0].h}), "wrong .*callable as a cell: AttributeError"),
        (Computes(lambda i: {"h": i[0]["h"] + jnp.zeros((2, 5))}), "wrong .*callable as a cell: .*shape"),
        (Computes(lambda i: {"h": i[0]["h"] @ jnp.zeros((4, 3))}), "wrong .*callable as a cell: .*shape"),
        (
            Computes(lambda i: {"h": i[0]["h"] if i[0]["h"][0, 0] else 0}),
            "wrong .*callable as a cell: Tracer",
        ),
        (
            Computes(lambda i, word: {"h": i[0]["h"]}, immediates=("token",)),
            "wrong .*callable as a cell: .*token",
        ),
        (
            Computes(lambda i: {"h": i[0]["h"]}, state={"h": Float(3, dtype="float64")}),
            r"wrong.state\['h'\].*float64",
        ),
        ("no module", r"wrong.state is None"),
        (SimpleNamespace(state={"h": Float(3)}), "wrong .*callable as a cell: TypeError"),
    ],
)
def test_a_module_that_contradicts_its_declaration_is_refused(module: Any, match: str) -> None:
    with pytest.raises(CellError, match=match):
        CellularEngine(
            [Cell(module, "wrong", 4, batch_sizes=(1, 4))], lambda one, graph: None, progress=False
        )


def test_inputs_may_be_an_array() -> None:
    graph = Graph(TYPES, max_nodes=50)
    graph.begin()
    assert graph.add(PAIR, np.array(leaves(graph, 2))) == 2  # type: ignore[arg-type]


def test_an_array_of_words_may_be_reused() -> None:
    """It may be reused although a graph is only processed once its `submit_many` is complete."""
    graph = Graph(TYPES, max_nodes=50)
    words = np.arange(3, dtype=np.int32)
    for _ in range(2):
        graph.begin()
        graph.chain(STEP, words)
        graph.end()
        words += 10
    assert np.concatenate(graph.immediates[0]).tolist() == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("num_rows", [0, -1, "x", 1.0, True, MAX_ROWS + 1, 10**12])
def test_rows_are_numbered_in_32_bits(num_rows: Any) -> None:
    """More rows once raised an OverflowError when the engine was created."""
    with pytest.raises(ConfigError, match=f"num_rows is .* an integer from 1 to {MAX_ROWS}"):
        CellularConfig(num_rows=num_rows)
    assert CellularConfig(num_rows=MAX_ROWS).num_rows == MAX_ROWS
