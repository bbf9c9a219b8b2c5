"""SIGKILL of real generating processes: what was reported is there, and what comes after is right."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest

from model_defs import load_model, make_mesh
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference
from tests.kill.lives import NUM_MOMENTS, Death, Life, live, start_process
from tests.kill.process import MODEL, Task
from tests.kill.script import MAX_CONTEXT_TOKENS, NUM_LANES, Script, TurnKey
from tests.seeds import enough, new_seed

# Kills in `make test` are those of the server and of the history.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def context():
    """Processes are forked from one that has imported everything and touched no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pensieve_jax", "tests.kill.process"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the server takes no other path
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture(scope="module")
def unkilled(context, tmp_path_factory):
    """The marks of a process that nobody kills, and the cache of compiled programs that it fills."""
    cache_dir = tmp_path_factory.mktemp("compiled")
    process, pipe = start_process(context, Task(None, str(cache_dir), Script(0), "whole"))
    marks = []
    while not marks or marks[-1][0] != "finished":
        marks.append(pipe.recv())
    process.join()
    return marks, cache_dir


@pytest.fixture(scope="module")
def lives(context, unkilled, tmp_path_factory):
    """All lives, lived, of ten kills each. Whatever must hold after each death was asserted on the way."""
    seed = new_seed()
    marks, cache_dir = unkilled
    fingerprint = dict(mark for mark in marks if len(mark) == 2)["opening"]
    lives = [
        Life(
            context,
            tmp_path_factory.mktemp("life") / "chats.sqlite",
            cache_dir,
            fingerprint,
            seed=seed + i,
        )
        for i in range(enough(2, 5))
    ]
    live(lives, num_at_once=2)
    return lives


def test_kills_lose_nothing_that_was_reported(lives, record_property):
    """Each death was checked as it came; this is about how many there were, and that all went on."""
    deaths = [death for life in lives for death in life.deaths if death.moment is not None]
    assert len(deaths) == len(lives) * NUM_MOMENTS == 10 * len(lives)
    num_reported = sum(len(death.reports) for death in deaths)
    num_unreported = sum(len(death.committed) - len(death.reports) for death in deaths)
    record_property("note", f"{num_reported} turns reported, {num_unreported} more were committed")
    assert num_reported > 10 * len(lives)


def test_the_moments_are_spread_over_the_life_of_a_process(lives, record_property):
    """While starting, in the middle of turns, around commits, after reports, while closing."""
    deaths = [death for life in lives for death in life.deaths if death.moment is not None]
    counts = {
        "while starting": sum("ready" not in death.marks for death in deaths),
        "before the first report": sum(not death.reports for death in deaths),
        "later": sum(bool(death.reports) for death in deaths),
        "with turns in progress": sum(bool(death.unfinished) for death in deaths),
        "between the begin of a commit and its reports": sum(map(Death.is_at_commit, deaths)),
        "inside a transaction": sum("halted" in death.marks for death in deaths),
        "while closing": sum("closing" in death.marks for death in deaths),
    }
    num_groups = sum(len(group) > 1 for life in lives for death in life.deaths for group in death.announced)
    killed = ", ".join(f"{count} {when}" for when, count in counts.items())
    record_property("note", f"killed {killed}; {num_groups} commits of several turns")
    # Each is a third or less of what is usual.
    assert counts["while starting"] >= 0.6 * len(lives)
    assert counts["later"] >= 2 * len(lives)
    assert counts["with turns in progress"] >= 2 * len(lives)
    assert counts["between the begin of a commit and its reports"] >= 1
    assert counts["inside a transaction"] == counts["while closing"] == len(lives)


def test_all_turns_equal_the_reference(lives, record_property):
    """Over all deaths, greedy and seeded: the tokens of one model over whole sequences."""
    reference = DenseReference(
        load_model(MODEL, dtype="float32", mesh=make_mesh(1)), min_padded_tokens=MAX_CONTEXT_TOKENS
    )
    num_tokens = num_uncertain = 0
    for life in lives:
        history: list[int] = []
        for key in sorted(life.turns):
            history = [] if key.turn_index == 0 else history
            turn = life.turns[key]
            prompt_ids, output_ids = turn.prompt_token_ids, turn.output_token_ids
            params = life.script.turn(key).params
            replay = reference.replay_turn(history, prompt_ids, output_ids, params, turn.seed)
            assert replay.possible.all(), f"{key} of seed {life.script.seed}"
            num_tokens += len(output_ids)
            num_uncertain += int((replay.margins < MIN_MARGIN).sum())
            history += [*prompt_ids, *output_ids]
    record_property("note", f"{num_tokens} tokens, {num_uncertain} of them too close to call")
    assert num_uncertain < num_tokens / 100


def test_the_last_process_goes_on_where_the_killed_ones_stopped(lives):
    """It was not killed: one turn of every lane, on top of what was there, and all of it is kept."""
    for life in lives:
        last = life.deaths[-1]
        assert last.marks[-1] == "finished" and not last.unfinished
        assert len(last.reports) == NUM_LANES
        num_before = {key: index for key, index in (report.key for report in last.reports)}
        assert all(TurnKey(key, i) in life.turns for key, index in num_before.items() for i in range(index))
        # Nothing is resident after a start: whatever had a history had it computed again.
        assert all(bool(report.recomputed_tokens) == (report.key.turn_index > 0) for report in last.reports)


def test_state_leaves_the_device_on_the_way(lives, unkilled, record_property):
    """The engine of every life has no room for everything: it swaps, and drops.

    A life's first steps may end before anything comes back from the CPU; a process that nobody kills tells.
    """
    reports = [mark[1] for mark in unkilled[0] if mark[0] == "reported"]
    assert sum(report.swapped_in_tokens for report in reports) > 0
    assert sum(report.recomputed_tokens for report in reports) > 0
    reports = [report for life in lives for death in life.deaths for report in death.reports]
    num_recomputed = sum(report.recomputed_tokens for report in reports)
    num_swapped_in = sum(report.swapped_in_tokens for report in reports)
    record_property("note", f"{num_recomputed} tokens recomputed, {num_swapped_in} swapped in")
    assert num_recomputed > 0
