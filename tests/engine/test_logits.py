"""Logits that are not finite: their turn fails, others continue, and its KV cache is not used."""

from __future__ import annotations

import math
import random

import pytest

from pensieve_jax.cache.drops import DropReason
from pensieve_jax.core.errors import LogitsError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.turn import Turn
from tests.engine.driver import run_scenario
from tests.engine.harness import Harness, small_config
from tests.engine.observed import ObservedRunner
from tests.engine.scenarios import random_scenario
from tests.engine.trees import Forest
from tests.seeds import new_seed

CHUNK = 16


def break_logits(harness: Harness, turn: Turn, num_tokens: int = 0, value: float = math.nan) -> None:
    """Make the logits of a turn not finite, from the token after `num_tokens` on."""
    finish = harness.engine._finish

    def broken(step, result, accepted):
        for row, grant in enumerate(step.sampling):
            if grant.request is turn.request and len(turn.token_ids) >= num_tokens:
                result.logprobs[row] = value
        return finish(step, result, accepted)

    harness.engine._finish = broken


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 7])
def test_one_turn_fails_alone_and_can_be_sent_again(num_tokens, value):
    harness = Harness()
    harness.turn("a", 40, seed=1, max_tokens=5)
    harness.turn("b", 20, seed=2, max_tokens=5)
    facts = [harness.facts(harness.prompt(9, seed=i), name, max_tokens=8) for i, name in enumerate("ab", 3)]
    bad, good = (harness.submit(one, name) for one, name in zip(facts, "ab", strict=True))
    break_logits(harness, bad, num_tokens, value)
    harness.drain()
    with pytest.raises(LogitsError, match=f"after {num_tokens} tokens") as caught:
        bad.result()
    assert caught.value.num_tokens == num_tokens and bad.output is None
    assert good.result().token_ids == harness.expected(facts[1])
    assert harness.history("a") == facts[0].history
    stats = harness.engine.stats()
    assert (stats["num_logits_errors"], stats["num_turns_failed"]) == (1, 1)
    (again,) = harness.run(harness.submit(facts[0], "a"))
    assert again.token_ids == harness.expected(facts[0])
    assert again.usage.reused_gpu_tokens == again.usage.swapped_in_tokens == 0, "old state was used"
    harness.check_empty()


def test_dropped_chunks_say_why():
    harness = Harness()
    harness.turn("a", 40, seed=1, max_tokens=5)
    facts = harness.facts(harness.prompt(9), "a", max_tokens=8)
    turn = harness.submit(facts, "a")
    break_logits(harness, turn)
    harness.drain()
    reasons = {chunk.drop and chunk.drop.reason for chunk in harness.engine.explain("a").chunks[:2]}
    assert reasons == {DropReason.NOT_FINITE}


@pytest.mark.parametrize("is_running", [False, True])
def test_a_trunk_is_dropped_unless_another_turn_uses_it(is_running):
    """The turn may have recomputed the trunk."""
    harness = Harness(small_config(gpu_pages=40))
    harness.turn("a", 5 * CHUNK, seed=1, max_tokens=CHUNK + 3)
    harness.engine.fork("a", "b")
    names = "ab" if is_running else "a"
    facts = [harness.facts(harness.prompt(9, seed=i), name, max_tokens=8) for i, name in enumerate(names)]
    turns = [harness.submit(one, name) for one, name in zip(facts, names, strict=True)]
    break_logits(harness, turns[0], 2)
    harness.drain()
    assert isinstance(turns[0].error, LogitsError)
    if is_running:
        assert turns[1].result().token_ids == harness.expected(facts[1])
    output = harness.turn("b", 5, seed=7, max_tokens=3)
    assert (output.usage.reused_gpu_tokens > 0) == is_running
    harness.turn("a", 5, seed=8, max_tokens=3)
    harness.check_empty()


def test_one_choice_of_several_fails_alone():
    """They share the prompt's chunks, which the first to run computes."""
    forest = Forest(Harness(small_config(gpu_pages=40)))
    parent = forest.turn(None, 20)
    sent = forest.send(parent, 50, number=3, temperature=1.0)
    break_logits(forest.harness, sent[0].turn)
    forest.harness.drain()
    assert isinstance(sent[0].turn.error, LogitsError)
    for one in sent[1:]:
        forest.check(one, one.turn.result().token_ids)
    forest.turn(parent, 5, seed=9)
    forest.harness.check_empty()


def test_a_one_off_turn_and_a_first_turn_leave_nothing():
    harness = Harness()
    for name in (None, "new"):
        facts = harness.facts(harness.prompt(40), name, max_tokens=8)
        turn = harness.submit(facts, name)
        break_logits(harness, turn, 3)
        harness.drain()
        assert isinstance(turn.error, LogitsError)
    assert harness.engine.conversations.listing() == []
    harness.check_empty()


def test_a_turn_fails_whose_reply_ends_with_other_turns_in_the_same_step():
    """The last token by length has left the batch already when its logits are read."""
    harness = Harness()
    facts = [harness.facts(harness.prompt(9, seed=i), None, max_tokens=4) for i in range(3)]
    turns = harness.submit_all([TurnSpec(one.prompt, one.params) for one in facts])
    break_logits(harness, turns[1], 3)
    harness.drain()
    assert [type(turn.error) for turn in turns] == [type(None), LogitsError, type(None)]
    for turn, one in zip(turns[::2], facts[::2], strict=True):
        assert turn.result().token_ids == harness.expected(one)
    harness.check_empty()


def test_random_scenarios_with_rows_that_are_not_finite(monkeypatch):
    """Rows of random steps fail, whether their turns are suspended, cancelled or ended meanwhile."""
    seed = new_seed()
    rng = random.Random(seed)
    num_broken = 0
    fetch = ObservedRunner.fetch

    def broken(self, handle):
        nonlocal num_broken
        result = fetch(self, handle)
        for row in range(len(result.logprobs)):
            if rng.random() < 0.02:
                result.logprobs[row] = math.nan
                num_broken += 1
        return result

    monkeypatch.setattr(ObservedRunner, "fetch", broken)
    for _ in range(10):
        run_scenario(random_scenario(rng.randrange(10**6)))
    assert num_broken
