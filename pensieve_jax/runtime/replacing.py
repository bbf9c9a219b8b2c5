"""Atomic replacement of files that several processes may write at once.

Owns: the temporary file next to the target, and its removal after an error.
Does not know: what is in the files.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, suffix: str) -> Iterator[Path]:
    """Yield a new empty file next to `path`, readable by this user only; at the end, move it to `path`.

    After an error the file is removed and `path` is unchanged. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(suffix, dir=path.parent)
    with contextlib.ExitStack() as undo:
        undo.callback(os.unlink, name)
        os.close(descriptor)
        yield Path(name)
        os.replace(name, path)
        undo.pop_all()
