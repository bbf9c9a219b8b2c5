"""The tables of `docs/traces.md`, as Markdown, out of the document of `--experiment=traces`.

Owns: which table stands where. Does not know: what is in them (`experiments.trace_tables`).
Called by: `scripts/refresh_pages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

from experiments.committed import committed_document
from experiments.trace_tables import tables

from pages.paper_tables import markdown

_DOCUMENT: Final = "sim_traces_h200.json"
_NAMES: Final = ("served", "returns", "recompute", "ratios", "latency-ratios", "latencies", "losses")


def made_of(results: Mapping[str, Any]) -> dict[str, str]:
    """All of them, by name."""
    made = tables(results)
    return {
        f"traces-{name}": markdown(one.columns, [[_cell(value) for value in row] for row in one.rows])
        for name, one in zip(_NAMES, made, strict=True)
    }


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


@lru_cache(maxsize=1)
def _committed() -> dict[str, str]:
    try:
        return made_of(committed_document(_DOCUMENT)["results"])
    except FileNotFoundError:  # traces are not in the repository: a run takes minutes of many cores
        return dict.fromkeys(TABLES, f"(`docs/results/{_DOCUMENT}` is not here: run the command above.)")


def _table(name: str) -> str:
    return _committed()[name]


TABLES: Final[dict[str, Callable[[], str]]] = {
    f"traces-{name}": partial(_table, f"traces-{name}") for name in _NAMES
}
"""By name in the page."""
