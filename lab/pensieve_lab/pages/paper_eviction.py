"""Markdown tables of `lab/docs/paper_and_we.md` on eviction (Figure 14), and on the conversations.

Owns: the content of each table, and how its numbers are rounded.
Does not know: how a document was made, or where in the page a table stands.
Called by `programs.refresh_pages` and `pages.paper_summary`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pensieve_lab.experiments.claims import claims_of
from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.experiments.seeds import spread
from pensieve_lab.pages.paper_tables import document, markdown

_LOADS = "loads"  # name of a panel in the document


class LruComparison(NamedTuple):
    """Retention against LRU at one place.

    Attributes:
      place: description.
      points: difference of CPU hit rates in percentage points.
      tokens: recomputed tokens as a share of history, over LRU's, minus one.
      seconds: recompute seconds over LRU's, as mean and range over seeds.
    """

    place: str
    points: float
    tokens: float
    seconds: str


def _place(panel: str, x: float) -> str:
    return f"{x:g} conversations/s, 220 GB" if panel == _LOADS else f"0.45 conversations/s, {x:g} GB"


def _by_place() -> dict[tuple[str, float], dict[str, dict[str, Any]]]:
    found: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for point in document("fig14")["points"]:
        found.setdefault((point["panel"], point["x"]), {})[point["series"]] = point
    return found


def beside_lru() -> list[LruComparison]:
    """Return the paper's comparison at every place."""
    over = {
        (one["panel"], one["x"]): f"{one['mean']:.2f} ({one['low']:.2f}-{one['high']:.2f})"
        for one in document("fig14")["retention_over"]
        if one["policy"] == "lru"
    }
    found = []
    for (panel, x), policies in _by_place().items():
        retention, lru = policies["retention"], policies["lru"]
        found.append(
            LruComparison(
                _place(panel, x),
                100 * (retention["cpu_hit_rate"] - lru["cpu_hit_rate"]),
                (1 - retention["found_rate"]) / (1 - lru["found_rate"]) - 1,
                over[panel, x],
            )
        )
    return found


def against_lru() -> str:
    """Return differences of hits and tokens by the paper's definitions."""
    hits, tokens = (
        claim.value for claim in claims_of("14") if claim.id in ("pensieve-14-hits", "pensieve-14-recomputed")
    )
    body = [
        ["the paper, at best", f"+{hits:g}", f"-{tokens:g}%", ""],
        *(
            [one.place, f"{one.points:+.1f}", f"{100 * one.tokens:+.1f}%", one.seconds]
            for one in beside_lru()
        ),
    ]
    return markdown(["", "CPU hits, points", "tokens recomputed", "seconds, of LRU's"], body)


def conversations_of(shape: str, name: str) -> tuple[float, float, float]:
    """Return mean and range over seeds of a generated dataset's figure."""
    made = committed_document("sim_thesis3.10.json")["results"]["made"][shape]
    found = spread([one[name] for one in made.values()])
    assert found is not None
    return found
