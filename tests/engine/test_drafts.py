"""Steps with drafts: the tokens are those without, whatever holds, and whatever happens to their turns."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from pensieve_jax.config import SchedulerConfig
from pensieve_jax.core.errors import ConfigError, StepFailedError
from tests.engine.draft_mutations import DRAFT_MUTATIONS
from tests.engine.draft_oracle import plant_oracle
from tests.engine.driver import run_scenario
from tests.engine.fake_runner import dense_continuation
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import FakeBench
from tests.engine.scenarios import drafting_scenario
from tests.engine.test_late_rows import Residues
from tests.engine.tree_scenarios import run_tree_scenario
from tests.seeds import enough

LEAST = {  # in 1,000
    "num_draft_steps": 3000,
    "num_draft_tokens": 10_000,
    "num_accepted_draft_tokens": 5_000,
    "num_turns_with_drafts_that_held": 500,
    "num_suspensions": 10,
    "num_swapped_in_chunks": 40,
}


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))])
def test_random_schedules_have_the_same_tokens_with_drafts(part: int) -> None:
    """Evictions, copies, suspensions, forks, cancellations and failures; TESTS_ALL=1 runs 20,000."""
    num, totals = enough(1000, 20_000) // 4, Counter[str]()
    for seed in range(part * num, (part + 1) * num):
        try:
            totals += run_scenario(drafting_scenario(seed)).totals
        except BaseException:
            print(f"failed: run_scenario(drafting_scenario({seed}))")
            raise
    print(dict(totals))
    least = {name: count * num / 1000 for name, count in LEAST.items()}
    rare = {name: totals[name] for name in least if totals[name] < least[name]}
    assert not rare, f"{rare} is less than {least}"


def test_random_trees_of_turns_have_the_same_tokens_with_drafts() -> None:
    """Turns fork branches that run, and whose drafts were rejected."""
    totals = Counter[str]()
    for seed in range(100, 100 + enough(12, 2000)):
        totals += run_tree_scenario(seed, drafts=True)
    print(dict(totals))
    assert totals["num_accepted_draft_tokens"] > 20 and totals["forked"] > 20


def drafting_harness(max_draft_tokens: int = 8, **config: object) -> Harness:
    """Return an engine with the option on."""
    made = small_config(**config)
    scheduler = dataclasses.replace(made.scheduler, speculation="history", max_draft_tokens=max_draft_tokens)
    return Harness(dataclasses.replace(made, scheduler=scheduler))


def check_turns_beside_masks() -> None:
    """Turns with biases, with masks that follow their ids, and that may end early: all in one batch."""
    with pytest.MonkeyPatch.context() as patch:
        plant_oracle(patch, FakeBench(), 5)
        for seed in range(8):
            harness, turns = drafting_harness(), []
            options = (
                {},
                {"logit_bias": {5: 2.0, 900: -4.0}},
                {"ignore_eos": False, "min_tokens": 4},
                {"min_tokens": 3},
                {"min_tokens": 6, "temperature": 0.0},
                {"frequency_penalty": 0.5},
            )
            for number, params in enumerate(options):
                for has_row in (False, True) if not params else (False,):
                    name = f"c{number}{has_row}"
                    params = {"temperature": 0.7, "max_tokens": 14, "logprobs": 1} | params
                    facts = harness.facts(
                        harness.prompt(9 + number, 31 * seed + number), name, seed + number, **params
                    )
                    if "min_tokens" in params:  # it ends with the first id that may end it
                        stop_id = harness.expected(facts)[params["min_tokens"] :][:1]
                        facts = dataclasses.replace(
                            facts, params=dataclasses.replace(facts.params, stop_token_ids=stop_id)
                        )
                    turn = harness.submit(facts, name)
                    if has_row:
                        harness.engine._drafter.drop(turn.request)
                        harness.engine._late_rows.add(turn.request, Residues())
                    turns.append((turn, facts, Residues() if has_row else None))
            harness.drain()
            for turn, facts, row in turns:
                expected = dense_continuation(
                    facts.prompt, facts.params, facts.seed, 14, facts.may_end, row
                ).token_ids
                assert list(turn.result().token_ids) == expected, facts
            assert harness.engine.stats()["num_accepted_draft_tokens"] > 0
            harness.check_empty()


def test_drafts_beside_masks_biases_and_early_ends_change_no_token() -> None:
    check_turns_beside_masks()


def test_accepted_tokens_are_those_of_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft has behind the end of a reply holds as well, but does not belong to the reply."""
    num_behind = 0
    for seed in range(30):
        plant_oracle(monkeypatch, FakeBench(), seed)
        harness = drafting_harness()
        facts = harness.facts(harness.prompt(9, seed), seed=seed, max_tokens=20, min_tokens=6)
        stop_ids = harness.expected(facts)[6 + seed % 3 :][:1]
        facts = dataclasses.replace(facts, params=dataclasses.replace(facts.params, stop_token_ids=stop_ids))
        turn = harness.submit(facts)
        rows: list[int] = []
        accept = harness.engine._drafter.accept
        monkeypatch.setattr(
            harness.engine._drafter,
            "accept",
            lambda request, position, ids, rows=rows, accept=accept: (
                rows.append(len(ids)),
                accept(request, position, ids),
            ),
        )
        (output,) = harness.run(turn)
        num_tokens = len(output.token_ids)
        before, last = sum(rows[:-1]), rows[-1]
        expected = before - len(rows[:-1]) + min(num_tokens - before, last - 1)
        assert harness.engine.stats()["num_accepted_draft_tokens"] == expected, seed
        num_behind += max(last - 1 - (num_tokens - before), 0)
    assert num_behind > 10, "too few drafts passed the end of a reply"


