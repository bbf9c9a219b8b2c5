"""A lock on a file path that lives exactly as long as its holder.

Owns: the side file `<path>.lock` and the advisory lock on it.
Does not know: what the locked file is.

The kernel releases the lock when its holder dies in any way, so no stale lock must be cleaned up. The side
file of a history stays behind. One that was created for a path that is not a history is removed (`discard`).
After locking, a process checks that the file it locked still has the name; otherwise two processes could hold
two files of one name. A child process made by a bare fork (without exec) shares its parent's lock until both
have ended.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pensieve_jax.core.errors import HistoryError, HistoryLockedError


class FileLock:
    """An exclusive lock, acquired by the constructor and held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Lock `<path>.lock`; raise HistoryLockedError immediately, without waiting, if it is taken."""
        self.lock_path = path.with_name(path.name + ".lock")
        while True:
            file_descriptor, self._is_new = self._open(path)
            _lock(file_descriptor, path)
            if self._has_the_name(file_descriptor):
                break
            os.close(file_descriptor)  # its last holder discarded it between the two calls
        # The process id is only for the error message of other processes; the kernel keeps the lock itself.
        os.ftruncate(file_descriptor, 0)
        os.pwrite(file_descriptor, f"{os.getpid()}\n".encode(), 0)
        self._file_descriptor: int | None = file_descriptor

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None

    def discard(self) -> None:
        """Release the lock, and remove the side file if this lock created it: the path is not a history."""
        if self._is_new and self._file_descriptor is not None:
            self.lock_path.unlink(missing_ok=True)  # while locked, so that it is not another process's file
        self.release()

    def _open(self, path: Path) -> tuple[int, bool]:
        """Return the side file's descriptor, and whether this call created the file."""
        mode = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                return os.open(self.lock_path, mode | os.O_EXCL, 0o600), True
            except FileExistsError:
                return os.open(self.lock_path, mode, 0o600), False
        except OSError as error:
            raise HistoryError(
                f"history is {str(path)!r}, but its lock file cannot be created ({error.strerror}); "
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
            f"history is {str(path)!r}, which process {holder or 'unknown'} has open. Only one engine may "
            "use a history at a time; close that one first or choose another path."
        ) from error
