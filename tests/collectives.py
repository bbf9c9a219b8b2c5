"""Collective operations in compiled programs."""

from __future__ import annotations

import re

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(text: str) -> dict[str, int]:
    """Count each kind of collective in the text of a compiled program."""
    found = _COLLECTIVE.findall(text)
    return {kind: found.count(kind) for kind in sorted(set(found))}
