"""SIGKILL of real generating processes: what was reported is there, and what follows is right."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest

from model_defs import load_model, make_mesh
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference
from tests.kill.process import MODEL, Task
from tests.kill.restart_schedule import NUM_MOMENTS, ProcessRun, RestartSchedule, run_schedules, start_process
from tests.kill.script import MAX_CONTEXT_TOKENS, NUM_LANES, Script, TurnKey
from tests.seeds import enough, new_seed

# Kills in `make test` are those of the server and of the history.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def context():
    """Return a context that forks processes from one that has imported everything and touched no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pensieve_jax", "tests.kill.process"])
    with pytest.MonkeyPatch.context() as patch:
        # the fork server takes no other path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture(scope="module")
def unkilled(context, tmp_path_factory):
    """Return the marks of a process that is not killed, and the compilation cache that it fills."""
    cache_dir = tmp_path_factory.mktemp("compiled")
    process, pipe = start_process(context, Task(None, str(cache_dir), Script(0), "whole"))
    marks = []
    while not marks or marks[-1][0] != "finished":
        marks.append(pipe.recv())
    process.join()
    return marks, cache_dir


@pytest.fixture(scope="module")
def schedules(context, unkilled, tmp_path_factory):
    """Run all schedules of ten kills each; each run is checked when it ends."""
    seed = new_seed()
    marks, cache_dir = unkilled
    fingerprint = dict(mark for mark in marks if len(mark) == 2)["opening"]
    schedules = [
        RestartSchedule(
            context,
            tmp_path_factory.mktemp("schedule") / "chats.sqlite",
            cache_dir,
            fingerprint,
            seed=seed + i,
        )
        for i in range(enough(2, 5))
    ]
    run_schedules(schedules, num_at_once=2)
    return schedules


def test_kills_lose_nothing_that_was_reported(schedules, record_property):
    """Each run was checked when it came; this checks their number, and that all schedules continued."""
    runs = [run for schedule in schedules for run in schedule.runs if run.moment is not None]
    assert len(runs) == len(schedules) * NUM_MOMENTS == 10 * len(schedules)
    num_reported = sum(len(run.reports) for run in runs)
    num_unreported = sum(len(run.committed) - len(run.reports) for run in runs)
    record_property("note", f"{num_reported} turns reported, {num_unreported} more were committed")
    assert num_reported > 10 * len(schedules)


def test_the_moments_of_kills_are_spread_over_a_processs_run(schedules, record_property):
    """They fall on startup, in turns, around commits, after reports, and on closing."""
    runs = [run for schedule in schedules for run in schedule.runs if run.moment is not None]
    counts = {
        "while starting": sum("ready" not in run.marks for run in runs),
        "before the first report": sum(not run.reports for run in runs),
        "later": sum(bool(run.reports) for run in runs),
        "with turns in progress": sum(bool(run.unfinished) for run in runs),
        "between the begin of a commit and its reports": sum(map(ProcessRun.is_at_commit, runs)),
        "inside a transaction": sum("halted" in run.marks for run in runs),
        "while closing": sum("closing" in run.marks for run in runs),
    }
    num_groups = sum(
        len(group) > 1 for schedule in schedules for run in schedule.runs for group in run.announced
    )
    killed = ", ".join(f"{count} {when}" for when, count in counts.items())
    record_property("note", f"killed {killed}; {num_groups} commits of several turns")
    # Each limit is at most a third of the usual number.
    assert counts["while starting"] >= 0.6 * len(schedules)
    assert counts["later"] >= 2 * len(schedules)
    assert counts["with turns in progress"] >= 2 * len(schedules)
    assert counts["between the begin of a commit and its reports"] >= 1
    assert counts["inside a transaction"] == counts["while closing"] == len(schedules)


def test_all_turns_equal_the_reference(schedules, record_property):
    """Over all runs, greedy and seeded tokens equal those of one model over whole sequences."""
    reference = DenseReference(
        load_model(MODEL, dtype="float32", mesh=make_mesh(1)), min_padded_tokens=MAX_CONTEXT_TOKENS
    )
    num_tokens = num_uncertain = 0
    for schedule in schedules:
        history: list[int] = []
        for key in sorted(schedule.turns):
            history = [] if key.turn_index == 0 else history
            turn = schedule.turns[key]
            prompt_ids, output_ids = turn.prompt_token_ids, turn.output_token_ids
            params = schedule.script.turn(key).params
            replay = reference.replay_turn(history, prompt_ids, output_ids, params, turn.seed)
            assert replay.possible.all(), f"{key} of seed {schedule.script.seed}"
            num_tokens += len(output_ids)
            num_uncertain += int((replay.margins < MIN_MARGIN).sum())
            history += [*prompt_ids, *output_ids]
    record_property("note", f"{num_tokens} tokens, {num_uncertain} of them too close to call")
    assert num_uncertain < num_tokens / 100


def test_the_last_process_continues_where_the_killed_ones_stopped(schedules):
    """It was not killed: it adds one turn to every lane, and all of it is stored."""
    for schedule in schedules:
        last = schedule.runs[-1]
        assert last.marks[-1] == "finished" and not last.unfinished
        assert len(last.reports) == NUM_LANES
        num_before = {key: index for key, index in (report.key for report in last.reports)}
        assert all(
            TurnKey(key, i) in schedule.turns for key, index in num_before.items() for i in range(index)
        )
        # Nothing is resident after a start: every conversation with a history recomputed it.
        assert all(bool(report.recomputed_tokens) == (report.key.turn_index > 0) for report in last.reports)


def test_chunks_leave_the_device_on_the_way(schedules, unkilled, record_property):
    """The engine has no room for everything: it swaps, and drops.

    The first steps after a start may end before anything comes back from the CPU; the process that is not
    killed shows it.
    """
    reports = [mark[1] for mark in unkilled[0] if mark[0] == "reported"]
    assert sum(report.swapped_in_tokens for report in reports) > 0
    assert sum(report.recomputed_tokens for report in reports) > 0
    reports = [report for schedule in schedules for run in schedule.runs for report in run.reports]
    num_recomputed = sum(report.recomputed_tokens for report in reports)
    num_swapped_in = sum(report.swapped_in_tokens for report in reports)
    record_property("note", f"{num_recomputed} tokens recomputed, {num_swapped_in} swapped in")
    assert num_recomputed > 0
