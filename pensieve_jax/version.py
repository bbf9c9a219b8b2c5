"""Which version this is: `version` in pyproject.toml says so, and nothing else does.

Owns: where to look. An installed package has it in its distribution's metadata. A checkout, installed in
editable mode or only found on the path, has pyproject.toml itself beside the package; that is read first,
since the metadata of an editable install is as old as the install, and may be that of another checkout.
Does not know: git, or when a version was made.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

UNKNOWN: Final = "0+unknown"
"""Sorts before every release: the package was copied without its metadata and without its pyproject.toml."""
_DISTRIBUTION: Final = "pensieve-jax"


@functools.cache
def find_version(root: Path = Path(__file__).parents[1]) -> str:
    """The version of the package that lies in `root`."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        project = {}  # no checkout, or a file that is no business of this package
    if project.get("name") == _DISTRIBUTION:
        return str(project["version"])
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNKNOWN


__version__ = find_version()
