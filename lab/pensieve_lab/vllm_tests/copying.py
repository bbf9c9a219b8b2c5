"""A copy of vLLM's tests that asks for another model.

Owns: which files are copied, and the replacing of model names.
Does not know: how the copy is run.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pensieve_jax import ConfigError

SELECTION: Final = Path(__file__).with_name("selection.toml")
_STAND_IN: Final = Path(__file__).with_name("stand_in")
_ENTRYPOINTS: Final = Path("tests", "entrypoints")
_MODEL: Final = re.compile(r"^[A-Z_]*MODEL[A-Z_]* = [\"'](.+)[\"']$", re.MULTILINE)
_HUB_NAME: Final = re.compile(
    r"[\"']([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]*\d+(?:\.\d+)?[bBmM]\b[A-Za-z0-9_.-]*)[\"']"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is run, and what is known of failures.

    Attributes:
      files: test files below tests/entrypoints.
      refused: regular expressions of what is refused by design, by its name.
      model: why a test needs a large model, by the name of its function.
    """

    files: tuple[str, ...]
    refused: Mapping[str, re.Pattern[str]]
    model: Mapping[str, str]


def load_selection(path: Path = SELECTION) -> Selection:
    """Read the selection."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    refused = {name: re.compile(pattern) for name, pattern in found["refused"].items()}
    return Selection(tuple(found["files"]), refused, found["model"])


def copy_tests(sdist: Path, target: Path, files: tuple[str, ...], model: str) -> list[str]:
    """Copy tests and stand-ins to an empty directory, and return the paths of test files in it.

    Args:
      sdist: vLLM's unpacked source distribution.
      target: directory that exists.
      files: test files below tests/entrypoints.
      model: name of the model that replaces those of the tests.

    Raises ConfigError if the directory lacks one of the files.
    """
    paths = []
    for file in files:
        source = sdist / _ENTRYPOINTS / file
        if not source.is_file():
            raise ConfigError("--sdist", str(sdist), f"vLLM's sources with {_ENTRYPOINTS / file}")
        _copy(source, target / _ENTRYPOINTS / file, model)
        for folder in (source.parent, *source.parents):
            if folder == sdist / "tests":
                break
            place = target / folder.relative_to(sdist)
            (place / "__init__.py").touch()
            if (folder / "conftest.py").is_file():
                _copy(folder / "conftest.py", place / "conftest.py", model)
        paths.append(str(_ENTRYPOINTS / file))
    (target / "tests" / "__init__.py").touch()
    shutil.copyfile(_STAND_IN / "utils.py", target / "tests" / "utils.py")
    shutil.copyfile(_STAND_IN / "plugin.py", target / "tests" / "conftest.py")
    return paths


def _copy(source: Path, target: Path, model: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    for name in {*_MODEL.findall(text), *_HUB_NAME.findall(text)}:
        text = text.replace(f'"{name}"', f'"{model}"').replace(f"'{name}'", f"'{model}'")
    target.write_text(text, encoding="utf-8")
