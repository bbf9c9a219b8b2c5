"""A mutant, and the names by which it is known.

Owns: the two types, and the digest of a source file.
Does not know: cosmic-ray, so that all that runs mutants can be tested without it.
Called by the other modules of this package.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Candidate(NamedTuple):
    """One place where an operator applies; `occurrence` is its number within the file."""

    file: str
    operator: str
    occurrence: int
    line: int
    column: int


class Mutant(NamedTuple):
    """A candidate with the changed text of its file."""

    candidate: Candidate
    source_digest: str
    function: str  # qualified name of what encloses the change, "" for the module
    before: str
    after: str
    text: str

    @property
    def key(self) -> str:
        """Name of this mutant as long as its file does not change."""
        file, operator, occurrence, *_ = self.candidate
        return f"{file} {self.source_digest} {operator} {occurrence}"


def digest(text: str) -> str:
    """Return a short digest of a source file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
