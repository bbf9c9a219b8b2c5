"""A lock on a file path that lives exactly as long as its holder.

Owns: the side file `<path>.lock` and the advisory lock on it.
Does not know: what the locked file is.

The kernel drops the lock when the holder dies in whatever way, so there is no stale lock to clean up. The
side file of a history stays behind; one that was made for a path that turned out to be no history goes
again (`discard`). Whoever locks checks that the file it locked still has the name, since two processes could
otherwise hold two files of one name. A child made by a bare fork (without exec)
shares its parent's lock until both are gone.
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
        while True:
            file_descriptor, self._is_new = self._open(path)
            _lock(file_descriptor, path)
            if self._has_the_name(file_descriptor):
                break
            os.close(file_descriptor)  # its last holder discarded it between the two calls
        # Only for the message of who is refused; the lock itself is the kernel's.
        os.ftruncate(file_descriptor, 0)
        os.pwrite(file_descriptor, f"{os.getpid()}\n".encode(), 0)
        self._file_descriptor: int | None = file_descriptor

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None

    def discard(self) -> None:
        """Give the lock up, and remove the side file if this lock made it: the path is no history."""
        if self._is_new and self._file_descriptor is not None:
            self.lock_path.unlink(missing_ok=True)  # while it is held, so that nobody else's goes
        self.release()

    def _open(self, path: Path) -> tuple[int, bool]:
        """The side file's descriptor, and whether this made it."""
        mode = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                return os.open(self.lock_path, mode | os.O_EXCL, 0o600), True
            except FileExistsError:
                return os.open(self.lock_path, mode, 0o600), False
        except OSError as error:
            raise HistoryError(
                f"history is {str(path)!r}, but its lock file cannot be made ({error.strerror}); "
                "choose a path in an existing directory that this user may write to."
            ) from error

    def _has_the_name(self, file_descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file_descriptor), self.lock_path.stat())
        except FileNotFoundError:
            return False


def _lock(file_descriptor: int, path: Path) -> None:
    """Lock the side file of `path`, or close it and raise HistoryLockedError."""
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(file_descriptor, 32, 0).decode(errors="replace").strip()
        os.close(file_descriptor)
        raise HistoryLockedError(
            f"history is {str(path)!r}, which process {holder or 'unknown'} has open, but one engine at a "
            "time may use a history; close that one first or choose another path."
        ) from error
