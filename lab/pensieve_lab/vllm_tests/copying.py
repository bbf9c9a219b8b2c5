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
ENTRYPOINTS: Final = Path("tests", "entrypoints")
_MODEL: Final = re.compile(r"^[A-Z_]*MODEL[A-Z_]* = [\"'](.+)[\"']$", re.MULTILINE)
_SERVED: Final = re.compile(r"[\"']--served-model-name[\"'],\s*[\"'](.+)[\"']")
_HUB_NAME: Final = re.compile(
    r"[\"']([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]*\d+(?:\.\d+)?[bBmM]\b[A-Za-z0-9_.-]*)[\"']"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is run, and what is known of failures.

    Attributes:
      files: test files below vLLM's folder `entrypoints`.
      by_design: regular expressions of what this server does otherwise by design, by its name.
      known: outcome and reason of tests, by the name of their function.
    """

    files: tuple[str, ...]
    by_design: Mapping[str, re.Pattern[str]]
    known: Mapping[str, tuple[str, str]]


def load_selection(path: Path = SELECTION) -> Selection:
    """Read `selection.toml`, or a file like it."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    by_design = {name: re.compile(pattern) for name, pattern in found["by_design"].items()}
    known = {test: (outcome, why) for test, (outcome, why) in found["known"].items()}
    return Selection(tuple(found["files"]), by_design, known)


def copy_tests(sdist: Path, target: Path, files: tuple[str, ...], model: str) -> list[str]:
    """Copy tests and stand-ins to an empty directory, and return the paths of test files in it.

    Args:
      sdist: vLLM's unpacked source distribution.
      target: directory that exists.
      files: test files below vLLM's folder `entrypoints`.
      model: name of the model that replaces those of the tests.

    Raises ConfigError if the directory lacks one of the files.
    """
    paths = []
    for file in files:
        source = sdist / ENTRYPOINTS / file
        if not source.is_file():
            raise ConfigError("--sdist", str(sdist), f"vLLM's sources with {ENTRYPOINTS / file}")
        _copy(source, target / ENTRYPOINTS / file, model)
        for folder in (source.parent, *source.parents):
            if folder == sdist / "tests":
                break
            place = target / folder.relative_to(sdist)
            (place / "__init__.py").touch()
            if (folder / "conftest.py").is_file():
                _copy(folder / "conftest.py", place / "conftest.py", model)
        paths.append(str(ENTRYPOINTS / file))
    (target / "tests" / "__init__.py").touch()
    shutil.copyfile(_STAND_IN / "utils.py", target / "tests" / "utils.py")
    shutil.copyfile(_STAND_IN / "plugin.py", target / "tests" / "conftest.py")
    return paths


def _copy(source: Path, target: Path, model: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    for name in {*_MODEL.findall(text), *_HUB_NAME.findall(text), *_SERVED.findall(text)}:
        text = text.replace(f'"{name}"', f'"{model}"').replace(f"'{name}'", f"'{model}'")
    target.write_text(text, encoding="utf-8")