@pytest.mark.parametrize("name", DRAFT_MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above show that nothing fails without the bug."""
    DRAFT_MUTATIONS[name](monkeypatch)
    with pytest.raises((AssertionError, ValueError, LookupError)):
        for seed in range(1, 25):
            run_scenario(drafting_scenario(seed))
        check_turns_beside_masks()


@pytest.mark.parametrize("place", ["launch", "choose", "fetch"])
def test_a_failed_step_with_drafts_loses_its_turns_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_oracle(monkeypatch, FakeBench(), 3)
    harness = drafting_harness()
    before = harness.turn("a", 20, seed=1, max_tokens=9)
    facts = harness.facts(harness.prompt(5, 2), "a", max_tokens=30)
    turn = harness.submit(facts, "a")
    while (step := harness.engine._loop.in_flight) is None or not step.num_drafts:
        harness.step()
    harness.runner.faults[place] = lambda: StepFailedError("the device failed")
    harness.drain()
    assert isinstance(turn.error, StepFailedError) and len(before.token_ids) == 9
    (again,) = harness.run(harness.submit(facts, "a"))
    assert again.token_ids == harness.expected(facts)
    harness.check_empty()


def test_drafts_find_what_the_conversation_said_before() -> None:
    """The index itself, without an oracle: the prompt has the reply that the model will give."""
    harness = drafting_harness()
    params = {"max_tokens": 40, "temperature": 0.0}
    for number in range(20):  # a random model repeats nothing, so its next tokens stand in another branch
        prompt = harness.prompt(30, seed=number)
        reply = harness.expected(harness.facts(prompt, seed=number, **params))
        facts = harness.facts(prompt, seed=number, **params)
        turn = harness.submit(facts)
        harness.engine._drafter._rows[turn.request].related = [list(reply)]
        (output,) = harness.run(turn)
        assert output.token_ids == reply
    stats = harness.engine.stats()
    assert stats["num_accepted_draft_tokens"] > 20 * 20 and stats["num_draft_steps"] < 20 * 8
    harness.check_empty()


def test_without_repetitions_no_step_waits() -> None:
    """A random model's reply repeats nothing, so no step waits for the ids of the one before."""
    harness = drafting_harness()
    harness.turn("a", 50, seed=1, max_tokens=40)
    assert harness.engine.stats()["num_draft_steps"] == 0
    events = harness.runner.events
    assert all(events.index(("choose", n + 1)) < events.index(("fetch", n)) for n in range(39))


def test_the_number_of_drafted_tokens_is_checked() -> None:
    for number, speculation in ((0, "history"), (33, "history"), (True, "history"), (4, "off")):
        with pytest.raises(ConfigError, match="max_draft_tokens"):
            SchedulerConfig(speculation=speculation, max_draft_tokens=number)
    with pytest.raises(ConfigError, match="speculation"):
        SchedulerConfig(speculation="on")
    assert SchedulerConfig(speculation="history").draft_limit == 8 and SchedulerConfig().draft_limit == 0
    assert SchedulerConfig(speculation="history", max_num_running=4).sample_limit == 36
    assert SchedulerConfig(speculation="history", max_num_running=64).sample_limit == 128
    assert SchedulerConfig(speculation="history", max_num_running=256).sample_limit == 256
    assert SchedulerConfig(max_num_running=64).sample_limit == 64
