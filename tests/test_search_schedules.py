"""Tests of the search for wrong answers: its tasks, sums and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from pensieve_jax import ConfigError
from tests import search_schedules
from tests.search_schedules import Found, Mode, Task, parse_shard, search, tasks


@pytest.fixture
def ends(monkeypatch):
    """Errors by seed of a mode whose schedules take no time."""
    ends = {}

    def run_one(seed):
        if seed in ends:
            raise ends[seed]
        return Counter(turns=3)

    monkeypatch.setitem(search_schedules.MODES, "instant", Mode(lambda: run_one))
    return ends


def seeds_of(task):
    return [task.start + number * task.stride for number in range(task.num)]


@pytest.mark.parametrize("num", [1, 7, 20])
@pytest.mark.parametrize("num_processes", [1, 2, 5])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_seed_of_every_mode_is_run_once(num, num_processes, num_shards):
    found = Counter(
        (task.mode, seed)
        for k in range(1, num_shards + 1)
        for task in tasks(
            ["tiers", "trees"],
            first_seed=5,
            num=num,
            shard=(k, num_shards),
            max_s=1.0,
            num_processes=num_processes,
        )
        for seed in seeds_of(task)
    )
    assert found == Counter((mode, seed) for mode in ("tiers", "trees") for seed in range(5, 5 + num))


@pytest.mark.parametrize(("num_processes", "num_tasks"), [(2, 3), (3, 3), (7, 6)])
def test_modes_share_the_time_of_all_processes(num_processes, num_tasks):
    found = tasks(["a", "b", "c"], first_seed=0, num=None, max_s=60.0, num_processes=num_processes)
    assert len(found) == num_tasks
    assert sum(task.max_s for task in found) == pytest.approx(60.0 * num_processes)
    assert len({task.max_s for task in found}) == 1


def test_a_wrong_answer_is_reported_and_the_search_goes_on(ends):
    ends[4] = AssertionError("token 3 should be 5")
    found = search(Task("instant", 0, 2, 4, 100.0))  # seeds 0, 2, 4, 6
    assert found == Found(4, Counter(turns=9), {4: "token 3 should be 5"})
    assert found + Found(1, Counter(turns=1), {7: "x"}) == Found(
        5, Counter(turns=10), {4: ends[4].args[0], 7: "x"}
    )


def test_another_error_ends_the_search_and_names_the_schedule(ends):
    ends[1] = ValueError("the search's own")
    with pytest.raises(ValueError, match="own") as raised:
        search(Task("instant", 0, 1, 3, 100.0))
    assert raised.value.__notes__ == ["in the schedule of mode instant, seed 1"]


def test_a_search_without_time_runs_one_schedule(ends):
    """Compiling may take all of a mode's time, and a mode that ran nothing must not pass."""
    assert search(Task("instant", 0, 1, None, -1.0)).num == 1


def test_rare_events_are_reported_as_a_doubt_once_enough_ran():
    mode = Mode(lambda: Counter, {"drops": 100.0}, {("uncertain", "turns"): 0.1})
    few = "drops happened 4 times, less than 5"
    many = "uncertain are 23 of 100 turns, more than 10.0%"
    counts = Counter(drops=4, turns=100, uncertain=23)
    assert Found(99, counts, {}).doubts(mode) == [many]
    assert Found(100, counts, {}).doubts(mode) == [few, many]
    assert Found(100, Counter(drops=4, turns=99, uncertain=90), {}).doubts(mode) == [few]
    assert Found(100, Counter(drops=5, turns=100, uncertain=22), {}).doubts(mode) == []
    assert Found(100, Counter(drops=5, turns=10_000, uncertain=1130), {}).doubts(mode) != []


def test_a_shard_is_k_of_n():
    assert parse_shard("2/8") == (2, 8)


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "-1/3", "a/b", "1/2/3"])
def test_an_invalid_shard_is_refused(text):
    with pytest.raises(ConfigError, match="--shard"):
        parse_shard(text)


@pytest.mark.long
def test_a_search(tmp_path):
    """Two schedules each of two modes that compile nothing, in a process of its own, and its document.

    The search of `.ci/run` has every mode, real models too.
    """
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.search_schedules", "--modes=tiers,trees", "--num_schedules=2"]
    done = subprocess.run(
        [*command, "--first_seed=5", "--num_processes=1", f"--json={path}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document == json.loads(done.stdout.splitlines()[-1])
    assert set(document["results"]["modes"]) == {"tiers", "trees"}
    for found in document["results"]["modes"].values():
        assert (found["num_schedules"], found["failures"], found["doubts"]) == (2, {}, [])
        assert found["counts"]["turns"] > 10
