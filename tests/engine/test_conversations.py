"""Conversations between turns: listing, truncating, ending, and the bounds on idle ones."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.errors import (
    ConversationBusyError,
    InvalidRequestError,
    UnknownConversationError,
)
from tests.engine.harness import Harness, small_config


def listed(harness):
    harness.engine.expire_idle()
    return [info.conversation_id for info in harness.engine.conversations.listing()]


def test_listing_shows_the_most_recently_active_first():
    harness = Harness()
    for name in "abc":
        harness.clock.advance(1)
        harness.turn(name, 12, max_tokens=3)
    harness.clock.advance(1)
    harness.turn("a", 4, seed=1, max_tokens=2)
    assert listed(harness) == ["a", "c", "b"]
    first = harness.engine.conversations.listing()[0]
    assert (first.num_tokens, first.num_turns, first.last_active_s) == (21, 2, 1004.0)
    running = harness.submit(harness.facts(harness.prompt(4), "new"), "new")
    assert "new" not in listed(harness), "nothing of it was committed"
    harness.run(running)
    assert "new" in listed(harness)


def test_records_keep_every_turn():
    harness = Harness()
    outputs = [harness.turn("a", 7, seed=seed, max_tokens=4) for seed in range(3)]
    record = harness.engine.conversations.record("a")
    assert [turn.output_token_ids for turn in record.turns] == [output.token_ids for output in outputs]
    assert [turn.prompt_token_ids for turn in record.turns] == [harness.prompt(7, seed) for seed in range(3)]
    assert [turn.seed for turn in record.turns] == [0, 1, 2]
    assert {turn.finish_reason for turn in record.turns} == {"length"}


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 40, 44, 45])
def test_truncate_keeps_a_prefix_of_tokens_and_kv_cache(num_tokens):
    """The next turn continues the prefix, and reuses exactly its KV."""
    harness = Harness()
    harness.turn("a", 30, max_tokens=5)
    harness.turn("a", 5, seed=1, max_tokens=5)
    history = harness.history("a")
    harness.engine.truncate("a", num_tokens)
    harness.engine.check_integrity()
    assert harness.history("a") == history[:num_tokens]
    output = harness.turn("a", 9, seed=2, max_tokens=6)
    assert output.usage.reused_gpu_tokens == min(num_tokens, 44)
    assert output.usage.recomputed_tokens == 0
    harness.check_empty()


def test_the_length_of_a_history_is_known_without_reading_it():
    harness = Harness()
    harness.turn("a", 90, max_tokens=5)
    table = harness.engine.conversations
    table.forget(table.get("a"))
    num_loads = harness.store.num_loads
    assert [table.num_tokens(name) for name in ("a", "b", None)] == [95, 0, 0]
    with pytest.raises(InvalidRequestError, match="conversation_id"):
        table.num_tokens("")
    assert harness.store.num_loads == num_loads and not len(table)


def test_truncate_behind_holes():
    """A cut inside a hole leaves only the tokens before the cut to recompute."""
    harness = Harness()
    harness.turn("a", 90, max_tokens=5)
    harness.drop("a", 0, 2, 3)
    harness.engine.truncate("a", 60)
    harness.engine.check_integrity()
    output = harness.turn("a", 9, seed=2, max_tokens=6)
    usage = output.usage
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens, usage.prefilled_tokens) == (16, 44, 9)
    harness.check_empty()


def test_truncate_and_end_refuse_invalid_arguments():
    harness = Harness()
    harness.turn("a", 10, max_tokens=5)
    for bad in (-1, 16, 1.5, True, None, "3"):
        with pytest.raises(InvalidRequestError, match="num_tokens"):
            harness.engine.truncate("a", bad)
    for call in (lambda: harness.engine.truncate("b", 0), lambda: harness.engine.end("b")):
        with pytest.raises(UnknownConversationError, match="'b'"):
            call()
    turn = harness.submit(harness.facts(harness.prompt(3), "a"), "a")
    for call in (lambda: harness.engine.truncate("a", 1), lambda: harness.engine.end("a")):
        with pytest.raises(ConversationBusyError, match="'a'"):
            call()
    harness.run(turn)
    assert harness.engine.conversations.num_tokens("a") == len(harness.history("a"))


def test_an_ended_conversation_starts_again():
    harness = Harness()
    harness.turn("a", 50, max_tokens=5)
    harness.engine.end("a")
    assert listed(harness) == [] and harness.engine.stats()["num_available_gpu_pages"] == 40
    output = harness.turn("a", 5, seed=1, max_tokens=5)
    assert output.usage.reused_gpu_tokens == 0 and len(harness.history("a")) == 10


def test_the_bound_on_idle_conversations_ends_the_least_recently_active():
    harness = Harness(small_config(max_idle_conversations=2))
    for name in "abc":
        harness.clock.advance(1)
        harness.turn(name, 8, max_tokens=2)
    assert listed(harness) == ["c", "b"]
    running = harness.submit(harness.facts(harness.prompt(20), "b", max_tokens=30), "b")
    for name in "de":
        harness.clock.advance(1)
        turn = harness.submit(harness.facts(harness.prompt(3), name, max_tokens=2), name)
        while not turn.done:
            harness.step()
    assert listed(harness)[:2] == ["e", "d"] and "b" in listed(harness), "a running one is never ended"
    harness.run(running)
    assert listed(harness) == ["b", "e"]
    with pytest.raises(UnknownConversationError):
        harness.engine.conversations.record("a")
    harness.check_empty()


def test_idle_conversations_end_after_their_time_to_live():
    harness = Harness(small_config(idle_ttl_s=10.0))
    harness.turn("a", 8, max_tokens=2)
    harness.clock.advance(6)
    harness.turn("b", 8, max_tokens=2)
    harness.clock.advance(6)
    turn = harness.submit(harness.facts(harness.prompt(3), "c", max_tokens=2), "c")
    assert listed(harness) == ["b"]
    harness.run(turn)
    harness.clock.advance(6)
    facts = harness.facts(harness.prompt(8), None, max_tokens=2)
    (output,) = harness.run(harness.submit(facts, "b"))
    assert output.token_ids == harness.expected(facts), "b had ended, and this is another one"
    assert set(listed(harness)) == {"b", "c"} and len(harness.history("b")) == 10
    harness.check_empty()


@pytest.mark.parametrize(("idle_s", "is_left"), [(10.0, True), (10.5, False)])
def test_a_conversation_may_be_idle_for_its_whole_time_to_live(idle_s, is_left):
    harness = Harness(small_config(idle_ttl_s=10.0))
    harness.turn("a", 8, max_tokens=2)
    harness.clock.advance(idle_s)
    harness.engine.expire_idle()
    assert listed(harness) == ["a"] * is_left
    assert harness.engine.stats()["num_live_conversations"] == is_left


def test_a_conversation_with_a_turn_in_progress_outlives_its_time_to_live():
    harness = Harness(small_config(idle_ttl_s=10.0))
    harness.turn("a", 8, max_tokens=2)
    facts = harness.facts(harness.prompt(20), "a", max_tokens=30)
    running = harness.submit(facts, "a")
    harness.step(2)
    harness.clock.advance(11)
    harness.engine.expire_idle()
    assert not running.done and harness.engine.stats()["num_live_conversations"] == 1
    (output,) = harness.run(running)
    assert output.token_ids == harness.expected(facts) and listed(harness) == ["a"]
    harness.check_empty()


def test_a_conversation_with_a_turn_in_progress_is_not_compared_with_a_shared_history(monkeypatch):
    """Another replica may have changed it; the turn's refusal is raised at its end."""
    harness = Harness()
    harness.turn("a", 8, max_tokens=2)
    running = harness.submit(harness.facts(harness.prompt(5, 1), "a", max_tokens=6), "a")
    harness.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(harness.store.inner, "is_shared", True)
        patch.setattr(harness.store.inner, "head", lambda _: "a turn of another replica")
        assert harness.engine.conversations.num_tokens("a") == 10
    harness.run(running)
    assert len(harness.history("a")) == 21
    harness.check_empty()


