"""Directories of the current user.

Owns: the place of files that can be created again.
Does not know: which files.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """Return the package's cache directory, which may not exist yet.

    Raises RuntimeError if the user has no home directory and XDG_CACHE_HOME is not set.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pensieve_jax"
