"""Files that are whole under their name, although several processes write them at once.

Owns: the temporary file beside the one that is written, and its removal after an error.
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
    """Yield an empty file of this user beside `path`, which takes its place at the end; raises OSError."""
    descriptor, name = tempfile.mkstemp(suffix, dir=path.parent)
    with contextlib.ExitStack() as undo:
        undo.callback(os.unlink, name)
        os.close(descriptor)
        yield Path(name)
        os.replace(name, path)
        undo.pop_all()
