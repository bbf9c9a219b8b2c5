"""A lock on a file path that lives exactly as long as its holder.

Owns: the side file `<path>.lock` and the advisory lock on it.
Does not know: what the locked file is.
Called by: `sqlite_store`.

The kernel drops the lock when the holder dies in whatever way, so there is no stale lock to clean up. The
side file stays behind on purpose: removing it would let two processes lock two different files of the same
name. A child made by a bare fork (without exec) shares its parent's lock until both are gone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pensieve_jax.core.errors import HistoryError, HistoryLockedError


class FileLock:
    """An exclusive lock, taken by the constructor and held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Lock `<path>.lock`; raises HistoryLockedError at once, without waiting, if it is taken."""
        self.lock_path = path.with_name(path.name + ".lock")
        try:
            file_descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise HistoryError(
                f"history is {str(path)!r}, but its lock file cannot be made ({error.strerror}); "
                "choose a path in an existing directory that this user may write to."
            ) from error
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file_descriptor, 32, 0).decode(errors="replace").strip()
            os.close(file_descriptor)
            raise HistoryLockedError(
                f"history is {str(path)!r}, which process {holder or 'unknown'} has open, but one engine at "
                "a time "
                "may use a history; close that one first or choose another path."
            ) from error
        # Only for the message above; the lock itself is the kernel's.
        os.ftruncate(file_descriptor, 0)
        os.pwrite(file_descriptor, f"{os.getpid()}\n".encode(), 0)
        self._file_descriptor: int | None = file_descriptor

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None
