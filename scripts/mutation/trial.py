"""One mutant against its tests.

Owns: a verdict and how it is reached.
Does not know: which mutants are drawn, or where verdicts are stored.
Called by: `run_mutants`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mutation.candidates import Mutant
from mutation.coverage_map import CoverageMap, CoveringTest, find_place
from mutation.pool import Worker
from mutation.selection import select

KILLED: Final = "killed"
SURVIVED: Final = "survived"
TIMED_OUT: Final = "timed out"
# A test of a mutant may take this long: a loaded machine is slow, a hanging test takes for ever.
_LIMIT_S, _LIMIT_FACTOR = 60.0, 10.0


class Verdict(NamedTuple):
    """What the tests said of a mutant."""

    key: str
    tree: str  # digest of the product and its tests
    outcome: str
    test: str  # that failed or hung
    reason: str
    num_run: int
    num_left: int
    seconds: float
    budget_s: float


def judge(
    worker: Worker, mutant: Mutant, coverage: CoverageMap, tree: str, budget_s: float, killer: str
) -> Verdict:
    """Run a mutant's tests, those nearby first, until one fails."""
    candidate = mutant.candidate
    original = (worker.tree.path / candidate.file).read_text("utf-8")
    selection = select(coverage, find_place(candidate.file, original, candidate.line), budget_s, killer)
    reply: dict[str, Any] = {"outcome": "passed", "test": "", "reason": "", "seconds": 0.0}
    num_run, seconds = 0, 0.0
    with worker.tree.changed(candidate.file, mutant.text):
        for tests in (selection.nearby, selection.others):
            if tests:
                reply = _run(worker, tests)
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
        budget_s,
    )


def _run(worker: Worker, tests: Sequence[CoveringTest]) -> dict[str, Any]:
    return worker.run(
        files=list(dict.fromkeys(test.file for test in tests)),
        tests=[test.test for test in tests],
        limits=[_LIMIT_S + _LIMIT_FACTOR * test.seconds for test in tests],
    )


class VerdictStore:
    """Verdicts in a file, one line each, written at once."""

    def __init__(self, path: Path) -> None:
        """Read what earlier runs found; the last line of an interrupted run may be incomplete."""
        self._path = path
        self._latest: dict[str, Verdict] = {}
        if path.is_file():
            for line in path.read_text("utf-8").split("\n")[:-1]:
                verdict = Verdict(**json.loads(line))
                self._latest[verdict.key] = verdict

    def current(self, mutant: Mutant, tree: str, budget_s: float) -> Verdict | None:
        """Return a verdict on the same product, tests and budget."""
        found = self._latest.get(mutant.key)
        return found if found is not None and (found.tree, found.budget_s) == (tree, budget_s) else None

    def killer(self, mutant: Mutant) -> str:
        """Return the test that caught this mutant before, or ""."""
        found = self._latest.get(mutant.key)
        return found.test if found is not None and found.outcome == KILLED else ""

    def add(self, verdict: Verdict) -> None:
        """Store a verdict."""
        self._latest[verdict.key] = verdict
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict._asdict()) + "\n")
