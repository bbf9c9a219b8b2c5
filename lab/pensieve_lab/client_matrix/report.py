"""The matrix as a document and as Markdown.

Owns: the document's fields, the counts, and the tables.
Does not know: how results were found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pensieve_lab.client_matrix.catalogue import Client
from pensieve_lab.client_matrix.causes import Result

_CAUSE_LENGTH: Final = 160
WEAK: Final = "weak model"
"""Outcome of a program that passes with scripted tokens and does not find what it expects without them."""


@dataclass(slots=True)
class ClientResults:
    """Results of one client.

    Attributes:
      client: the client.
      not_installed: why its packages could not be installed; None if they are.
      results: results by the server's name.
    """

    client: Client
    not_installed: str | None = None
    results: dict[str, list[Result]] = field(default_factory=dict)


def document(all_results: Sequence[ClientResults]) -> dict[str, Any]:
    """Return the results of a document."""
    return {
        "clients": [
            {
                "client": one.client.name,
                "version": one.client.version,
                "language": one.client.language,
                "packages": one.client.packages,
                "not_installed": one.not_installed,
                "programs": [
                    {
                        "server": server,
                        "program": result.name,
                        "outcome": outcome,
                        "cause": result.cause[:_CAUSE_LENGTH],
                        "seconds": round(result.seconds, 1),
                    }
                    for server, results in one.results.items()
                    for result, outcome in zip(results, outcomes(one.results, server), strict=True)
                ],
            }
            for one in all_results
        ],
        "counts": {server: dict(counts) for server, counts in counted(all_results).items()},
    }


def outcomes(results: Mapping[str, Sequence[Result]], server: str) -> list[str]:
    """Return the outcomes with one server; what passes with the first one fails for its weak model only."""
    first = next(iter(results))
    passed = {result.name for result in results[first] if result.outcome == "passed"}
    return [
        WEAK if server != first and result.outcome == "answer" and result.name in passed else result.outcome
        for result in results[server]
    ]


def counted(all_results: Sequence[ClientResults]) -> dict[str, Counter[str]]:
    """Return the number of programs of each outcome, by the server's name."""
    counts: dict[str, Counter[str]] = {}
    for one in all_results:
        for server in one.results:
            counts.setdefault(server, Counter()).update(outcomes(one.results, server))
    return counts


def rows(all_results: Sequence[ClientResults]) -> list[tuple[str, str, str, str, str, str]]:
    """Return server, client, version, program, outcome and cause of every program."""
    found = []
    for one in all_results:
        name, version = one.client.name, one.client.version
        if one.not_installed is not None:
            found.append(("", name, version, "", "not installed", one.not_installed[:_CAUSE_LENGTH]))
        for server, results in one.results.items():
            for result, outcome in zip(results, outcomes(one.results, server), strict=True):
                cause = "" if outcome == "passed" else result.cause[:_CAUSE_LENGTH]
                found.append((server, name, version, result.name, outcome, cause))
    return found


def summary(all_results: Sequence[ClientResults]) -> list[tuple[str, str, str, str, str, str]]:
    """Return server, client, version, passed of all programs, the first program, and what failed."""
    found = []
    for one in all_results:
        for server, results in one.results.items():
            by_name = dict(
                zip((result.name for result in results), outcomes(one.results, server), strict=True)
            )
            failed = Counter(outcome for outcome in by_name.values() if outcome != "passed")
            num_passed = len(results) - failed.total()
            causes = ", ".join(f"{count} {outcome}" for outcome, count in failed.items())
            first = next(iter(by_name.values()), "")
            found.append(
                (
                    server,
                    one.client.name,
                    one.client.version,
                    f"{num_passed} of {len(results)}",
                    first,
                    causes,
                )
            )
    return found


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    text = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in text)


def _cell(value: str) -> str:
    return " ".join(value.replace("|", "\\|").split())
