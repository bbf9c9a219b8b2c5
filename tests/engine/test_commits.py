"""The ledger's commits: named turns and placed ones together; one refusal affects no other turn."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import (
    ConversationBusyError,
    ConversationChangedError,
    HistoryError,
    InvalidRequestError,
    UnknownConversationError,
    UnknownTurnError,
)
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history import HistoryReader
from pensieve_jax.history.server_tables.changes import (
    ConversationAppend,
    CreateConversation,
    DeleteResponse,
    Expire,
)
from tests.engine.harness import Harness
from tests.history.drafts import draft_of

CONVERSATION = CreateConversation(owner="ann", conversation_id="conv_1", metadata="{}", created_at_s=1.0)


def placed(harness, seed, *, conversation=None, attached=True, **node):
    """Submit a turn that begins a tree."""
    turn_id = new_turn_id()
    attachment = draft_of(turn_id, conversation=conversation) if attached else None
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=seed)
    node = TurnNode(turn_id=turn_id, owner="ann", attachment=attachment, **node)
    return TurnSpec(harness.prompt(9, seed), params, node=node)


def named(harness, seed, name):
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=seed)
    return TurnSpec(harness.prompt(9, seed), params, name)


def test_a_placed_turn_is_committed_under_its_ids_with_its_response(tmp_path):
    harness = Harness(path=tmp_path / "h")
    spec = placed(harness, 1, chain=b"\1")
    (output,) = harness.run(*harness.submit_all([spec]))
    (turn,) = harness.store.load_turn("ann", spec.node.turn_id).turns
    assert (turn.turn_id, turn.parent_id, turn.owner, turn.chain) == (spec.node.turn_id, None, "ann", b"\1")
    assert turn.prompt_token_ids == spec.prompt_token_ids and turn.output_token_ids == output.token_ids
    assert turn.usage == output.usage and turn.conversation_id == ""
    with HistoryReader(tmp_path / "h", fingerprint="test") as reader:
        record = reader.response("ann", f"resp_{turn.turn_id}")
    assert (record.status, record.turn_id) == ("incomplete", turn.turn_id)
    assert harness.store.conversations() == []


def test_a_turn_that_is_not_durable_never_reaches_the_history():
    harness = Harness()
    spec = placed(harness, 1, durable=False, attached=False)
    harness.run(*harness.submit_all([spec]))
    assert harness.store.commits == []
    with pytest.raises(UnknownTurnError):
        harness.store.load_turn("ann", spec.node.turn_id)


def test_an_output_ends_with_the_historys_commit():
    harness = Harness()
    output = harness.turn("alice")
    assert harness.store.load("alice").turns[0].created_at_s == output.ended_at_s is not None


def test_usage_of_a_named_turn_is_stored():
    harness = Harness()
    output = harness.turn("alice")
    assert harness.store.load("alice").turns[0].usage == output.usage


def test_one_refused_turn_fails_alone_in_a_step_of_several():
    harness = Harness()
    harness.engine.apply(CONVERSATION)
    append = ConversationAppend(conversation_id="conv_1", expected_version=0, items="[]")
    specs = [
        named(harness, 1, "alice"),
        placed(harness, 2, conversation=append),
        placed(harness, 3, conversation=append),
        placed(harness, 4),
    ]
    turns = harness.submit_all(specs)
    harness.drain()
    errors = [turn.error for turn in turns]
    assert isinstance(errors[2], ConversationChangedError)
    assert [error is None for error in errors] == [True, True, False, True]
    assert turns[2].output is None and harness.engine.stats()["num_turns_failed"] == 1
    assert len(harness.store.commits) == 1, "all in one transaction"
    assert len(harness.store.load("alice").turns) == 1
    for spec, error in zip(specs[1:], errors[1:], strict=True):
        if error is None:
            assert harness.store.load_turn("ann", spec.node.turn_id)
        else:
            with pytest.raises(UnknownTurnError):
                harness.store.load_turn("ann", spec.node.turn_id)
    harness.turn("alice", seed=9)  # the engine keeps serving


def test_a_history_that_cannot_be_written_fails_all_turns_of_a_step():
    harness = Harness()
    harness.store.faults["commit"] = lambda: HistoryError("full")
    turns = harness.submit_all([named(harness, 1, "alice"), placed(harness, 2)])
    harness.drain()
    assert all(isinstance(turn.error, HistoryError) for turn in turns)
    assert harness.store.conversations() == []


@pytest.mark.parametrize("ends", [True, False])
def test_deleting_the_parent_of_a_running_turn_leaves_it_the_tokens(ends):
    harness = Harness()
    parent = placed(harness, 1)
    harness.run(*harness.submit_all([parent]))
    parent_id = parent.node.turn_id
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=2)
    node = TurnNode(turn_id=new_turn_id(parent_id), parent_id=parent_id, owner="ann")
    (turn,) = harness.submit_all([TurnSpec(harness.prompt(9, 2), params, node=node)])
    harness.engine.apply(DeleteResponse(owner="ann", response_id=f"resp_{parent_id}"))
    harness.engine.apply(Expire(now_s=0.0))
    assert harness.store.load_turn("ann", parent_id)
    if ends:
        harness.run(turn)
        path = harness.store.load_turn("ann", node.turn_id)
        assert [one.turn_id for one in path.turns] == [parent_id, node.turn_id]
        return
    harness.engine.cancel(turn)
    harness.engine.apply(Expire(now_s=0.0))
    with pytest.raises(UnknownTurnError):
        harness.store.load_turn("ann", parent_id)


@pytest.mark.parametrize("durable", [True, False])
def test_a_turn_whose_response_was_deleted_cannot_be_continued_although_its_kv_cache_exists(durable):
    harness = Harness()
    parent = placed(harness, 1)
    harness.run(*harness.submit_all([parent]))
    parent_id = parent.node.turn_id
    harness.engine.apply(DeleteResponse(owner="ann", response_id=f"resp_{parent_id}"))
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=2)
    node = TurnNode(turn_id=new_turn_id(parent_id), parent_id=parent_id, owner="ann", durable=durable)
    with pytest.raises(UnknownTurnError):
        harness.submit_all([TurnSpec(harness.prompt(9, 2), params, node=node)])
    harness.turn("alice", seed=9)  # the engine keeps serving


# --- forks of named conversations


@pytest.mark.parametrize("num_tokens", [None, 0, 5, 14, 20, 28])
def test_a_fork_and_its_source_continue_as_the_history_says(num_tokens):
    harness = Harness()
    for number in range(2):
        harness.turn("alice", 10, seed=number, max_tokens=4)
    whole = harness.history("alice")
    harness.engine.fork("alice", "bob", num_tokens)
    assert harness.history("bob") == whole[:num_tokens]
    outputs = [harness.turn(name, 7, seed=5, max_tokens=4) for name in ("alice", "bob")]
    if num_tokens is None:
        assert outputs[0].token_ids == outputs[1].token_ids
    assert harness.history("alice")[: len(whole)] == whole
    harness.check_empty()


def test_a_conversation_can_be_forked_while_its_turn_runs():
    harness = Harness()
    harness.turn("alice", 10, max_tokens=4)
    facts = harness.facts(harness.prompt(9), "alice", max_tokens=8)
    turn = harness.submit(facts, "alice")
    harness.step(2)
    harness.engine.fork("alice", "bob")
    assert harness.history("bob") == harness.history("alice")
    (output,) = harness.run(turn)
    assert output.token_ids == harness.expected(facts)
    assert len(harness.store.load("bob").turns) == 1
    harness.check_empty()


def test_impossible_forks_change_nothing():
    harness = Harness()
    harness.turn("alice")
    running = harness.submit(harness.facts(harness.prompt(9), "bob"), "bob")
    with pytest.raises(ConversationBusyError):
        harness.engine.fork("alice", "bob")  # it does not exist in the history yet
    with pytest.raises(UnknownConversationError):
        harness.engine.fork("nobody", "carol")
    for name, num_tokens in (("alice", None), ("c\0", None), ("", None), ("carol", 99)):
        with pytest.raises(InvalidRequestError):
            harness.engine.fork("alice", name, num_tokens)
    with pytest.raises(InvalidRequestError):
        harness.engine.fork("alice", None)
    harness.run(running)
    assert {info.conversation_id for info in harness.store.conversations()} == {"alice", "bob"}


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_conversation_that_another_engine_changed_leaves_memory(is_changed):
    """Its tokens in memory are stale. After any other refusal they still equal those of the history."""
    harness = Harness()
    harness.turn("a", 7, max_tokens=3)
    turn = harness.submit(harness.facts(harness.prompt(5, 1), "a", max_tokens=3), "a")
    error = ConversationChangedError("a") if is_changed else HistoryError("refused")
    harness.store.faults["commit"] = lambda: error
    while not turn.done:
        harness.engine.step()
    assert turn.error is error
    assert harness.engine.stats()["num_live_conversations"] == (0 if is_changed else 1)
    harness.engine.check_integrity()
    output = harness.turn("a", 4, seed=2, max_tokens=2)
    assert (output.usage.recomputed_tokens > 0) == is_changed
