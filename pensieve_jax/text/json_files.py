"""Reading of the JSON and text files of a model directory.

Owns: the errors for files that are unreadable or hold something else.
Does not know: what the files mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pensieve_jax.core.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one for a missing file; raises ConfigError naming it."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), "unreadable", f"JSON ({error})", "fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), value, "a JSON object", "fetch the checkpoint again")
    return value


def read_text(path: Path) -> str:
    """Return the text of a file; raises ConfigError naming it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), "unreadable", f"a UTF-8 text file ({error})", "fetch the checkpoint again"
        ) from error
