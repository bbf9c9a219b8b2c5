"""Directories whose files are run as code, so that no other user may write to them.

Owns: how such a directory is created, and what is refused. Does not know: the files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pensieve_jax.core.errors import ConfigError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(directory: Path, field: str) -> None:
    """Create `directory` for this user alone if it is missing; its parents get default permissions.

    Raises:
      ConfigError: `field` is a directory that cannot be created, or that another user may write to.
    """
    limit = "a directory that you own and that no other user can write to"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(field, str(directory), limit, str(error)) from error
    if status.st_uid != os.geteuid():
        hint = f"it belongs to user {status.st_uid}, and its files are run as code"
        raise ConfigError(field, str(directory), limit, hint)
    if not is_private(status):
        hint = f"its files are run as code: choose another, or chmod go-w '{directory}' if it is yours alone"
        raise ConfigError(field, str(directory), limit, hint)


def is_private(status: os.stat_result) -> bool:
    """Return whether this user owns a file or directory, and no other user can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
