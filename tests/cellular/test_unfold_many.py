"""Requests that are unfolded many at once: what is wrong with one of them is told as of one alone."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.cellular import CapacityError, CellularConfig, GraphError
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.request_processor import RequestProcessor
from tests.cellular.hash_cells import make_cells

_NAMES = ("step", "decode", "leaf", "inner", "join", "narrow")


@pytest.fixture
def processor():
    types = CellTypes(make_cells(dict.fromkeys(_NAMES, 4)))
    return RequestProcessor(types, CellularConfig(num_rows=8, max_nodes=9, max_depth=5))


def unfold(words, graph):
    graph.returns(graph.chain("step", words)[-1])


def unfold_many(requests, graph):
    graph.sentences("step", requests)


def words(*lengths):
    return [np.arange(num, dtype=np.int32) for num in lengths]


def test_lists_are_unfolded_one_by_one(processor):
    """They are no arrays i32, which is no fault."""
    assert len(processor.submit_many([[1, 2], [3]], unfold, unfold_many)) == 2


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (0, GraphError, r"requests\[1\].nodes\[0\].num is 0"),
        (12, CapacityError, r"requests\[1\].nodes\[0\] is 12, but must be at most max_nodes"),
        (7, CapacityError, r"requests\[1\].* at most max_depth"),
    ],
)
def test_the_request_is_named(processor, bad, error, match):
    with pytest.raises(error, match=match):
        processor.submit_many(words(2, bad, 3), unfold, unfold_many)
    assert not processor.handles and not processor.admission.request_ids


def _fewer(requests, graph):
    graph.sentences("step", requests[1:])


def _more(requests, graph):
    graph.sentences("step", [*requests, *requests])


def _and_nodes_of_none(requests, graph):
    graph.sentences("step", requests)
    graph.chain("step", requests[0])


@pytest.mark.parametrize(
    ("wrong", "found"), [(_fewer, 1), (_more, 4), (_and_nodes_of_none, 2), (lambda requests, graph: None, 0)]
)
def test_one_for_each(processor, wrong, found):
    """A function that unfolds others than it was given is told so: its author would look for long."""
    with pytest.raises(GraphError, match=f"unfold_many is {found}, but must be 2, one for each request"):
        processor.submit_many(words(2, 3), unfold, wrong)
    assert not processor.handles and not processor.admission.request_ids


def test_whole_requests_are_not_added_within_one(processor):
    def sentences(words, graph):
        graph.sentences("step", [words])

    def trees(words, graph):
        graph.trees("leaf", "inner", [words], [np.empty((0, 2), np.int64)])

    for wrong in (sentences, trees):
        with pytest.raises(GraphError, match="called by unfold_many, which adds whole requests"):
            processor.submit_many(words(1), wrong)
