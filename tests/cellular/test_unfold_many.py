"""Requests that are unfolded together: an error of one is reported as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.cellular import CapacityError, CellularConfig, GraphError, UnfoldError
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


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (0, GraphError, r"requests\[1\].nodes\[0\].n0 is .* at least one int of 32 bits"),
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


def _not_ended(requests, graph):
    graph.sentences("step", requests[1:])
    graph.begin()
    graph.chain("step", requests[0])


def _before_all(requests, graph):
    graph.chain("step", list(requests[0]))
    graph.sentences("step", requests)


def _behind_all(requests, graph):
    graph.sentences("step", requests)
    graph.returns(0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_fewer, "unfold_many is 1, but must be 2, one for each given request"),
        (_more, "unfold_many is 4, but must be 2"),
        (_not_ended, "unfold_many is 1, but must be 2"),
        (lambda requests, graph: None, "unfold_many is 0, but must be 2"),
        (_before_all, "end is 'called before', but must be called once for each request"),
        (_behind_all, "end is 'called before'"),
    ],
)
def test_the_function_must_unfold_each_request_once(processor, wrong, message):
    """The error names the mistake, which its author would otherwise search for long."""
    with pytest.raises(UnfoldError, match=message):
        processor.submit_many(words(2, 3), unfold, wrong)
    assert not processor.handles and not processor.admission.request_ids


def test_requests_that_it_begins_and_ends_itself(processor):
    def each(requests, graph):
        for one in requests:
            graph.begin()
            unfold(one, graph)
            graph.end()

    assert len(processor.submit_many(words(2, 3), unfold, each)) == 2


def _sentences(words, graph):
    graph.sentences("step", [words])


def _trees(words, graph):
    graph.trees("leaf", "inner", [words], [np.empty((0, 2), np.int64)])


def _begin(words, graph):
    unfold(words, graph)
    graph.begin()


def _end(words, graph):
    unfold(words, graph)
    graph.end()


def _end_twice(words, graph):
    unfold(words, graph)
    graph.end()
    graph.chain("step", list(words))


@pytest.mark.parametrize("wrong", [_sentences, _trees, _begin, _end, _end_twice])
def test_a_single_request_must_not_begin_or_end_itself(processor, wrong):
    with pytest.raises(UnfoldError):
        processor.submit_many(words(1), wrong)
    assert not processor.handles and not processor.admission.request_ids
    assert len(processor.submit_many(words(1), unfold)) == 1


def test_words_of_any_integers_are_sentences(processor):
    """Numpy's default integers have 64 bits."""
    for some in ([np.arange(3), np.array([7], np.uint8)], [[1, 2], np.arange(3)]):
        assert len(processor.submit_many(some, None, unfold_many)) == 2
