"""Measurements that are committed beside the documents, for experiments that show what was measured.

Owns: where they are. Does not know: what is in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).resolve().parents[2] / "results"


def committed_document(name: str) -> dict[str, Any]:
    """The document of a file in `lab/results`."""
    document: dict[str, Any] = json.loads((_RESULTS / name).read_text(encoding="utf-8"))
    return document


def committed_documents(pattern: str) -> dict[str, dict[str, Any]]:
    """Those of files in `lab/results` whose names match, such as "h200_*.json", by name."""
    return {path.name: committed_document(path.name) for path in sorted(_RESULTS.glob(pattern))}
