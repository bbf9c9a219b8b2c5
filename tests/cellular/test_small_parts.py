"""The parts under the scheduler, each alone: queues, rows, room, launches, integers and limits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pensieve_jax.cellular.cells import Cell, CellError, CellTypes, Field, default_batch_sizes
from pensieve_jax.cellular.errors import CapacityError, GraphError
from pensieve_jax.cellular.graph import Graph
from pensieve_jax.cellular.graph_batch import NO_NODE
from pensieve_jax.cellular.graph_columns import MANY, NONE, Several
from pensieve_jax.cellular.integers import int32s, is_int32, is_sized
from pensieve_jax.cellular.launches import make_parts
from pensieve_jax.cellular.partition import _by_key, _distinct_pairs, _roots, partition
from pensieve_jax.cellular.ready_queue import IntFifo, ReadyQueue
from pensieve_jax.cellular.rows import RowBudget, StateRows
from pensieve_jax.cellular.tables import Nodes, Room, Subgraphs, _size, all_values, distinct
from tests.cellular.hash_cells import make_cells

TYPES = CellTypes(make_cells(dict.fromkeys(("step", "decode", "leaf", "inner", "join", "narrow"), 4)))


def new_graph(max_nodes: int = 20) -> Graph:
    graph = Graph(TYPES, max_nodes=max_nodes)
    graph.begin()
    return graph


# Queues, rows and room.


def test_a_queue_grows_and_frees_what_was_taken():
    line = IntFifo()
    line.push(np.arange(1000))
    assert line.pop(990).tolist() == list(range(990)) and len(line) == 10
    line.push(np.arange(1000, 1030))
    assert line.values.tolist() == list(range(990, 1030))
    line.push(np.arange(1030, 4000))
    assert line.values.tolist() == list(range(990, 4000))
    assert line.pop(10_000).tolist() == list(range(990, 4000)) and not len(line)


@pytest.mark.parametrize("num", [24, 25])
def test_a_queue_can_be_filled_completely(num):
    line = IntFifo()
    line.push(np.arange(1000))
    line.push(np.arange(num))
    assert line.values.tolist() == [*range(1000), *range(num)]


def test_a_queue_keeps_its_order():
    line = IntFifo()
    line.push(np.array([5, 3, 9, 1]))
    line.pop(1)
    line.keep(np.array([True, False, True]))
    assert line.values.tolist() == [3, 1] and len(line) == 2
    line.push(np.array([7]))
    assert line.values.tolist() == [3, 1, 7]


def test_nodes_are_taken_in_the_order_of_their_subgraphs():
    """A worker takes its own started subgraphs first; this selects nodes, and does not reorder them."""
    nodes, subgraphs = Nodes(TYPES, 8), Subgraphs(len(TYPES.types))
    nodes.allocate(8), subgraphs.allocate(4)
    nodes.sub[:4] = subgraphs.seq[:4] = range(4)
    subgraphs.pinned[:4] = -1
    nodes.inputs[0, :4] = range(4, 8)
    nodes.worker[4:8] = [1, 0, 1, 0]  # where each one's inputs are
    queue = ReadyQueue(nodes, subgraphs, num_workers=2)
    queue.go_on(np.arange(4))
    assert queue.take(0, 3).tolist() == [0, 1, 3]
    assert queue.all_nodes().tolist() == [2]


def test_rows_are_allocated_and_freed():
    rows = StateRows(4)
    first = rows.allocate(3)
    assert sorted([*first, *rows.free_rows()]) == [0, 1, 2, 3] and rows.num_free == 1
    rows.free(first[1:])
    assert rows.num_free == 3 and first[0] not in rows.free_rows()
    assert sorted(rows.allocate(3)) == sorted({0, 1, 2, 3} - {int(first[0])})
    with pytest.raises(AssertionError, match="1 rows of 0"):
        rows.allocate(1)


def test_rows_are_promised_in_order_up_to_the_last():
    budget = RowBudget(5, 2)
    needed = np.array([[2, 1], [3, 1], [0, 4], [0, 1]])
    assert budget.num_fitting(needed) == 2 and not budget.promised.any()
    assert budget.admit(needed) == 2 and budget.promised.tolist() == [5, 2]
    assert budget.admit(needed[2:]) == 0, "no request passes one that does not fit"
    assert budget.admit(needed[3:]) == 1 and budget.promised.tolist() == [5, 3]
    budget.end(needed[:1])
    assert budget.promised.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("num", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024), (1025, 2048)]
)
def test_room_grows_in_powers_of_two(num, size):
    assert _size(num) == size


def test_room_is_reused():
    room = Room()
    room.column("value", np.int64, 7)
    assert [room.allocate(3), room.allocate(1), room.allocate(2)] == [0, 4, 5]
    room.value[4] = 9
    room.free(0, 3)
    assert room.allocate(1) == 7 and room.allocate(4) == 0 and room.allocate(4) == 8
    assert room.allocate(5000) == 12 and room.capacity >= 12 + 8192
    assert room.value[4] == 9 and (room.value[5:] == 7).all()


def test_distinct_values_stay_in_the_order_of_their_last_places():
    mark = np.zeros(10, np.int64)
    assert distinct(np.array([3, 5, 3, 2, 5]), mark).tolist() == [3, 2, 5]


def test_values_of_keys_with_one_none_and_several():
    only, several = _by_key(np.array([2, 0, 2, 4]), np.array([10, 11, 12, 13]), 5)
    assert only.tolist() == [11, NONE, MANY, NONE, 13]
    assert {key: one.tolist() for key, one in several.items(100, 1000).items()} == {102: [1010, 1012]}
    kept = several.items(0, 0)
    assert all_values(np.array([4, 2, 1]), only, kept).tolist() == [13, 10, 12, NONE]
    assert all_values(np.array([4, 0]), only, kept).tolist() == [13, 11]
    assert Several(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64)).items(1, 1) == {}


def test_pairs_and_roots():
    first, second = _distinct_pairs(np.array([1, 0, 1, 2]), np.array([2, 1, 2, 0]), 3)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0)]
    assert _roots([0, 0, 1, 3, 2, 3]).tolist() == [0, 0, 0, 3, 0, 3]


# Launches and times.


def test_parts_are_the_largest_programs_that_fit():
    """Programs have 1, 2, 5, 10 and 20 tasks, in compiled batch sizes that fit the largest task."""
    kind = TYPES.find("step")
    tasks = [np.full((3, 1), place) for place in range(18)]
    assert [part.num_tasks for part in make_parts(kind, tasks, 9)] == [10, 5, 2, 1]
    assert [part.num_tasks for part in make_parts(kind, tasks * 2, 9)] == [20, 10, 5, 1]
    assert [one[0, 0] for part in make_parts(kind, tasks, 9) for one in part.words] == list(range(18))


def test_padding_of_a_batch_reads_and_writes_no_request():
    """It reads the initial state, row 9, and writes to separate rows behind it."""
    kind = CellTypes(
        make_cells(dict.fromkeys(("step", "decode", "leaf", "inner", "join", "narrow"), 4))
    ).find("step")
    (part,) = make_parts(kind, [np.array([[5], [6], [77]]), np.array([[1, 2, 3], [2, 3, 4], [7, 8, 9]])], 9)
    assert part.batch_size == 4 and part.num_tasks == 2
    assert part.words[0].tolist() == [[5, 10, 11, 12], [6, 9, 9, 9], [77, 0, 0, 0]]
    assert part.words[1].tolist() == [[1, 2, 3, 10], [2, 3, 4, 9], [7, 8, 9, 0]]
    (small,) = make_parts(kind, [np.array([[5], [6], [77]])], 9)
    assert small.batch_size == 1
    (wide,) = make_parts(kind, [np.array([[5], [6], [77]])], 9, least=3)
    assert wide.batch_size == 4


# Integers and cells.


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        (2**31 - 1, True),
        (2**31, False),
        (-(2**31), True),
        (-(2**31) - 1, False),
        (np.int8(3), True),
        (True, False),
        (1.0, False),
    ],
)
def test_integers_are_recognized_by_32_bit_range(value, is_one):
    assert is_int32(value) == is_one


def test_values_with_a_length_are_recognized():
    assert is_sized([1]) and is_sized(np.zeros(1)) and not is_sized(np.array(1)) and not is_sized(1)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1, -2], [1, -2]),
        (np.array([1, 2], np.int64), [1, 2]),
        (np.array([2**31], np.int64), None),
        (np.array([2**31 - 1], np.uint64), [2**31 - 1]),
        (np.array([[1]]), None),
        (np.array([1.0]), None),
        ({1}, None),
        ([2**31], None),
        (np.array([3], np.int32), [3]),
    ],
)
def test_integers_of_32_bits(values, found):
    ours = int32s(values)
    assert (None if ours is None else ours.tolist()) == found


def test_an_array_is_copied():
    mine = np.array([1, 2], np.int32)
    ours = int32s(mine)
    mine[0] = 9
    assert ours is not None and ours.tolist() == [1, 2]


def test_sizes_of_batches():
    assert default_batch_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 96, 100)
    assert default_batch_sizes(512) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert default_batch_sizes(1) == (1,) and default_batch_sizes(64)[-2:] == (32, 64)
    kind = CellTypes([Cell(SimpleNamespace(state={"h": Field((), "int32")}), "a", 100)]).types[0]
    assert [kind.batch_size(num) for num in (1, 2, 3, 64, 65, 97, 100)] == [1, 2, 4, 64, 96, 100, 100]


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "4", None])
def test_an_invalid_largest_batch_is_refused(most):
    with pytest.raises(CellError, match=r"a\.max_batch is"):
        CellTypes([Cell(SimpleNamespace(state={"h": Field((), "int32")}), "a", most)])


@pytest.mark.parametrize("sizes", [(), (1, 2), (4, 2, 4), (2, 2, 4), (0, 4), (1.0, 4), 4, (4, 1)])
def test_invalid_batch_sizes_are_refused(sizes):
    with pytest.raises(CellError, match=r"a\.batch_sizes is"):
        CellTypes([Cell(SimpleNamespace(state={"h": Field((), "int32")}), "a", 4, batch_sizes=sizes)])


# Graphs.


@pytest.mark.parametrize("inputs", [(), [0, 0], "", 0, {0}])
def test_inputs_are_one_for_each_of_the_cell(inputs):
    graph = new_graph()
    graph.chain("step", [1])
    with pytest.raises(GraphError, match=r"nodes\[1\].inputs is .* a sequence of 1, for step"):
        graph.add("step", inputs, n0=1)


def test_each_node_has_the_value_of_its_place():
    """Nodes are added one by one, since some read the initial state, and others do not."""
    graph = new_graph()
    (first,) = graph.chain("step", [7])
    added = graph.nodes("step", np.array([[first], [NO_NODE], [2]]), n0=[4, 5, 6])
    assert list(added) == [1, 2, 3]
    assert np.concatenate(graph.immediates[0]).tolist() == [7, 4, 5, 6]


@pytest.mark.parametrize("node", [1, -1, True, 0.0])
def test_an_input_is_an_earlier_node(node):
    graph = new_graph()
    graph.chain("step", [1])
    with pytest.raises(GraphError):
        graph.chain("step", [1], after=node)


def test_the_number_of_nodes_of_a_graph_is_limited():
    graph = new_graph(3)
    graph.chain("step", np.arange(2, dtype=np.int32))
    with pytest.raises(CapacityError, match=r"nodes\[2\] is 4, .* at most max_nodes \(3\)"):
        graph.chain("step", np.arange(2, dtype=np.int32))
    graph.chain("step", np.arange(1, dtype=np.int32))
    with pytest.raises(CapacityError, match=r"nodes\[3\] is 4"):
        graph.chain("step", [1])


@pytest.mark.parametrize(("max_depth", "fits"), [(4, True), (3, False)])
@pytest.mark.parametrize("is_tree", [False, True])
def test_the_depth_of_a_graph_is_limited(max_depth, fits, is_tree):
    graph = new_graph()
    if is_tree:  # of five leaves, each joined with all before it
        top = graph.add("leaf", n0=0)
        for _ in range(3):
            top = graph.add("inner", (top, graph.add("leaf", n0=0)))
        graph.returns(top)
    else:
        graph.returns(graph.chain("step", [1] * 4)[-1])
    graph.end()
    if fits:
        partition(graph, max_depth=max_depth)
        return
    with pytest.raises(CapacityError, match=r"nodes\[\d\] is 4, .* at most max_depth \(3\) deep"):
        partition(graph, max_depth=max_depth)


def test_a_subgraph_can_run_once_its_inputs_are_ready():
    """Encoder and decoder are two; a decoder whose output an encoder reads again begins a third."""
    graph = new_graph()
    first = graph.chain("step", [1, 2])
    second = graph.chain("decode", num=2, after=first[-1])
    third = graph.chain("step", [3], after=second[-1])
    fourth = graph.chain("step", [4, 5], after=third[-1])
    graph.returns(fourth[-1])
    graph.end()
    parts = partition(graph, max_depth=20)
    assert parts.sub.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert parts.sub_waits.tolist() == [0, 1, 1] and parts.sub_consumer.tolist() == [1, 2, NONE]
    assert parts.sub_last.tolist() == [1, 3, 6] and parts.sub_num_nodes.tolist() == [2, 2, 3]
    assert parts.waits.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert parts.rows.tolist() == [[1, 0]]


def test_a_tree_needs_as_many_rows_as_leaves():
    """A node takes the row of one of its children."""
    graph = new_graph()
    leaves = graph.nodes("leaf", np.empty((3, 0), np.int64), n0=[1, 2, 3])
    inner = graph.add("inner", (leaves[0], leaves[1]))
    graph.returns(graph.add("inner", (inner, leaves[2])))
    graph.end()
    parts = partition(graph, max_depth=20)
    assert parts.rows.tolist() == [[0, 3]]
    assert parts.uses.tolist() == [1, 1, 1, 1, 1]
    assert parts.returned.tolist() == [-1, -1, -1, -1, 0]
