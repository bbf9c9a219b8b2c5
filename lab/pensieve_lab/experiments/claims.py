"""Numeric claims of the paper and the thesis, from `lab/sources/papers.toml`.

Owns: reading that file, and claims as text.
Does not know: what was measured or simulated.
Called by the experiments and pages.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PAPERS = Path(__file__).resolve().parents[2] / "sources" / "papers.toml"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One number of a paper.

    Attributes:
      id: unique name.
      source: `pensieve`, the paper; `thesis`, its chapter 3; `batchmaker`, its chapter 2; or `baton`.
      figure, section: location; `figure` is empty for a claim outside figures.
      claim, unit, condition: as text.
      value: the number.
      over: baseline of a throughput.
      level_ms: normalized latency at which throughputs are compared.
      context_tokens, think_s: position on curves over these.
      read_off: not stated in the text, but read off the drawing by others.
    """

    id: str
    source: str
    figure: str
    section: str
    claim: str
    value: float
    unit: str
    condition: str
    over: str | None = None
    level_ms: float | None = None
    context_tokens: int | None = None
    think_s: float | None = None
    read_off: bool = False


@lru_cache(maxsize=1)
def all_claims() -> tuple[Claim, ...]:
    """Return every claim; raises OSError, and TypeError for an unknown field."""
    document = tomllib.loads(PAPERS.read_text(encoding="utf-8"))
    return tuple(Claim(**fields) for fields in document["claims"])


def claims_of(figure: str) -> list[Claim]:
    """Return the claims of a figure in file order; raises KeyError for a figure without claims."""
    found = [claim for claim in all_claims() if claim.figure == figure]
    if not found:
        raise KeyError(f"no claim of Figure {figure} in {PAPERS.name}")
    return found


def level_s_of(figure: str) -> float:
    """Return the normalized latency in seconds at which a figure's throughputs are compared."""
    [level_ms] = {claim.level_ms for claim in claims_of(figure)}
    if level_ms is None:
        raise KeyError(f"no level of Figure {figure} in {PAPERS.name}")
    return level_ms / 1e3


def in_words(figure: str) -> str:
    """Return a figure's throughput ratios as text, with the level and the section."""
    compared = [claim for claim in claims_of(figure) if claim.over is not None]
    ratios = ", ".join(f"{_ratio(claim):.2f} x {claim.over}" for claim in compared)
    level = "" if compared[0].level_ms is None else f" at {compared[0].level_ms:g} ms"
    source = "" if compared[0].source == "pensieve" else "thesis "
    return f"{ratios}{level} ({source}section {compared[0].section})"


def _ratio(claim: Claim) -> float:
    return claim.value if claim.unit == "x" else 1 + claim.value / 100
