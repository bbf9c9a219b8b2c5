"""The longer search by itself: what it hands out, adds up, and does about a wrong answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.engine import search_lives


@pytest.fixture
def lives(monkeypatch):
    """Of every seed a life that takes no time; what it ends with is set by seed."""
    bench = SimpleNamespace(num_turns=0, uncertain=[], num_logprobs=0, num_far=0)
    ends = {}

    def run_scenario(seed, bench):
        bench.num_turns += 3
        bench.num_logprobs += 2
        if seed in ends:
            raise ends[seed]
        return SimpleNamespace(totals=Counter(reused_gpu_tokens=5, others=1))

    monkeypatch.setattr(search_lives, "bench_for", lambda *_: bench)
    monkeypatch.setattr(search_lives, "real_scenario", lambda seed, _: seed)
    monkeypatch.setattr(search_lives, "run_scenario", run_scenario)
    return ends


@pytest.mark.parametrize("num", [1, 20, 21, 60])
def test_every_seed_is_somebodys_task(num):
    assert [seed for some in search_lives.tasks(range(7, 7 + num)) for seed in some] == list(
        range(7, 7 + num)
    )


def test_a_wrong_answer_is_told_and_the_search_goes_on(lives):
    lives[4] = AssertionError("token 3 should be 5")
    found = [search_lives.search("llama-tiny", "int8", range(start, start + 3)) for start in (0, 3)]
    assert [one.failures for one in found] == [{}, {4: "token 3 should be 5"}]
    counts = found[0].counts + found[1].counts
    assert counts == Counter(num_lives=6, num_turns=18, num_log_probabilities=12, reused_gpu_tokens=25)


def test_what_is_no_wrong_answer_ends_it_and_names_the_life(lives):
    lives[1] = ValueError("the search's own")
    with pytest.raises(ValueError, match="own") as raised:
        search_lives.search("llama-tiny", None, range(3))
    assert raised.value.__notes__ == ["in the life of seed 1"]


@pytest.mark.long
def test_a_search(tmp_path):
    """Two lives, in processes of their own."""
    path = tmp_path / "lives.json"
    command = [sys.executable, "-m", "tests.engine.search_lives", "--kv_dtype=int8", "--num_lives=2"]
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
    results = document["results"]
    assert (results["num_lives"], results["failures"], results["was_cut"]) == (2, {}, False)
    assert results["num_turns"] > 10
