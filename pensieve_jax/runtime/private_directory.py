"""Directories whose files are run as code, so that nobody else may write to them.

Owns: how one is made, and what is refused. Does not know: the files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pensieve_jax.core.errors import ConfigError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(directory: Path, field: str) -> None:
    """Make `directory`, for this user alone, where it is missing; those above it are made as any others.

    Raises:
      ConfigError: of `field`: it cannot be made, or whoever else may write to it is another user.
    """
    limit = "a directory that belongs to whoever runs this, and that nobody else can write to"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(field, str(directory), limit, str(error)) from error
    if status.st_uid != os.geteuid():
        hint = f"it belongs to user {status.st_uid}, and what is in it is run as code"
        raise ConfigError(field, str(directory), limit, hint)
    if not is_private(status):
        hint = f"what is in it is run as code: take another, or chmod go-w '{directory}' if it is yours alone"
        raise ConfigError(field, str(directory), limit, hint)


def is_private(status: os.stat_result) -> bool:
    """Whether a file or directory is this user's, and nobody else's to write to."""
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
