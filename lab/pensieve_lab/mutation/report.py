"""The printed report of a run.

Owns: the form of the report.
Does not know: how verdicts are reached.
Called by `programs.run_mutants`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pensieve_lab.mutation.mutants import Mutant
from pensieve_lab.mutation.trial import KILLED, SURVIVED, TIMED_OUT, Verdict


def place(mutant: Mutant) -> str:
    """Return file, line and operator."""
    candidate = mutant.candidate
    return f"{candidate.file}:{candidate.line} {candidate.operator}"


def progress_line(mutant: Mutant, verdict: Verdict) -> str:
    """Return one line about a verdict."""
    by = f" by {verdict.test}" if verdict.test else ""
    return f"{verdict.outcome} in {verdict.seconds:.1f} s: {place(mutant)}{by}"


def report(
    results: Sequence[tuple[Mutant, Verdict]], equivalents: Sequence[tuple[Mutant, str]]
) -> Iterator[str]:
    """Yield the lines of a report; the last one has the share caught."""
    by_outcome = {
        outcome: [(mutant, verdict) for mutant, verdict in results if verdict.outcome == outcome]
        for outcome in (KILLED, SURVIVED, TIMED_OUT)
    }
    for outcome in (TIMED_OUT, SURVIVED):
        for mutant, verdict in sorted(by_outcome[outcome], key=lambda pair: pair[0].candidate):
            yield f"{outcome}: {place(mutant)}"
            yield from _diff(mutant)
            left = f", {verdict.num_left} more did not fit the budget" if verdict.num_left else ""
            yield f"    {verdict.num_run} tests run{left}{f'; in {verdict.test}' if verdict.test else ''}"
    for mutant, reason in equivalents:
        yield f"equivalent: {place(mutant)}"
        yield from _diff(mutant)
        yield f"    {reason}"
    killed, survived, timed_out = (len(by_outcome[name]) for name in (KILLED, SURVIVED, TIMED_OUT))
    decided = killed + survived
    share = f"{killed / decided:.1%}" if decided else "none"
    yield (
        f"caught {killed} of {decided} decided ({share}); "
        f"undecided by time-out: {timed_out}; equivalent: {len(equivalents)}"
    )


def _diff(mutant: Mutant) -> Iterator[str]:
    if mutant.function:
        yield f"    in {mutant.function}"
    for sign, text in (("-", mutant.before), ("+", mutant.after)):
        for line in text.splitlines():
            yield f"    {sign} {line.strip()}"
