"""Private copies of the checkout, in which one file at a time is changed.

Owns: the copies, and making Python see a change.
Does not know: what is changed, or what runs there.
Called by `mutation.pool` and `programs.run_mutants`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def tracked_files(root: Path) -> list[str]:
    """Return the files of the checkout that git tracks or would add."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in names if name and (root / name).is_file()})


def tree_digest(root: Path, files: list[str]) -> str:
    """Return a digest of all Python files; a verdict holds as long as it is unchanged."""
    digest = hashlib.sha256()
    for name in files:
        if name.endswith(".py"):
            digest.update(f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


class Tree:
    """A copy of the checkout."""

    def __init__(self, source: Path, path: Path, files: list[str]) -> None:
        """Copy files that differ, and remove those that the checkout no longer has."""
        self.path = path
        self._num_changes = 0
        known = set(files)
        for folder, _, names in os.walk(path):
            for name in names:
                old = Path(folder, name)
                if str(old.relative_to(path)) not in known and old.suffix != ".pyc":
                    old.unlink()
        for name in files:
            _copy(source / name, path / name)

    @contextlib.contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Replace a file's text within the context."""
        path = self.path / file
        before, status = path.read_bytes(), path.stat()
        self._num_changes += 1
        # A .pyc is validated by its source's mtime in seconds and its size, which a mutant often shares.
        changed_s = int(status.st_mtime) + self._num_changes
        try:
            _write(path, text.encode(), changed_s)
            yield
        finally:
            _write(path, before, int(status.st_mtime))


def _copy(source: Path, target: Path) -> None:
    content = source.read_bytes()
    if target.is_file() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)


def _write(path: Path, content: bytes, seconds: int) -> None:
    path.write_bytes(content)
    os.utime(path, (seconds, seconds))
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
