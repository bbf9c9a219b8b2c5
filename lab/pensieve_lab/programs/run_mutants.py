"""Makes many small changes to the product, one at a time, and checks which of them the tests detect.

    make mutants NUM=300 SEED=7 ROOMS=cache,scheduler

Draws `num` mutants by `seed` from `rooms` (`mutation.drawing`) and runs each against the short tests that
execute the changed statement, until one fails. The first run records which test executes which line. It takes
up to twice as long as `make test`, because each test compiles its programs anew. Later runs record only test
files that changed. Verdicts are stored at once, so an interrupted run resumes where it stopped. All files are
below `build/mutants`. The report lists survivors with file and line; its last line has the share caught.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from absl import flags

from pensieve_jax.commands.launch import run
from pensieve_lab.mutation import coverage_map, report
from pensieve_lab.mutation.drawing import draw
from pensieve_lab.mutation.equivalents import change_of, read_equivalents
from pensieve_lab.mutation.mutants import Mutant
from pensieve_lab.mutation.pool import Pool, Worker
from pensieve_lab.mutation.rooms import PACKAGES
from pensieve_lab.mutation.trees import tracked_files, tree_digest
from pensieve_lab.mutation.trial import Limits, Verdict, judge
from pensieve_lab.mutation.verdicts import VerdictStore

FLAGS = flags.FLAGS
ROOT: Final = Path(__file__).parents[3]
ROOMS: Final = [
    "cache",
    "scheduler",
    "engine",
    "history",
    "text",
    "server",
    "cellular",
    "rebatching",
    "model_defs",
]
# Imported once by each worker. None of these modules starts a thread, which a fork would not copy.
PRELOADED: Final = (
    *("numpy", "jax", "jax.experimental.pallas", "jax.experimental.pallas.triton", "jax.export"),
    *("jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.tpu", "flax.nnx", "optax", "hypothesis"),
    *("tokenizers", "jinja2.sandbox", "huggingface_hub", "safetensors.numpy", "absl.flags", "tqdm"),
    *("msgspec", "starlette.applications", "starlette.testclient", "uvicorn", "prometheus_client"),
    "jsonschema",
)


def define_flags() -> None:
    flags.DEFINE_list("rooms", ROOMS, "folders of the package, or packages, to draw mutants from")
    flags.DEFINE_integer("num", 100, "how many mutants to draw", lower_bound=1)
    flags.DEFINE_integer("seed", 1, "where the draw begins")
    flags.DEFINE_float(
        "budget_s",
        Limits().budget_s,
        "seconds of tests for each mutant, of processor time as recorded",
        lower_bound=1.0,
    )
    flags.DEFINE_integer("num_workers", 2, "processes that run tests", lower_bound=1)
    flags.DEFINE_list("tests", ["tests"], "folders or files of tests to use")
    flags.DEFINE_bool("record_again", False, "record all test files again")
    flags.DEFINE_string("root", str(ROOT), "the checkout")


def main() -> int:
    """Draw, record, run and report."""
    root = Path(FLAGS.root)
    build = root / "build" / "mutants"
    equivalents = read_equivalents(root)
    drawn = draw(root, FLAGS.rooms, FLAGS.num, FLAGS.seed)
    print(f"{len(drawn)} mutants of {', '.join(FLAGS.rooms)}, seed {FLAGS.seed}", flush=True)
    with Pool(root, build, FLAGS.num_workers, PRELOADED) as pool:
        coverage = _coverage(pool, root, build)
        mutants = [mutant for mutant in drawn if change_of(mutant) not in equivalents]
        results = _judge_all(pool, root, build, mutants, coverage)
    judged = [
        (mutant, equivalents[change_of(mutant)]) for mutant in drawn if change_of(mutant) in equivalents
    ]
    for line in report.report(results, judged):
        print(line)
    return 0


def _coverage(pool: Pool, root: Path, build: Path) -> coverage_map.CoverageMap:
    folder = build / "map"
    files = coverage_map.find_test_files(root, FLAGS.tests)
    missing = files if FLAGS.record_again else coverage_map.outdated(root, folder, files)
    for number, (file, record) in enumerate(coverage_map.record(pool, folder, missing, PACKAGES), 1):
        print(f"recorded {number} of {len(missing)}: {file}, {len(record['tests'])} tests", flush=True)
    coverage = coverage_map.load_map(folder, files)
    failures = {test: why for test, why in coverage.failures.items() if not why.startswith("skipped")}
    for test, why in failures.items():
        print(f"left out: {test} {why} without a mutant")
    print(f"{coverage.num_tests} tests of {len(files)} files", flush=True)
    return coverage


def _judge_all(
    pool: Pool, root: Path, build: Path, mutants: Sequence[Mutant], coverage: coverage_map.CoverageMap
) -> list[tuple[Mutant, Verdict]]:
    store = VerdictStore(build / "verdicts.jsonl")
    tree = tree_digest(root, tracked_files(root))
    known = {mutant: store.current(mutant, tree, FLAGS.budget_s) for mutant in mutants}
    results = [(mutant, verdict) for mutant, verdict in known.items() if verdict is not None]
    if results:
        print(f"{len(results)} verdicts are stored", flush=True)
    start, num_known = time.monotonic(), len(results)

    def work(worker: Worker, mutant: Mutant) -> tuple[Mutant, Verdict]:
        killer = store.killer(mutant)
        return mutant, judge(worker, mutant, coverage, tree, Limits(FLAGS.budget_s), killer)

    for mutant, verdict in pool.map(work, [mutant for mutant in mutants if known[mutant] is None]):
        store.add(verdict)
        results.append((mutant, verdict))
        print(f"[{len(results)}/{len(mutants)}] {report.progress_line(mutant, verdict)}", flush=True)
    if len(results) > num_known:
        each_s = (time.monotonic() - start) / (len(results) - num_known)
        print(f"{each_s:.1f} s a mutant with {FLAGS.num_workers} workers", flush=True)
    return results


if __name__ == "__main__":
    define_flags()
    run(main)
