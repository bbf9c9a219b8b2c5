"""Engines that share a history in Postgres: how one's changes affect what another has in memory."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import (
    ConversationChangedError,
    HistoryUnavailableError,
    InvalidRequestError,
)
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from tests.engine.harness import Harness

pytest.importorskip("psycopg", reason="needs the extra `postgres`")


@pytest.fixture
def replicas(postgres):
    url = postgres.url()
    one, other = Harness(path=url), Harness(path=url)
    yield one, other
    for harness in (one, other):
        harness.store.inner.close()


def said(harness, name="a"):
    return harness.engine.conversations.record(name).token_ids.tolist()


def in_memory(harness, name="a"):
    return harness.engine.conversations.get(name).conversation.token_ids


def test_a_conversation_moves_to_the_other_engine_and_back(replicas):
    one, other = replicas
    for seed, harness in enumerate((one, other, one, one, other)):
        harness.turn("a", 7, seed=seed, max_tokens=3)
        assert said(one) == said(other) == list(in_memory(harness))
        harness.engine.check_integrity()
    assert len(said(one)) == 50
    output = other.turn("a", 4, seed=9, max_tokens=2)
    assert output.usage.recomputed_tokens == 0, "an unchanged conversation is reused"


def test_one_of_two_simultaneous_turns_is_refused_and_can_be_repeated(replicas):
    one, other = replicas
    one.turn("a", 7, max_tokens=3)
    other.turn("a", 7, seed=1, max_tokens=3)
    turns = [
        harness.submit(harness.facts(harness.prompt(5, 2), "a", max_tokens=3), "a") for harness in replicas
    ]
    one.run(turns[0])
    while not turns[1].done:
        other.engine.step()
    assert isinstance(turns[1].error, ConversationChangedError)
    other.engine.check_integrity()
    assert len(said(other)) == 28
    other.turn("a", 4, seed=3, max_tokens=2)
    assert said(one) == list(in_memory(other)) and len(said(one)) == 34


def test_cuts_forks_and_ends_of_another_engine_are_noticed(replicas):
    one, other = replicas
    one.turn("a", 7, max_tokens=3)
    other.turn("a", 7, seed=1, max_tokens=3)
    one.engine.truncate("a", 15)  # the conversation is not in this engine's memory
    assert said(one) == said(other) and len(said(one)) == 15
    one.engine.fork("a", "b")
    other.turn("b", 4, seed=2, max_tokens=2)
    one.turn("b", 4, seed=3, max_tokens=2)
    assert said(one, "b")[:15] == said(one) and len(said(one, "b")) == 27
    one.turn("a", 4, seed=4, max_tokens=2)
    other.engine.end("a")
    one.turn("a", 4, seed=5, max_tokens=2)
    assert said(other) == list(in_memory(one)) and len(said(one)) == 6
    for harness in replicas:
        harness.engine.check_integrity()


def test_a_turn_whose_conversation_exceeds_postgres_limits_is_refused_before_it_runs(replicas):
    """Its reply could not be stored, and was once lost at its end."""
    one, _ = replicas
    name = "\u4e2d" * 667
    assert len(name.encode()) == 2001
    with pytest.raises(InvalidRequestError, match=r"^conversation_id .* at most 2000 bytes"):
        one.submit_all([TurnSpec((1, 2, 3), SamplingParams(), name)])
    assert not one.engine.has_unfinished
    one.turn(name[1:], 7, max_tokens=3)


def test_if_postgres_is_away_at_a_turns_end_only_that_turn_is_lost(replicas, postgres):
    one, _ = replicas
    one.turn("a", 7, max_tokens=3)
    turn = one.submit(one.facts(one.prompt(5, 1), "a", max_tokens=3), "a")
    postgres.stop()
    try:
        while not turn.done:
            one.engine.step()
        assert isinstance(turn.error, HistoryUnavailableError)
        with pytest.raises(HistoryUnavailableError):
            one.submit(one.facts(one.prompt(5, 1), "a", max_tokens=3), "a")
    finally:
        postgres.start()
    one.engine.check_integrity()
    one.turn("a", 5, seed=2, max_tokens=3)
    assert len(said(one)) == 18
