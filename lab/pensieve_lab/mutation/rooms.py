"""Rooms (packages) of the product, and the tests that mirror them.

Owns: the locations of a room and of its own tests.
Does not know: mutants.
Called by `programs.run_mutants`, `mutation.drawing` and `mutation.selection`.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Final

from pensieve_jax import ConfigError

PACKAGE: Final = "pensieve_jax"
PACKAGES: Final = (PACKAGE, "model_defs", "pallas_kernels")
_TEST_FOLDERS: Final = {"model_defs": "models", "pallas_kernels": "kernels"}


def room_folder(root: Path, room: str) -> Path:
    """Return a room's folder: in the main package, or a package of its own."""
    for folder in (root / PACKAGE / room, root / room):
        if room and (folder / "__init__.py").is_file():
            return folder
    raise ConfigError("--rooms", room, f"a folder of {PACKAGE} or a package")


def mirrored_folder(file: str) -> str:
    """Return the folder of a source file's own tests."""
    package, *folders = PurePath(file).parts[:-1]
    if package != PACKAGE:
        folders = [_TEST_FOLDERS.get(package, package), *folders]
    return "/".join(("tests", *folders))
