"""Search random schedules of every mode of the engines for a wrong answer.

    python -m tests.search_schedules --max_s=300
    python -m tests.search_schedules --modes=tiers,trees --num_schedules=50000 --shard=2/8 --json=found.json

A schedule is a random sequence of turns, cancellations, forks and failures, and a mode says what runs it and
what judges it: `MODES` lists them. Schedule n of a mode is that of seed n, so a search goes on from
`--first_seed`, `--shard=k/n` takes every n-th seed, and a failed schedule runs alone with `--modes=MODE
--first_seed=SEED --num_schedules=1`. The modes share `--max_s` seconds equally.

A wrong answer does not end the search: its seed and error are printed and stand in the document, the last
line of the output. The exit status is 1 if there was one, or if a mode ran a hundred schedules and hardly
reached some event that it exists for. Any other error ends the search and names its seed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

import jax
from absl import flags
from tqdm import tqdm

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document
from tests.cache.fork_scenarios import run_fork_scenario
from tests.cellular import scenarios as cellular_scenarios
from tests.cellular import test_scenarios as cellular_tests
from tests.engine import (
    test_drafts,
    test_real_models,
    test_seeded_scenarios,
    test_tree_scenarios,
    test_two_devices,
)
from tests.engine.driver import run_scenario
from tests.engine.real_models import MAX_FAR_FRACTION, MAX_UNCERTAIN_STORED_FRACTION, RealBench
from tests.engine.scenarios import Scenario, drafting_scenario, in_order, random_scenario
from tests.engine.tree_scenarios import run_tree_scenario
from tests.rebatching import scenarios as rebatching_scenarios
from tests.rebatching import test_real_models as rebatching_real_models
from tests.rebatching import test_scenarios as rebatching_tests
from tests.rebatching.real_models import MORE_LENGTHS

FLAGS = flags.FLAGS
_MODULE = "tests.search_schedules"
_ENOUGH_TO_EXPECT = 100  # schedules, or counts; fewer vary too much to say what is rare or frequent
_SHARE_EXPECTED = 0.5  # of the events that the fixed seeds of the tests reach
_DEVIATIONS = 4  # by how many standard deviations too many are too many
_NUM_DEVICES = 2

Schedule = Callable[[int], Counter[str]]


class Mode(NamedTuple):
    """One way to run random schedules.

    Attributes:
      make: returns what runs the schedule of a seed; it raises AssertionError for a wrong answer and returns
        how often things happened. It is called once in each process.
      least: events that a thousand schedules must reach, with how often.
      most: the largest allowed ratio of one count to another.
    """

    make: Callable[[], Schedule]
    least: Mapping[str, float] = {}
    most: Mapping[tuple[str, str], float] = {}


def _per_thousand(least: Mapping[str, int], num_schedules: int) -> dict[str, float]:
    return {name: count * 1000 / num_schedules for name, count in least.items()}


def _tiers(prompt_order: str) -> Schedule:
    def run_one(seed: int) -> Counter[str]:
        driver = run_scenario(in_order(random_scenario(seed), prompt_order))
        return Counter(driver.totals) + Counter(turns=driver.num_checked)

    return run_one


def _drafts() -> Schedule:
    def run_one(seed: int) -> Counter[str]:
        driver = run_scenario(drafting_scenario(seed))
        return Counter(driver.totals) + Counter(turns=driver.num_checked)

    return run_one


def _trees(*, drafts: bool = False) -> Schedule:
    def run_one(seed: int) -> Counter[str]:
        found = run_tree_scenario(seed, drafts=drafts)
        found.pop("depth", None)  # a maximum, not a count
        return found

    return run_one


def _judged(make_scenario: Callable[[int, str | None], Scenario], bench: RealBench) -> Schedule:
    """Schedules of a real model, judged by whole forward passes of a dense one."""

    def counts() -> Counter[str]:
        return Counter(
            {
                "turns": bench.num_turns,
                "too close to call": len(bench.uncertain),
                "log-probabilities": bench.num_logprobs,
                "log-probabilities too far": bench.num_far,
            }
        )

    def run_one(seed: int) -> Counter[str]:
        before = counts()
        totals = run_scenario(make_scenario(seed, bench.kv_dtype), bench).totals
        return Counter(totals) + (counts() - before)

    return run_one


def _real(preset: str, kv_dtype: str | None) -> Schedule:
    return _judged(test_real_models.real_scenario, test_real_models.bench_for(preset, kv_dtype))


def _two_devices(kv_dtype: str | None) -> Schedule:
    bench = test_two_devices.bench(_NUM_DEVICES, kv_dtype=kv_dtype)
    return _judged(test_two_devices.short_scenario, bench)


def _padded_models() -> Schedule:
    def run_one(seed: int) -> Counter[str]:
        cases = rebatching_real_models.CASES
        preset, insertion = cases[seed % len(cases)]
        counts = rebatching_real_models.run_schedule(preset, insertion, seed // len(cases), MORE_LENGTHS)
        if insertion != "shape" and counts["num_shaped_steps"]:
            raise AssertionError(f"insertion={insertion!r} shaped {counts['num_shaped_steps']} steps")
        counts["tokens too close to call"] = counts["tokens"] - counts["certain tokens"]
        return counts

    return run_one


_SOURCES = {"reused_gpu_tokens": 5000.0, "swapped_in_tokens": 5000.0, "recomputed_tokens": 5000.0}
_FORKS = dict.fromkeys(("forks", "depth 4", "cuts", "lost devices", "read"), 150)
_EXACT = {("too close to call", "turns"): test_real_models.MAX_UNCERTAIN_FRACTION}
_IN_8_BITS = {
    ("too close to call", "turns"): MAX_UNCERTAIN_STORED_FRACTION,
    ("log-probabilities too far", "log-probabilities"): MAX_FAR_FRACTION,
}
_PADDED = dict.fromkeys(("num_resizes", "num_insertions", "suspended", "num_shaped_steps"), 20.0)
MODES: dict[str, Mode] = {
    # Host-only: a fake runner reads its KV state back.
    **{
        name: Mode(functools.partial(_tiers, order), _per_thousand(test_seeded_scenarios.LEAST, 900))
        for name, order in (("tiers", "arrival"), ("work-left", "work_left"))
    },
    "trees": Mode(_trees, test_tree_scenarios.LEAST),
    "drafts": Mode(_drafts, test_drafts.LEAST),
    "trees-drafts": Mode(functools.partial(_trees, drafts=True), test_tree_scenarios.LEAST),
    "forks": Mode(lambda: run_fork_scenario, _FORKS),
    "cellular": Mode(lambda: cellular_scenarios.run_scenario, cellular_tests.LEAST),
    "rebatching": Mode(lambda: rebatching_scenarios.run_scenario, rebatching_tests.LEAST),
    # Tiny models, judged by dense ones that store keys and values alike.
    "llama-tiny": Mode(functools.partial(_real, "llama-tiny", None), _SOURCES, _EXACT),
    "opt-tiny": Mode(functools.partial(_real, "opt-tiny", None), _SOURCES, _EXACT),
    "llama-tiny-int8": Mode(functools.partial(_real, "llama-tiny", "int8"), _SOURCES, _IN_8_BITS),
    "opt-tiny-int8": Mode(functools.partial(_real, "opt-tiny", "int8"), _SOURCES, _IN_8_BITS),
    "llama-tiny-float8": Mode(functools.partial(_real, "llama-tiny", "float8_e4m3fn"), _SOURCES, _IN_8_BITS),
    "opt-tiny-float8": Mode(functools.partial(_real, "opt-tiny", "float8_e4m3fn"), _SOURCES, _IN_8_BITS),
    "two-devices": Mode(functools.partial(_two_devices, None)),
    "two-devices-int8": Mode(functools.partial(_two_devices, "int8")),
    "rebatching-models": Mode(_padded_models, _PADDED, {("tokens too close to call", "tokens"): 0.1}),
}


class Task(NamedTuple):
    """Work of one process: schedules of one mode, from `start` in steps of `stride`.

    Attributes:
        num: maximum number; None for as many as there is time for.
        max_s: seconds after which none is started; the first one always starts.
    """

    mode: str
    start: int
    stride: int
    num: int | None
    max_s: float


class Found(NamedTuple):
    """Result of the schedules of one mode; counts add up.

    Attributes:
        num: schedules that ran.
        counts: events, over all schedules without a failure.
        failures: errors by seed.
    """

    num: int
    counts: Counter[str]
    failures: dict[int, str]

    def __add__(self, other: Found) -> Found:  # type: ignore[override]
        """Return the schedules of both."""
        failures = self.failures | other.failures
        return Found(self.num + other.num, self.counts + other.counts, failures)

    def doubts(self, mode: Mode) -> list[str]:
        """Return doubts about the search itself, if enough schedules ran to judge."""
        counts, share = self.counts, _SHARE_EXPECTED * self.num / 1000
        rare = [
            f"{name} happened {counts[name]} times, less than {share * least:.0f}"
            for name, least in mode.least.items()
            if self.num >= _ENOUGH_TO_EXPECT and counts[name] < share * least
        ]
        frequent = [
            f"{part} are {counts[part]} of {counts[whole]} {whole}, more than {most:.1%}"
            for (part, whole), most in mode.most.items()
            if counts[whole] >= _ENOUGH_TO_EXPECT and counts[part] > _most_by_chance(most * counts[whole])
        ]
        return rare + frequent


def _most_by_chance(expected: float) -> float:
    """Return the largest count that chance explains; how many schedules ran depends on the machine."""
    return expected + _DEVIATIONS * math.sqrt(expected)


def _prepare_process() -> None:
    """Set as many JAX devices as the modes need."""
    jax.config.update("jax_num_cpu_devices", _NUM_DEVICES)


def search(task: Task) -> Found:
    """Run the schedules of one task, each in turn, and at least one."""
    start_s, found = time.perf_counter(), Found(0, Counter(), {})
    run_one = MODES[task.mode].make()
    for number in itertools.count() if task.num is None else range(task.num):
        if number and time.perf_counter() - start_s > task.max_s:
            break
        seed = task.start + number * task.stride
        try:
            with _naming(task.mode, seed):
                counts = run_one(seed)
        except AssertionError as error:
            found += Found(1, Counter(), {seed: str(error)[:2000]})
        else:
            found += Found(1, counts, {})
    return found


@contextlib.contextmanager
def _naming(mode: str, seed: int) -> Iterator[None]:
    """Name the schedule in whatever error ends it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the schedule of mode {mode}, seed {seed}")
        raise


