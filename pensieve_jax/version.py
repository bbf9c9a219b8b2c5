"""The version of the package; its only source is `version` in pyproject.toml.

Owns: the lookup. A checkout (an editable install, or a directory on the path) has pyproject.toml beside the
package, and this file is read first. The metadata of an editable install can be out of date, or belong to
another checkout. Other installed packages have the version in their distribution's metadata.
Does not know: git, or release dates.
Called by the package's `__version__` and by commands.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

UNKNOWN: Final = "0+unknown"
"""Version of a package copied without its metadata and pyproject.toml; it sorts before every release."""
_DISTRIBUTION: Final = "pensieve-jax"


@functools.cache
def find_version(root: Path = Path(__file__).parents[1]) -> str:
    """Return the version of the package in the directory `root`."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        project = {}  # not a checkout, or an unreadable file that may belong to something else
    if project.get("name") == _DISTRIBUTION:
        return str(project["version"])
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNKNOWN


__version__ = find_version()
