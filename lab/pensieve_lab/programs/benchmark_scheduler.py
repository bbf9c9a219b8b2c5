"""Times how long the host takes to schedule and lay out a step, without a device.

    python -m pensieve_lab.programs.benchmark_scheduler [--num_running=256 \\
        --versus=../a-checkout-of-another-revision]

The real engine, scheduler, cache, planner and tile builder run on a runner that computes nothing: it returns
made-up ids and records when it was called. `schedule + plan` is the time from the start of `Engine.step` to
the dispatch of the step; `tiles` is its part for the kernel's tile list; `finish` is the rest of the step
(ids into turns, commits). Three loads:
  decode            every request decodes one token;
  mixed             replies end and turns of idle conversations arrive all the time, in a pool so small that
                    idle conversations lose chunks and returning ones recompute;
  mixed, two tiers  the same with host memory for 40 % of the idle conversations: chunks move both ways and
                    are dropped.
All times are CPU time of the one working thread; wall-clock times are printed beside them. A load runs in
`--num_rounds` processes, one after the other, in which every step makes the same decisions. The minimum over
the rounds counts for each step, because delays on a shared host vary. With `--versus` each round also runs
with the code of that checkout, in alternation, and the document has its times as `before`. Prints a table,
which load missed the target, and one JSON document (see `--json`) as the last line. `--profile` adds
cProfile's hot spots. The exit status is 0 even if the target is missed, since that depends on the machine,
and 2 for invalid flags.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from model_defs import PRESETS
from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.config import POLICIES
from pensieve_lab.steps.host_loads import LOADS, Times, measure

FLAGS = flags.FLAGS
ROOT = Path(__file__).resolve().parents[3]
TARGET_MS = 2.0
_DECISIONS = ("num_running", "num_drops", "num_copies", "num_rows", "num_tokens")
_SETTINGS = ("num_running", "context_tokens", "num_idle", "num_steps", "num_rounds", "policy")
_UNITS = {
    "*_ms": "milliseconds of CPU time per step (wall_*: wall-clock time); each step's minimum of all rounds",
    "mean_ms, p50_ms, p99_ms, max_ms": "from the start of a step to its dispatch: schedule + plan",
    "host_ms": "mean_ms + finish_ms",
    "num_rows": "sub-requests per step",
    "num_tokens": "tokens per step",
    "num_copies": "copies between the tiers that start in a step",
    "times_faster": "before.mean_ms / mean_ms",
}


def one_round(load: str, tree: Path) -> list[Times]:
    """Run one round of a load with the code of a checkout in its own process; return its steps."""
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], f"--one_round={load}"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Times(*step) for step in json.loads(done.stdout.splitlines()[-1])]


def least(rounds: Sequence[Sequence[Times]]) -> dict[str, np.ndarray]:
    """Return every step's minimum by column.

    Raises:
      AssertionError: decisions differ between rounds, so the steps are not comparable.
    """
    columns: dict[str, np.ndarray] = {}
    for name in Times._fields:
        values = np.array([[getattr(step, name) for step in steps] for steps in rounds])
        assert name not in _DECISIONS or (values == values[0]).all(), f"rounds differ in {name}"
        columns[name] = values.min(axis=0)
    return columns


def summary(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return mean, median, 99th percentile and maximum of schedule + plan, and means of the rest."""
    left = dict(columns)
    both = left.pop("schedule_plan_ms")
    return {
        "mean_ms": float(both.mean()),
        "p50_ms": float(np.median(both)),
        "p99_ms": float(np.percentile(both, 99)),
        "max_ms": float(both.max()),
        "wall_p50_ms": float(np.median(left.pop("wall_ms"))),
        "host_ms": float(both.mean() + left["finish_ms"].mean()),
        **{name: float(values.mean()) for name, values in left.items()},
    }


def measure_all(trees: Sequence[Path]) -> list[dict[str, dict[str, float]]]:
    """Return summaries by load of each tree; rounds of the trees alternate."""
    found: list[dict[str, dict[str, float]]] = [{} for _ in trees]
    for load in LOADS:
        rounds: list[list[list[Times]]] = [[] for _ in trees]
        for _ in range(FLAGS.num_rounds):
            for number, tree in enumerate(trees):
                rounds[number].append(one_round(load, tree))
        columns = [least(steps) for steps in rounds]
        differing = [n for n in _DECISIONS if any((other[n] != columns[0][n]).any() for other in columns)]
        if differing:
            print(f"{load}: the two trees decide differently ({', '.join(differing)}), so steps differ")
        for number, steps in enumerate(columns):
            found[number][load] = summary(steps)
    return found


def revision_of(tree: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def print_round(load: str) -> None:
    """Print the round that `one_round` reads as one line of JSON."""
    step = LOADS[load]()
    times = measure(step, FLAGS.num_steps)
    if FLAGS.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, step, FLAGS.num_steps)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    print(json.dumps(times))


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, as the target says
    if FLAGS.one_round is not None:
        print_round(FLAGS.one_round)
        return 0
    trees = [ROOT]
    if FLAGS.versus is not None:
        trees.insert(0, Path(FLAGS.versus).resolve())
        if not (trees[0] / "pensieve_jax").is_dir():
            raise ConfigError("--versus", FLAGS.versus, "a checkout of this repository")
    found = measure_all(trees)
    results: dict[str, Any] = dict(found[-1])
    columns = ["load", *next(iter(results.values()))]
    rows = [
        [name if by_load is found[-1] else f"{name}, before", *by_load[name].values()]
        for name in LOADS
        for by_load in found
    ]
    print(table(columns, rows))
    missed = [name for name, values in results.items() if values["mean_ms"] > TARGET_MS]
    outcome = f"missed by {' and '.join(missed)}" if missed else "met"
    print(f"target: schedule + plan at most {TARGET_MS} ms per step on one core, on average: {outcome}")
    if FLAGS.versus is not None:
        faster = {name: found[0][name]["mean_ms"] / results[name]["mean_ms"] for name in LOADS}
        results |= {"before": {"revision": revision_of(trees[0]), **found[0]}, "times_faster": faster}
    settings = {name: FLAGS[name].value for name in _SETTINGS}
    document = {"target_ms": TARGET_MS, "target_met": not missed, "settings": settings, **results}
    print_document(json_line("scheduler", document, units=_UNITS, device="none (host only, one core)"))
    return 0


def define_flags() -> None:
    flags.DEFINE_integer("num_running", 256, "Running requests.", lower_bound=1)
    flags.DEFINE_integer("context_tokens", 2000, "Tokens of each running request.", lower_bound=256)
    flags.DEFINE_integer("num_idle", 1000, "Idle conversations of the mixed loads.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 200, "Steps measured for each load.", lower_bound=1)
    flags.DEFINE_integer("num_rounds", 5, "Number of rounds of each load.", lower_bound=1)
    flags.DEFINE_string("versus", None, "Another checkout, measured in alternation with this one.")
    flags.DEFINE_enum("one_round", None, list(LOADS), "Only print the times of one round of this load.")
    flags.DEFINE_enum("model", "llama2-13b-gqa10", list(PRESETS), "Preset whose heads shape the tile list.")
    flags.DEFINE_enum("policy", "retention", POLICIES, "Eviction policy.")
    backends = ["xla", "pallas_triton"]
    flags.DEFINE_enum("attention_backend", "pallas_triton", backends, "Back end whose tile list is built.")
    flags.DEFINE_bool("profile", False, "Profile as many further steps, and print the hot spots.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
