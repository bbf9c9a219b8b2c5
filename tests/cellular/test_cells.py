"""Descriptions of cells, in the engine's own types or a model's, without importing JAX."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import pensieve_jax.cellular
from model_defs.recurrent import RecurrentCell
from pensieve_jax.cellular import Cell, CellError, Field, Float
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.errors import GraphError
from pensieve_jax.cellular.graph import Graph


def test_fields_may_be_shapes_of_jax():
    own = SimpleNamespace(state={"h": Float(5), "n": Field((), "int32"), "x": Float(2, dtype="bfloat16")})
    other = SimpleNamespace(
        state={
            "x": jax.ShapeDtypeStruct((2,), jax.numpy.bfloat16),
            "n": jax.ShapeDtypeStruct((), "int32"),
            "h": jax.ShapeDtypeStruct((5,), "float32"),
        }
    )
    assert len(CellTypes([Cell(own, "own"), Cell(other, "other")]).kinds) == 1


def test_bytes_of_a_row():
    """Kinds that types share count once."""
    one = SimpleNamespace(state={"h": Float(5), "n": Field((), "int32"), "x": Float(2, 3, dtype="bfloat16")})
    same = SimpleNamespace(state=one.state)
    other = SimpleNamespace(state={"y": Float()}, inputs=(one.state, one.state))
    types = CellTypes([Cell(one, "one"), Cell(same, "same"), Cell(other, "other")])
    assert types.row_bytes == (5 * 4 + 4 + 6 * 2) + 4


def test_an_initial_value_is_not_a_field():
    """It would not be the initial state, which is zeros."""
    for value in (np.ones(5), 5, None, "float32"):
        with pytest.raises(CellError, match=r"a.state\['h'\] is .*, but must be a Field under a name"):
            CellTypes([Cell(SimpleNamespace(state={"h": value}), "a")])
    with pytest.raises(CellError, match=r"a.state\['h'\].shape is \(0,\), but must be positive ints"):
        CellTypes([Cell(SimpleNamespace(state={"h": Float(0)}), "a")])


def test_a_cell_is_found_by_its_module():
    one, other = (SimpleNamespace(state={"h": Float(5)}) for _ in range(2))
    cells = [Cell(one, "one"), RecurrentCell(other, "other", max_batch=4)]
    types = CellTypes(cells)
    for index, (cell, module) in enumerate(zip(cells, (one, other), strict=True)):
        assert all(
            types.find(found).index == index for found in (cell, module, cell.name, types.types[index])
        )
    for unknown in (Cell(SimpleNamespace(state={}), "one"), "none", object(), None):
        with pytest.raises(CellError, match="a cell of this engine: one, other"):
            types.find(unknown)


def test_immediates_may_be_arrays():
    """Arrays of i32 are copied as they are."""
    cell = SimpleNamespace(state={"h": Float(5)}, immediates=("token",))
    graph = Graph(CellTypes([Cell(cell, "a")]), max_nodes=100)
    graph.begin()
    for words in (
        [1, 2],
        np.array([3, 4], np.int32),
        np.array([5, 6]),
        np.arange(7, 13, dtype=np.int32)[::3],
    ):
        graph.chain(cell, words)
    assert np.concatenate(graph.immediates[0]).tolist() == [1, 2, 3, 4, 5, 6, 7, 10]
    for bad in ([2**31], [1.5], "12", [[1, 2]], np.array([2**31]), np.array([1.0]), np.array([[1, 2]])):
        with pytest.raises(GraphError, match=r"nodes\[8\].token is .* ints? of 32 bits"):
            graph.chain(cell, bad)
    assert graph.num_nodes == 8


def test_a_chain_needs_cells_that_read_the_kind_that_they_leave():
    """Otherwise the second node would read a state of the wrong kind."""
    cell = SimpleNamespace(state={"h": Float(5)}, inputs=({"g": Float(3)},), immediates=("token",))
    graph = Graph(CellTypes([Cell(cell, "a")]), max_nodes=100)
    graph.begin()
    graph.chain(cell, [1])
    for words in ([1, 2], np.array([1, 2], np.int32)):
        with pytest.raises(GraphError, match=r"nodes\[1\].num is 2, but must be 1: a does not read its own"):
            graph.chain(cell, words)


def test_policy_needs_no_jax():
    code = (
        "import sys\n"
        "sys.modules['jax'] = sys.modules['flax'] = None\n"
        "import pensieve_jax.cellular.request_processor\n"
        "from pensieve_jax.cellular import Cell, CellularConfig, Float\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_nothing_else():
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        pensieve_jax.cellular.Engine  # noqa: B018
    assert pensieve_jax.cellular.CellularEngine.__module__ == "pensieve_jax.cellular.engine"