def tasks(
    modes: list[str],
    *,
    first_seed: int,
    num: int | None,
    shard: tuple[int, int] = (1, 1),
    max_s: float,
    num_processes: int,
) -> list[Task]:
    """Return one task per mode, or more to keep all processes busy; together they have `max_s` seconds."""
    index, num_shards = shard
    parts = max(num_processes // len(modes), 1)
    share_s = max_s * num_processes / (parts * len(modes))
    stride = parts * num_shards
    found = []
    for mode in modes:
        for part in range(parts):
            offset = (index - 1) * parts + part
            # The seeds first_seed + offset + k * stride below first_seed + num.
            count = None if num is None else max(-(-(num - offset) // stride), 0)
            found.append(Task(mode, first_seed + offset, stride, count, share_s))
    return found


def parse_shard(text: str) -> tuple[int, int]:
    """Return (k, n) of "k/n"; raise ConfigError unless 1 <= k <= n."""
    left, _, right = text.partition("/")
    if left.isdecimal() and right.isdecimal() and 1 <= int(left) <= int(right):
        return int(left), int(right)
    raise ConfigError("--shard", text, "k/n with 1 <= k <= n, such as 2/8")


def main() -> int:
    """Hand out tasks and add up what they found."""
    modes = list(MODES) if FLAGS.modes == ["all"] else FLAGS.modes
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError("--modes", ",".join(modes), f"all, or some of {', '.join(MODES)}")
    shard = parse_shard(FLAGS.shard)
    if FLAGS.num_schedules is None and FLAGS.max_s is None:
        raise ConfigError("--max_s", None, "given where --num_schedules is not")
    todo = tasks(
        modes,
        first_seed=FLAGS.first_seed,
        num=FLAGS.num_schedules,
        shard=shard,
        max_s=float("inf") if FLAGS.max_s is None else FLAGS.max_s,
        num_processes=FLAGS.num_processes,
    )
    by_mode = {mode: Found(0, Counter(), {}) for mode in modes}
    start_s = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    bar = tqdm(total=len(todo), unit=" tasks", disable=None)
    with bar, ProcessPoolExecutor(FLAGS.num_processes, context, _prepare_process) as pool:
        running: dict[Future[Found], Task] = {pool.submit(search, task): task for task in todo}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task, found = running.pop(future), future.result()
                by_mode[task.mode] += found
                bar.update()
                for seed, error in found.failures.items():
                    again = f"python -m {_MODULE} --modes={task.mode} --first_seed={seed} --num_schedules=1"
                    bar.write(f"{task.mode}, seed {seed}: {error}\n  again: {again}")
    doubts = {mode: found.doubts(MODES[mode]) for mode, found in by_mode.items()}
    for mode, found in by_mode.items():
        print("; ".join([f"{mode}: {found.num} schedules, {len(found.failures)} failed", *doubts[mode]]))
    results = {
        "first_seed": FLAGS.first_seed,
        "shard": FLAGS.shard,
        "seconds": time.perf_counter() - start_s,
        "modes": {mode: _entry(found) | {"doubts": doubts[mode]} for mode, found in by_mode.items()},
    }
    print_document(json_line("schedules", results, units={"seconds": "s"}, device=jax.default_backend()))
    failed = any(found.failures for found in by_mode.values()) or any(doubts.values())
    return EXIT_FAILED if failed else 0


def _entry(found: Found) -> dict[str, Any]:
    failures = {str(seed): error for seed, error in sorted(found.failures.items())}
    return {"num_schedules": found.num, "counts": dict(found.counts), "failures": failures}


if __name__ == "__main__":
    flags.DEFINE_list("modes", ["all"], f"Which: all, or some of {', '.join(MODES)}.")
    flags.DEFINE_integer("first_seed", 0, "Seed of the first schedule.", lower_bound=0)
    flags.DEFINE_integer(
        "num_schedules", None, "How many of each mode; default: as --max_s allows.", lower_bound=1
    )
    flags.DEFINE_string("shard", "1/1", "k/n: every n-th of the seeds, from the k-th.")
    flags.DEFINE_integer("num_processes", os.cpu_count(), "At once.", lower_bound=1)
    flags.DEFINE_float("max_s", None, "Seconds for all modes, which share them equally.", lower_bound=0)
    define_document_flag()
    run(main)
