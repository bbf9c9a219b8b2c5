"""Keys of several owners for a server that a program starts or is given.

Owns: the keys and the lines of the key file.
Does not know: what the owners ask for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

OPERATOR: Final = "operator"
"""Owner whose key may read numbers about all owners."""


def key_of(owner: str) -> str:
    """Return an owner's key."""
    return f"{owner}key"


def key_lines(owners: Sequence[str]) -> str:
    """Return a file for `--api_keys_file` with a key for each owner, and an operator's."""
    digests = {owner: hashlib.sha256(key_of(owner).encode()).hexdigest() for owner in (*owners, OPERATOR)}
    lines = [f"{owner}:{digest}" for owner, digest in digests.items()]
    return "\n".join(lines) + ":operator\n"
