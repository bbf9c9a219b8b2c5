"""Directories of the user who runs this.

Owns: where files lie that can be made anew.
Does not know: which files.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """Return the package's directory of caches, which may not exist yet.

    Raises RuntimeError for a user without a home directory, unless XDG_CACHE_HOME is set.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pensieve_jax"
