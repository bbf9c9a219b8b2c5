"""Markdown tables of `lab/docs/recorded_traces.md`, from the documents of two experiments.

Owns: the names of the tables.
Does not know: their content (`experiments.trace_tables`, `experiments.oracle`).
Called by `programs.refresh_pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.experiments.oracle import table_of
from pensieve_lab.experiments.settings import Table
from pensieve_lab.experiments.trace_tables import TIERS, tables
from pensieve_lab.pages.paper_tables import markdown

_NAMES: Final = ("served", "returns", "recompute", "ratios", "latency-ratios")
"""The first tables of an experiment's report; the page does without the others."""
_NOT_ON_PAGE: Final = frozenset({"conversation", "trailing"})  # columns; the picture shows these orders


def made_of(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the page's tables by name."""
    return {f"traces-{name}": _markdown(one) for name, one in zip(_NAMES, tables(results), strict=False)}


def _markdown(one: Table) -> str:
    shown = [number for number, column in enumerate(one.columns) if column not in _NOT_ON_PAGE]
    return markdown(
        [one.columns[number] for number in shown],
        [[_cell(row[number]) for number in shown] for row in one.rows],
    )


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value).removesuffix(f", {TIERS}")


@lru_cache(maxsize=1)
def _committed() -> dict[str, str]:
    return made_of(committed_document("sim_traces_h200.json")["results"])


def _table(name: str) -> str:
    return _committed()[name]


def _oracle() -> str:
    return _markdown(table_of(committed_document("sim_oracle_h200.json")["results"]["orders"]))


TABLES: Final[dict[str, Callable[[], str]]] = {
    **{f"traces-{name}": partial(_table, f"traces-{name}") for name in _NAMES},
    "traces-oracle": _oracle,
}
"""Tables by their name in the page."""