def test_conversations_without_kv_cache_stay_in_memory_while_their_turns_wait():
    """There are so many that the first turns' ends sweep conversations without KV cache."""
    harness = Harness()
    names = [f"conversation-{number}" for number in range(80)]
    facts = [
        harness.facts(harness.prompt(3, number), name, seed=number, max_tokens=2)
        for number, name in enumerate(names)
    ]
    turns = [harness.submit(one, name) for one, name in zip(facts, names, strict=True)]
    outputs = harness.run(*turns)
    for one, output in zip(facts, outputs, strict=True):
        assert output.token_ids == harness.expected(one)
    assert set(listed(harness)) == set(names)
    harness.check_empty()


@pytest.mark.parametrize("limits", [{"max_idle_conversations": 2}, {"idle_ttl_s": 10.0}])
def test_expired_conversations_are_found_without_a_listing(monkeypatch, limits):
    """Every submission checks, and there may be very many conversations."""
    harness = Harness(small_config(**limits))
    for name in "abc":
        harness.turn(name, 8, max_tokens=2)
        harness.clock.advance(6)
    with monkeypatch.context() as patch:
        patch.setattr(harness.store, "conversations", lambda: pytest.fail("all were listed"))
        harness.engine.expire_idle()
    assert listed(harness) == (["c", "b"] if "idle_ttl_s" not in limits else ["c"])
    harness.check_empty()


def test_a_conversation_survives_a_restart_of_the_engine(tmp_path):
    """A new engine on the same file recomputes the history, and continues as if nothing had happened."""
    path = tmp_path / "history.sqlite"
    first = Harness(path=path)
    for seed in range(3):
        first.turn("a", 20, seed=seed, max_tokens=4)
    history = first.history("a")
    first.engine.close()
    second = Harness(path=path)
    assert second.history("a") == history
    usage = second.turn("a", 6, seed=9, max_tokens=4).usage
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens, usage.prefilled_tokens) == (0, 71, 7)
    second.engine.close()


def test_the_stateless_engine_keeps_no_kv_cache():
    harness = Harness(small_config(stateful=False))
    harness.turn("a", 20, max_tokens=4)
    assert harness.engine.stats()["num_available_gpu_pages"] == 40
    usage = harness.turn("a", 5, seed=1, max_tokens=4).usage
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens, usage.prefilled_tokens) == (0, 23, 6)
    turn = harness.submit(harness.facts(harness.prompt(5), "a"), "a")
    harness.step(3)
    harness.engine.cancel(turn)
    assert harness.engine.stats()["num_available_gpu_pages"] == 40
    harness.check_empty()


def test_numpy_ids_are_ids():
    """A list of numpy integers is a prompt like any other."""
    harness = Harness()
    facts = harness.facts([np.int64(5), np.int32(7)], "a", max_tokens=3)
    (output,) = harness.run(harness.submit(facts, "a"))
    assert output.token_ids == harness.expected(facts) and harness.history("a")[:2] == (5, 7)
