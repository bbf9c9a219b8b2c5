"""Batches that are not unified: a step holds prompts and recomputation, or decodes; none starves."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.harness import Harness, small_config
from tests.scheduler.helpers import SchedulerHarness


def split_phases(**config) -> SchedulerHarness:
    """Return a harness whose scheduler pauses decodes for prompts."""
    return SchedulerHarness(unified=False, **config)


def test_decodes_pause_while_a_prompt_is_computed():
    harness = split_phases()
    harness.add("a", 10)
    harness.step()
    harness.step()
    harness.add("b", 100)
    for _ in range(4):
        harness.step()
    assert harness.steps == [
        [("a", 0, 10, True)],
        [("a", 10, 11, True)],
        [("b", 0, 64, False)],
        [("b", 64, 100, True)],
        [("a", 11, 12, True), ("b", 100, 101, True)],
        [("a", 12, 13, True), ("b", 101, 102, True)],
    ]


def test_decodes_pause_while_history_is_recomputed():
    harness = split_phases()
    harness.add("a", 10, max_tokens=9)
    harness.step()
    harness.conversation("back", 161, 0, 1, 4)
    harness.add("back", 3)
    for _ in range(2):
        harness.step()
    assert harness.steps[1] == [
        ("back", 0, 32, False),
        ("back", 64, 80, False),
        ("back", 160, 164, True),
    ]
    assert harness.steps[2] == [("a", 10, 11, True), ("back", 164, 165, True)]


def test_decoding_continues_while_no_request_can_join():
    harness = split_phases(max_num_running=2)
    for name in "ab":
        harness.add(name, 5, max_tokens=3)
    harness.step()
    harness.add("c", 5, max_tokens=1)
    for _ in range(3):
        harness.step()
    assert [{name for name, *_ in step} for step in harness.steps] == [
        {"a", "b"},
        {"a", "b"},
        {"a", "b"},
        {"c"},
    ]


def test_a_stream_of_prompts_pauses_decodes_only_until_the_batch_is_full():
    """Every step brings a prompt that fills one step; each paused decode waits for two of them."""
    harness = split_phases(max_num_running=3)
    first = harness.add("first", 5, max_tokens=5)
    harness.step()
    for number in range(12):
        harness.add(f"prompt {number}", 64, max_tokens=2)
        harness.step()
    decodes = [
        index for index, step in enumerate(harness.steps) if ("first",) in [grant[:1] for grant in step]
    ]
    assert decodes == [0, 3, 6, 9, 12] and first.exhausted
    for index in decodes[1:]:
        assert all(end - start == 1 for _, start, end, _ in harness.steps[index])


@pytest.mark.parametrize("cpu_pages", [0, 24])
def test_every_token_is_right_when_memory_is_short(cpu_pages):
    config = small_config(gpu_pages=24, cpu_pages=cpu_pages)
    scheduler = dataclasses.replace(config.scheduler, unified=False)
    harness = Harness(dataclasses.replace(config, scheduler=scheduler))
    for seed in range(3):
        facts = {
            name: harness.facts(harness.prompt(20 + 9 * i, seed), name, seed, max_tokens=12 + i)
            for i, name in enumerate("abcdef")
        }
        outputs = harness.run(*(harness.submit(fact, name) for name, fact in facts.items()))
        for fact, output in zip(facts.values(), outputs, strict=True):
            harness.bench.check_tokens(fact, output.token_ids, whole=True)
    kinds = [
        {grant.request in step.admitted or grant.end - grant.start > 1 for grant in step.grants}
        for step in harness.scheduled
    ]
    assert {True} in kinds and {False} in kinds and {True, False} not in kinds
    assert sum(len(step.drops) for step in harness.scheduled) > 0


@pytest.mark.parametrize(("num_missing", "is_admitted"), [(63, True), (64, False)])
def test_admission_does_not_count_the_tokens_of_paused_decodes(num_missing, is_admitted):
    harness = split_phases(max_num_running=8)
    for index in range(3):
        harness.add(f"decode{index}", 1, max_tokens=50)
    harness.step()
    harness.add("long", 64 + num_missing, max_tokens=1)
    harness.step()
    late = harness.add("late", 1)
    assert harness.step().admitted == ((late,) if is_admitted else ())
