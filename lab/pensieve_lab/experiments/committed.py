"""Committed measurements, for experiments that show measured results.

Owns: their location.
Does not know: their contents.
Called by the experiments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).resolve().parents[2] / "results"


def committed_document(name: str) -> dict[str, Any]:
    """Return the document of a file in `lab/results`."""
    document: dict[str, Any] = json.loads((_RESULTS / name).read_text(encoding="utf-8"))
    return document


def committed_documents(pattern: str) -> dict[str, dict[str, Any]]:
    """Return the documents in `lab/results` whose names match, such as "h200_*.json", by name."""
    return {path.name: committed_document(path.name) for path in sorted(_RESULTS.glob(pattern))}
