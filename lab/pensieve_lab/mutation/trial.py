"""The trial of one mutant against its tests.

Owns: a verdict and how it is reached.
Does not know: which mutants are drawn, or where verdicts are stored.
Called by `programs.run_mutants`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pensieve_lab.mutation.coverage_map import CoverageMap, CoveringTest, find_place
from pensieve_lab.mutation.mutants import Mutant
from pensieve_lab.mutation.pool import Worker
from pensieve_lab.mutation.selection import select

KILLED: Final = "killed"
SURVIVED: Final = "survived"
TIMED_OUT: Final = "timed out"


class Limits(NamedTuple):
    """Time limits of a mutant's tests, generous for a loaded machine but finite for a hanging test."""

    budget_s: float = 120.0  # of all tests of a mutant, as recorded
    test_s: float = 60.0
    test_factor: float = 10.0  # of a test's recorded time, in addition


class Verdict(NamedTuple):
    """Result of a mutant's trial."""

    key: str
    tree: str  # digest of the product and its tests
    outcome: str
    test: str  # the one that failed or hung
    reason: str
    num_run: int
    num_left: int
    seconds: float
    budget_s: float


def judge(
    worker: Worker, mutant: Mutant, coverage: CoverageMap, tree: str, limits: Limits, killer: str
) -> Verdict:
    """Run a mutant's tests, those nearby first, until one fails."""
    candidate = mutant.candidate
    original = (worker.tree.path / candidate.file).read_text("utf-8")
    selection = select(
        coverage, find_place(candidate.file, original, candidate.line), limits.budget_s, killer
    )
    reply: dict[str, Any] = {"outcome": "passed", "test": "", "reason": "", "seconds": 0.0}
    num_run, seconds = 0, 0.0
    with worker.tree.changed(candidate.file, mutant.text):
        for tests in selection.groups:
            reply = _run(worker, tests, limits)
            num_run += reply["num_run"]
            seconds += reply["seconds"]
            if reply["outcome"] != "passed":
                break
    outcome = {"passed": SURVIVED, "failed": KILLED, "hung": TIMED_OUT}[reply["outcome"]]
    return Verdict(
        mutant.key,
        tree,
        outcome,
        reply["test"] if outcome != SURVIVED else "",
        reply["reason"],
        num_run,
        selection.num_left,
        round(seconds, 2),
        limits.budget_s,
    )


def _run(worker: Worker, tests: Sequence[CoveringTest], limits: Limits) -> dict[str, Any]:
    return worker.run(
        files=list(dict.fromkeys(test.file for test in tests)),
        tests=[test.test for test in tests],
        limits=[limits.test_s + limits.test_factor * test.seconds for test in tests],
    )
