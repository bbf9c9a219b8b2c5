"""Verdicts on disk, so that a run can be resumed.

Owns: the file and its form.
Does not know: how verdicts are reached.
Called by `programs.run_mutants`.
"""

from __future__ import annotations

import json
from pathlib import Path

from pensieve_lab.mutation.mutants import Mutant
from pensieve_lab.mutation.trial import KILLED, TIMED_OUT, Verdict


class VerdictStore:
    """Verdicts in a file, one line each, written at once."""

    def __init__(self, path: Path) -> None:
        """Read the verdicts of earlier runs; the last line of an interrupted run may be incomplete."""
        self._path = path
        self._latest: dict[str, Verdict] = {}
        if path.is_file():
            *lines, rest = path.read_text("utf-8").split("\n")
            if rest:
                path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
            for line in lines:
                verdict = Verdict(**json.loads(line))
                self._latest[verdict.key] = verdict

    def current(self, mutant: Mutant, tree: str, budget_s: float) -> Verdict | None:
        """Return a verdict on the same product, tests and budget.

        A time-out is never returned, since the machine's load may have caused it.
        """
        found = self._latest.get(mutant.key)
        if found is None or found.outcome == TIMED_OUT:
            return None
        return found if (found.tree, found.budget_s) == (tree, budget_s) else None

    def killer(self, mutant: Mutant) -> str:
        """Return the test that caught this mutant before, or ""."""
        found = self._latest.get(mutant.key)
        return found.test if found is not None and found.outcome == KILLED else ""

    def add(self, verdict: Verdict) -> None:
        """Append a verdict to the file."""
        self._latest[verdict.key] = verdict
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict._asdict()) + "\n")
