"""Turns placed in trees: extended, forked, loaded, found by their chunks, and always answered alike."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import DropReason, Role
from pensieve_jax.core.errors import (
    ContextLengthError,
    HistoryError,
    InvalidRequestError,
    StepFailedError,
    UnknownTurnError,
)
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from tests.engine.harness import Harness, small_config
from tests.engine.trees import Forest

CHUNK = 16


def forest(*, path=None, **config):
    return Forest(Harness(small_config(**config), path=path))


def usage_of(sent):
    """Return how many tokens of the context were reused, and how many computed."""
    usage = sent.turn.output.usage
    return usage.reused_gpu_tokens + usage.swapped_in_tokens, usage.recomputed_tokens + usage.prefilled_tokens


def test_a_turn_after_the_latest_one_extends_its_branch():
    trees = forest()
    first = trees.turn(prompt=40)
    (second,) = trees.send(first, 10)
    assert second.turn.origin == TurnOrigin("extended", 48)
    trees.settle(second)
    assert usage_of(second) == (47, 11), "but for the last token of the reply before"
    assert trees.engine.stats()["num_live_conversations"] == 1
    assert second.turn.output.conversation_id is None


def test_a_new_tree_has_no_computed_tokens():
    trees = forest()
    (sent,) = trees.send(prompt=40)
    (branch,) = trees.engine.conversations.branches.of("ann")
    assert (branch.conversation.num_computed_tokens, branch.conversation.num_history_tokens) == (0, 0)
    trees.settle(sent)


def test_a_turn_after_an_earlier_one_forks():
    trees = forest()
    first = trees.turn(prompt=40)
    trees.turn(first, 10)
    (other,) = trees.send(first, 10, seed=3)
    assert other.turn.origin == TurnOrigin("forked", 48)
    trees.settle(other)
    assert usage_of(other) == (48, 10), "three chunks; the other branch has filled the last one"
    assert trees.engine.stats()["num_live_conversations"] == 2


def test_a_fork_computes_no_more_than_the_rest_of_a_chunk():
    trees = forest()
    first = trees.turn(prompt=41)
    trees.turn(first, 3, max_tokens=2)
    (other,) = trees.send(first, 10, seed=3)
    trees.settle(other)
    assert usage_of(other) == (48, 49 + 10 - 48)


def test_siblings_run_side_by_side():
    trees = forest()
    first = trees.turn(prompt=40)
    siblings = [trees.send(first, 5 + number, seed=number)[0] for number in range(4)]
    assert [one.turn.origin.kind for one in siblings] == ["extended", "forked", "forked", "forked"]
    trees.harness.step(2)
    assert sum(one.turn.request.sequence.role is Role.RUNNING for one in siblings) == 4
    trees.settle(*siblings)
    for one in siblings[1:]:
        assert usage_of(one)[0] == 2 * CHUNK, "the third chunk was not full when they forked"


def test_a_regenerated_turn_reuses_its_prompt_too():
    trees = forest()
    first = trees.turn(prompt=40)
    prompt = trees.harness.prompt(50, 9)
    trees.turn(first, prompt, max_tokens=20)
    (again,) = trees.send(first, prompt, seed=1)
    assert again.turn.origin == TurnOrigin("forked", 6 * CHUNK)
    trees.settle(again)
    assert usage_of(again) == (6 * CHUNK, 48 + 50 - 6 * CHUNK)


@pytest.mark.parametrize("parent_len", [None, 40, 41])
def test_choices_share_a_prompt_that_none_of_them_has_computed(parent_len):
    trees = forest()
    parent = None if parent_len is None else trees.turn(prompt=parent_len)
    num_before = 0 if parent is None else len(trees.tokens[parent])
    choices = trees.send(parent, 100, number=3)
    kinds = [one.turn.origin.kind for one in choices]
    assert kinds == ["new" if parent is None else "extended", "forked", "forked"]
    trees.settle(*choices)
    num_computed = sum(usage_of(one)[1] for one in choices)
    num_context = num_before + 100
    num_shared = (num_context - 1) // CHUNK * CHUNK
    num_found = max(num_before - 1, 0) // CHUNK * CHUNK
    assert num_computed == num_context - num_found + 2 * (num_context - num_shared)
    assert len({one.turn.output.token_ids for one in choices}) == 1, "greedy choices are alike"


def test_a_cancelled_choice_leaves_the_shared_chunks_to_the_others():
    trees = forest()
    parent = trees.turn(prompt=40)
    choices = trees.send(parent, 100, number=3)
    trees.harness.step(1)
    trees.engine.cancel(choices[0].turn)
    trees.engine.check_integrity()
    trees.settle(*choices[1:])
    (again,) = trees.send(parent, 5)
    assert again.turn.origin.kind == "extended"
    trees.settle(again)


def test_a_cancelled_fork_leaves_nothing_behind():
    trees = forest()
    first = trees.turn(prompt=40)
    trees.turn(first, 10)
    (other,) = trees.send(first, 10, seed=3)
    trees.harness.step(1)
    trees.engine.cancel(other.turn)
    trees.engine.check_integrity()
    assert trees.engine.stats()["num_live_conversations"] == 1
    (new,) = trees.send(None, 20)
    trees.engine.cancel(new.turn)
    assert trees.engine.stats()["num_live_conversations"] == 1
    with pytest.raises(UnknownTurnError):
        trees.engine.submit([TurnSpec((1,), SamplingParams(), node=_behind(new.node.turn_id))])


def _behind(turn_id, owner="ann", **more):
    return TurnNode(turn_id=new_turn_id(turn_id), parent_id=turn_id, owner=owner, **more)


def test_a_parent_in_the_history_is_loaded(tmp_path):
    path = tmp_path / "history.sqlite"
    trees = forest(path=path)
    first = trees.turn(prompt=40)
    second = trees.turn(first, 10)
    known = trees.tokens
    trees.engine.close()
    trees = forest(path=path)
    trees.tokens = known
    (third,) = trees.send(second, 10)
    assert third.turn.origin == TurnOrigin("loaded", 0)
    trees.settle(third)
    (fourth,) = trees.send(first, 30)
    assert fourth.turn.origin == TurnOrigin("forked", 48), "its parent came with the path to another turn"
    trees.settle(fourth)


def test_choices_after_a_turn_of_the_history_load_it_once(tmp_path):
    path = tmp_path / "history.sqlite"
    trees = forest(path=path)
    first = trees.turn(prompt=40)
    known = trees.tokens
    trees.engine.close()
    trees = forest(path=path)
    trees.tokens = known
    choices = trees.send(first, 10, number=4)
    assert trees.harness.store.num_loads == 1
    ids = trees.settle(*choices)
    for turn_id in ids:  # and none of them is on the path of another
        trees.turn(turn_id, 3)


def test_a_loaded_path_reuses_its_beginning_in_memory():
    trees = forest()
    first = trees.turn(prompt=40)
    second = trees.turn(first, 30)
    table = trees.engine.conversations
    table.forget(table.branches.at("ann", second)[0])
    trees.turn(first, 5)
    (third,) = trees.send(second, 10)
    assert third.turn.origin == TurnOrigin("loaded", 3 * CHUNK)
    trees.settle(third)
    assert usage_of(third)[0] == 3 * CHUNK


def test_a_turn_without_a_parent_reuses_matching_chunks():
    trees = forest()
    first = trees.turn(prompt=40)
    resent = (*trees.tokens[first], *trees.harness.prompt(20, 7))
    (again,) = trees.send(None, resent)
    assert again.turn.origin == TurnOrigin("chunks", 3 * CHUNK)
    trees.settle(again)
    assert usage_of(again) == (2 * CHUNK, 48 + 20 - 2 * CHUNK), "the last token of a reply was never computed"
    (other,) = trees.send(None, (*resent[:20], 1, *resent[21:]))
    assert other.turn.origin == TurnOrigin("chunks", CHUNK)
    trees.settle(other)


def test_the_last_token_of_a_context_is_never_reused():
    """It must be computed, since the next token is sampled from it."""
    trees = forest()
    prompt = trees.harness.prompt(4 * CHUNK)
    trees.turn(None, prompt)
    (again,) = trees.send(None, prompt)
    assert again.turn.origin == TurnOrigin("chunks", 3 * CHUNK)
    trees.settle(again)
    trees.settle(*trees.send(None, trees.harness.prompt(2 * CHUNK, 5), number=2))


def test_owners_share_nothing():
    trees = forest()
    first = trees.turn(prompt=60)
    prompt = trees.harness.prompt(60)
    (other,) = trees.send(None, prompt, owner="bob")
    assert other.turn.origin == TurnOrigin("new", 0)
    trees.settle(other)
    assert usage_of(other) == (0, 60)
    with pytest.raises(UnknownTurnError):
        trees.send(first, 5, owner="bob")
    assert trees.engine.chunk_map("carol") == []


def test_an_in_memory_turn_lasts_as_long_as_its_kv_cache():
    trees = forest()
    first = trees.turn(prompt=40, durable=False)
    (second,) = trees.send(first, 10, durable=False)
    assert second.turn.origin.kind == "extended"
    trees.settle(second)
    assert not trees.harness.store.commits
    trees.harness.forget_branches()
    with pytest.raises(UnknownTurnError):
        trees.send(second.node.turn_id, 10, durable=False)


def test_a_durable_turn_has_durable_parents():
    trees = forest()
    first = trees.turn(prompt=40)
    second = trees.turn(first, 10, durable=False)
    with pytest.raises(InvalidRequestError, match=r"durable is True, but must be False after the turn"):
        trees.send(second, 10)
    third = trees.turn(first, 10, seed=3)
    trees.harness.forget_branches()
    assert trees.turn(third, 5)


def test_idle_branches_leave_memory_with_time():
    trees = forest(idle_ttl_s=60.0)
    first = trees.turn(prompt=40, durable=False)
    trees.harness.clock.advance(59)
    trees.engine.expire_idle()
    second = trees.turn(first, 10, durable=False)
    trees.harness.clock.advance(61)
    trees.engine.expire_idle()
    with pytest.raises(UnknownTurnError):
        trees.send(second, 10, durable=False)
    assert trees.engine.stats()["num_live_conversations"] == 0


def test_idle_branches_are_limited_to_the_number_of_conversations():
    trees = forest(max_idle_conversations=2)
    turns = []
    for number in range(4):
        turns.append(trees.turn(prompt=20, seed=number, durable=False))
        trees.harness.clock.advance(1)
    trees.engine.expire_idle()
    for turn_id in turns[:2]:
        with pytest.raises(UnknownTurnError):
            trees.send(turn_id, 5, durable=False)
    trees.turn(turns[3], 5, durable=False)


@pytest.mark.parametrize("limits", [{"max_idle_conversations": 1}, {"idle_ttl_s": 10.0}])
def test_a_branch_with_a_turn_in_progress_never_expires(limits):
    """It stays although it is older than the time-to-live, and than as many idle branches as may stay."""
    trees = forest(**limits)
    first = trees.turn(prompt=40, durable=False)
    (running,) = trees.send(first, 10, durable=False, max_tokens=60)
    trees.harness.step(2)
    trees.harness.clock.advance(11)
    (other,) = trees.send(None, 20, seed=1, durable=False, max_tokens=2)
    while not other.turn.done:
        trees.harness.step()
    trees.engine.expire_idle()
    trees.engine.check_integrity()
    assert not running.turn.done and trees.engine.stats()["num_live_conversations"] == 2
    (second,) = trees.settle(running)
    assert running.turn.output.finish_reason == "length"
    (third,) = trees.send(second, 5, durable=False)
    assert third.turn.origin.kind == "extended"
    trees.settle(third)


def test_the_kv_cache_of_a_branch_with_a_turn_in_progress_is_neither_pushed_out_nor_forgotten():
    trees = forest(cpu_pages=40)
    first = trees.turn(prompt=40)
    (running,) = trees.send(first, 10, max_tokens=30)
    trees.harness.step(2)
    assert trees.engine.push_out_turn("ann", first) == 0
    trees.engine.forget_turn_state("ann", first)
    trees.engine.check_integrity()
    trees.settle(running)
    assert usage_of(running) == (47, 11)


def test_branches_without_kv_cache_are_swept():
    trees = forest(gpu_pages=20)
    turns = [trees.turn(prompt=100, seed=number) for number in range(70)]
    assert trees.engine.stats()["num_live_conversations"] < 70
    (again,) = trees.send(turns[0], 10)
    assert again.turn.origin.kind == "loaded"
    trees.settle(again)


def test_if_one_turn_of_a_call_cannot_be_placed_none_is_queued():
    trees = forest()
    first = trees.turn(prompt=40)
    good = TurnSpec((1, 2), SamplingParams(), node=_behind(first))
    node = _behind(first)
    prefix = SharedPrefix((1, 2, 3))
    bad = [
        (TurnSpec((1,), SamplingParams(), node=_behind(new_turn_id())), UnknownTurnError),
        (TurnSpec((1,), SamplingParams(), node=_behind(first, owner="bob")), UnknownTurnError),
        (TurnSpec((1,), SamplingParams(), node=good.node), InvalidRequestError),
        (TurnSpec((1,), SamplingParams(), "alice", node=node), InvalidRequestError),
        (TurnSpec((1,), SamplingParams(), prefix=prefix, node=node), InvalidRequestError),
        (TurnSpec((1,), SamplingParams(), node="a turn"), InvalidRequestError),
        (TurnSpec((1,) * 600, SamplingParams(), node=node), ContextLengthError),
        (TurnSpec((), SamplingParams(), node=node), InvalidRequestError),
        (TurnSpec((1,), SamplingParams(), node=TurnNode(turn_id=first, owner="ann")), InvalidRequestError),
    ]
    for spec, error in bad:
        with pytest.raises(error):
            trees.engine.submit([good, spec])
        assert not trees.engine.has_unfinished
        trees.engine.check_integrity()
    running = trees.engine.submit([good])[0]
    with pytest.raises(InvalidRequestError, match="turn_id"):
        trees.engine.submit([good])
    assert running.origin.kind == "extended"


def test_a_failed_turn_leaves_its_parent_unchanged():
    trees = forest()
    first = trees.turn(prompt=40)
    (failed,) = trees.send(first, 10)
    trees.harness.runner.faults["launch"] = lambda: StepFailedError("the device failed")
    trees.harness.drain()
    assert isinstance(failed.turn.error, StepFailedError)
    (refused,) = trees.send(first, 10)
    trees.harness.store.faults["commit"] = lambda: HistoryError("the disk is full")
    trees.harness.drain()
    assert isinstance(refused.turn.error, HistoryError)
    trees.turn(first, 10)


def test_a_stateless_engine_finds_a_branchs_tokens_and_no_kv_cache():
    trees = forest(stateful=False)
    first = trees.turn(prompt=40)
    siblings = trees.send(first, 10, number=2)
    trees.settle(*siblings)
    assert [usage_of(one) for one in siblings] == [(0, 58), (0, 58)]


def test_the_map_shows_an_owners_chunks_once():
    trees = forest(cpu_pages=40)
    first = trees.turn(prompt=40)
    (shown,) = trees.engine.chunk_map("ann")
    assert shown == (first, 48, False, 0, 0, "3g")
    second = trees.turn(first, 40)
    (third,) = trees.send(first, 20, seed=2)
    one, two = trees.engine.chunk_map("ann")
    assert one == (second, 96, False, 3, 0, "6g")
    assert two == (first, 68, True, 3, 3, "")
    trees.settle(third)
    assert trees.engine.push_out_turn("ann", second) == 6
    trees.harness.step()
    trees.harness.finish_copies()
    one, two = trees.engine.chunk_map("ann")
    assert one.states == "6c" and (two.turn_id, two.first, two.states) == (third.node.turn_id, 3, "2g")
    trees.engine.forget_turn_state("ann", third.node.turn_id)
    (one, two) = trees.engine.chunk_map("ann")
    assert one.states == "6c" and two.states == ""
    trees.turn(second, 5)
    trees.turn(third.node.turn_id, 5)


def test_chunks_can_be_listed_by_turn():
    trees = forest(cpu_pages=40)
    first = trees.turn(prompt=40)
    trees.harness.forget_branches()
    assert trees.engine.push_out_turn("ann", first) == 0, "it is in the history only"
    trees.engine.forget_turn_state("ann", first)
    for call in (trees.engine.push_out_turn, trees.engine.forget_turn_state):
        with pytest.raises(UnknownTurnError):
            call("bob", first)
        with pytest.raises(InvalidRequestError):
            call("ann", "no turn")


def test_a_turn_is_explained_up_to_its_end():
    trees = forest()
    first = trees.turn(prompt=41)
    whole = trees.engine.explain_turn("ann", first)
    assert (whole.conversation_id, whole.num_tokens, len(whole.chunks)) == (first, 49, 3)
    assert "reuse 48 tokens in device memory, copy 0 in, and recompute 0" in whole.lines[-1]
    second = trees.turn(first, 40)
    part = trees.engine.explain_turn("ann", first)
    assert [(chunk.start, chunk.end, chunk.tier) for chunk in part.chunks] == [
        (0, CHUNK, "gpu"),
        (CHUNK, 2 * CHUNK, "gpu"),
        (2 * CHUNK, 3 * CHUNK, "gpu"),
        (3 * CHUNK, 49, "gpu"),
    ]
    assert "reuse 48 tokens in device memory, copy 0 in, and recompute 1" in part.lines[-1], "it would fork"
    assert part.num_tokens == 49 and repr(first) in part.lines[0]
    trees.engine.forget_turn_state("ann", second)
    assert {chunk.tier for chunk in trees.engine.explain_turn("ann", second).chunks} == {None}
    for owner, turn_id, error in (
        ("bob", first, UnknownTurnError),
        ("ann", new_turn_id(), UnknownTurnError),
        ("ann", "no turn", InvalidRequestError),
        ([], first, InvalidRequestError),
    ):
        with pytest.raises(error):
            trees.engine.explain_turn(owner, turn_id)


def test_chunks_of_a_turn_that_others_pushed_out_have_a_reason():
    trees = forest(gpu_pages=12, reserve_fraction=0.0, swap_out_fraction=0.0)
    first = trees.turn(prompt=70)
    for seed in (1, 2):
        trees.harness.clock.advance(30.0)
        trees.turn(prompt=60, seed=seed)
    chunks = trees.engine.explain_turn("ann", first).chunks
    drops = [chunk.drop for chunk in chunks if chunk.tier is None]
    assert drops and all(drop.reason is DropReason.NO_HOST_MEMORY and drop.worth > 0 for drop in drops)


def test_a_turn_that_only_the_history_has_is_explained_by_the_chunks_that_it_would_find():
    trees = forest()
    prompt = trees.harness.prompt(40)
    first = trees.turn(None, prompt)
    trees.harness.forget_branches()
    assert {chunk.tier for chunk in trees.engine.explain_turn("ann", first).chunks} == {None}
    trees.turn(None, prompt[:33])
    explanation = trees.engine.explain_turn("ann", first)
    assert explanation.idle_s is None and explanation.num_tokens == 48
    assert [(chunk.tier, chunk.is_shared) for chunk in explanation.chunks] == [
        ("gpu", True),
        ("gpu", True),
        (None, False),
    ]
    found = trees.send(first, 5)
    trees.settle(*found)
    assert usage_of(found[0])[0] == 32
    assert "reuse 32 tokens in device memory, copy 0 in, and recompute 15" in explanation.lines[-1]


def test_a_named_conversation_forks_with_its_kv_cache():
    harness = Harness()
    harness.turn("alice", 60)
    harness.engine.fork("alice", "bob", 40)
    assert harness.history("bob") == harness.history("alice")[:40]
    output = harness.turn("bob", 10)
    assert output.usage.reused_gpu_tokens == 2 * CHUNK
    harness.turn("alice", 10)
    harness.check_empty()


def test_a_running_conversation_forks_at_its_last_commit():
    harness = Harness()
    harness.turn("alice", 60)
    running = harness.submit(harness.facts(harness.prompt(30, 4), "alice", max_tokens=20), "alice")
    harness.step(3)
    harness.engine.fork("alice", "bob")
    harness.engine.check_integrity()
    output = harness.turn("bob", 10)
    assert output.usage.reused_gpu_tokens == len(harness.history("alice")) // CHUNK * CHUNK or running.done
    harness.check_empty()


def test_ending_all_branches_frees_everything():
    trees = forest(cpu_pages=20)
    first = trees.turn(prompt=40)
    for number in range(6):
        trees.turn(first, 40, seed=number)
    trees.harness.forget_branches()
    trees.harness.check_empty()
    index = trees.engine.conversations.branches
    assert not len(index._chunks) and not index._by_turn and not index._by_owner and not index._running


@pytest.mark.parametrize(("idle_s", "is_left"), [(60.0, True), (60.5, False)])
def test_a_branch_may_be_idle_for_its_whole_time_to_live(idle_s, is_left):
    trees = forest(idle_ttl_s=60.0)
    trees.turn(prompt=40)
    trees.harness.clock.advance(idle_s)
    trees.engine.expire_idle()
    assert trees.engine.stats()["num_live_conversations"] == is_left


def reopened(path, trees):
    """Return a new engine over the same history, without any branch in memory."""
    trees.engine.close()
    again = forest(path=path)
    again.tokens = trees.tokens
    return again


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_branch_that_was_loaded_stays_when_its_turn_is_cancelled(tmp_path, is_cancelled):
    """Only it holds the path, so the next turn on it extends it."""
    path = tmp_path / "history.sqlite"
    trees = forest(path=path)
    first = trees.turn(prompt=40)
    trees = reopened(path, trees)
    (second,) = trees.send(first, 10)
    assert second.turn.origin.kind == "loaded"
    trees.harness.step(2)
    if is_cancelled:
        trees.engine.cancel(second.turn)
    else:
        trees.settle(second)
    assert trees.engine.stats()["num_live_conversations"] == 1
    (third,) = trees.send(first, 10, seed=3)
    assert third.turn.origin.kind == ("extended" if is_cancelled else "forked")
    trees.settle(third)


def test_a_branch_that_was_loaded_was_last_active_when_its_last_turn_was_committed(tmp_path, monkeypatch):
    """The cache derives from that how long the user was away."""
    path = tmp_path / "history.sqlite"
    trees = forest(path=path)
    first = trees.turn(prompt=40)
    trees.harness.clock.advance(25.0)
    second = trees.turn(first, 10)
    assert trees.harness.clock.now() == 1025.0
    trees = reopened(path, trees)
    trees.harness.clock.advance(500.0)
    seen = []
    monkeypatch.setattr(trees.engine._cache.turns, "sent", lambda one, _: seen.append(one.last_active_s))
    (third,) = trees.send(second, 10)
    assert seen == [1025.0]
    trees.settle(third)


def found(trees, prompt, **params):
    """Return how many tokens of a prompt without a parent are found in the cache."""
    (sent,) = trees.send(None, prompt, seed=9, **params)
    trees.settle(sent)
    return usage_of(sent)[0]


def test_a_deleted_turn_leaves_no_tokens_in_the_cache():
    trees = forest()
    prompt = trees.harness.prompt(70, 3)
    first = trees.turn(None, prompt, is_response=True)
    pages = trees.engine.stats()["num_known_chunks"]
    assert pages == (70 + 8) // CHUNK
    trees.delete(first)
    assert trees.engine.stats()["num_known_chunks"] == trees.engine.stats()["num_live_conversations"] == 0
    assert found(trees, prompt) == 0


def test_deleting_the_last_turn_of_a_branch_keeps_the_turns_before():
    trees = forest()
    first = trees.turn(prompt=40, is_response=True)
    second = trees.turn(first, 40, is_response=True)
    context = trees.tokens[second]
    trees.delete(second)
    assert found(trees, context) == 48, "the first turn's three chunks"
    (again,) = trees.send(first, 10)
    assert again.turn.origin == TurnOrigin("extended", 48)
    trees.settle(again)
    assert usage_of(again) == (48, 10), "the deleted turn had computed the last token too"


def test_deleting_a_turn_keeps_what_later_turns_and_siblings_hold():
    trees = forest()
    first = trees.turn(prompt=40, is_response=True)
    second = trees.turn(first, 40, is_response=True)
    third = trees.turn(second, 40, is_response=True)
    other = trees.turn(first, 40, seed=3, is_response=True)
    trees.delete(second)
    for turn_id in (third, other):
        (sent,) = trees.send(turn_id, 10)
        assert sent.turn.origin.kind == "extended"
        trees.settle(sent)
    trees.delete(other)  # its child is kept for itself
    trees.delete(third)
    trees.delete(first)
    assert trees.engine.stats()["num_live_conversations"] == 2


def test_deleting_the_last_turns_of_a_path_removes_those_that_only_they_needed():
    trees = forest()
    first = trees.turn(prompt=40, is_response=True)
    second = trees.turn(first, 40, is_response=True)
    context = trees.tokens[second]
    trees.delete(first)
    assert trees.engine.stats()["num_known_turns"] == 2, "the second turn needs the first"
    trees.delete(second)
    assert trees.engine.stats()["num_known_turns"] == 0 and found(trees, context) == 0


def test_deleting_a_turn_that_a_running_one_continues_keeps_its_branch():
    trees = forest()
    first = trees.turn(prompt=40, is_response=True)
    (running,) = trees.send(first, 10, is_response=True)
    trees.delete(first)
    trees.settle(running)
    assert usage_of(running) == (47, 11)


def test_a_turn_in_memory_keeps_a_deleted_turn_before_it():
    trees = forest()
    first = trees.turn(prompt=40, is_response=True)
    second = trees.turn(first, 40, durable=False)
    trees.delete(first)
    (sent,) = trees.send(second, 10, durable=False)
    assert sent.turn.origin.kind == "extended"
    trees.settle(sent)
