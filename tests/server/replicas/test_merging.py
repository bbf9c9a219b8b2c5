"""Merging the answers of several replicas into one."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError
from pensieve_jax.server.replicas.merging import merged, summed


def answers(*values):
    return [(value, None) for value in values]


def listed(conversation_id, last_active_s, num_turns):
    return {"conversation_id": conversation_id, "last_active_s": last_active_s, "num_turns": num_turns}


def test_the_replica_where_a_conversation_was_active_last_describes_it():
    """The order is that of first mention; of equal entries the first one stays."""
    found = merged(
        "conversations",
        answers(
            [listed("a", 5.0, 1), listed("b", 5.0, 1)],
            [listed("c", 1.0, 2), listed("a", 5.0, 2)],
            [listed("b", 5.5, 3), listed("c", 0.5, 3)],
        ),
    )
    assert found == [listed("a", 5.0, 1), listed("b", 5.5, 3), listed("c", 1.0, 2)]


def test_counters_are_summed_except_sizes_and_values_that_are_not_numbers():
    one = {"num_steps": 2, "seconds": 0.5, "chunk_tokens": 32, "is_full": True, "policy": "lru"}
    other = {
        "num_steps": 3,
        "seconds": 1.0,
        "chunk_tokens": 32,
        "is_full": False,
        "policy": "fifo",
        "more": 1,
    }
    expected = {"num_steps": 5, "seconds": 1.5, "chunk_tokens": 32, "is_full": True, "policy": "lru"}
    assert summed([one, other]) == expected | {"more": 1}
    assert one["num_steps"] == 2, "the merge changed its arguments"


def test_a_merged_histogram_is_as_long_as_the_longest():
    values = answers({"a": ([1, 2], 1.0)}, {"a": ([1], 0.5), "b": ([4], 2.0)}, {"a": ([0, 0, 3], 0.25)})
    assert merged("distributions", values) == {"a": ([2, 2, 3], 1.75), "b": ([4], 2.0)}


@pytest.mark.parametrize(
    "error", [UnknownTurnError("gone"), EngineClosedError("closed"), EngineDiedError("died")]
)
def test_an_error_of_one_replica_is_ignored_if_another_answers(error):
    assert merged("push_out_turn", [(None, error), (3, None), (4, None)]) == 7
    assert merged("forget_turn_state", [(None, None), (None, error)]) is None
    with pytest.raises(type(error), match=str(error)):
        merged("push_out_turn", [(None, error), (None, EngineDiedError("second"))])
    with pytest.raises(EngineClosedError, match="No replica answers"):
        merged("push_out_turn", [])


def test_other_errors_of_a_replica_are_raised():
    with pytest.raises(ValueError, match="planted"):
        merged("stats", [({}, None), (None, ValueError("planted"))])


def test_a_turn_is_explained_by_the_replica_that_has_most_of_it_or_knows_why_not():
    def told(name, *chunks):
        return {"name": name, "chunks": [{"start": 0, "end": 32, "tier": t, "drop": d} for t, d in chunks]}

    error = UnknownTurnError("gone")
    history = told("history", (None, None), (None, None))
    dropped = told("dropped", (None, None), (None, {"reason": "NO_SLOT"}))
    held = told("held", ("cpu", None), (None, None))
    for values, best in ((answers(history, dropped), "dropped"), (answers(dropped, held, history), "held")):
        assert merged("explain_turn", [(None, error), *values])["name"] == best
    with pytest.raises(UnknownTurnError):
        merged("explain_turn", [(None, error), (None, error)])
