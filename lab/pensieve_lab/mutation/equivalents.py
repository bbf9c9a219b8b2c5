"""Mutants that a person judged to be the same program, or one that differs in nothing promised.

Owns: the file of these mutants and its form.
Does not know: how mutants are run.
Called by `programs.run_mutants`.

The file is `tests/mutants_equivalent.toml`; each entry is

    [[equivalent]]
    file = "pensieve_jax/cache/manager.py"
    function = "CacheManager.release"    # or "" for the module
    operator = "NumberReplacer"
    before = "self._count = 0"           # the changed lines without indentation
    after = "self._count = 1"
    reason = "the constructor's only caller sets it"
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final, NamedTuple

from pensieve_jax import ConfigError
from pensieve_lab.mutation.mutants import Mutant

FILE = Path("tests", "mutants_equivalent.toml")


class Change(NamedTuple):
    """A mutant as a person reads it; it stays the same when other lines change."""

    file: str
    function: str
    operator: str
    before: str
    after: str


_FIELDS: Final = (*Change._fields, "reason")


def change_of(mutant: Mutant) -> Change:
    """Return what an entry says of a mutant."""
    return Change(
        mutant.candidate.file,
        mutant.function,
        mutant.candidate.operator,
        _stripped(mutant.before),
        _stripped(mutant.after),
    )


def read_equivalents(root: Path) -> dict[Change, str]:
    """Return the reason of each entry, and reject entries whose lines are gone."""
    path = root / FILE
    entries = tomllib.loads(path.read_text("utf-8")).get("equivalent", []) if path.is_file() else []
    found = {}
    for number, entry in enumerate(entries, 1):
        if set(entry) != set(_FIELDS) or not entry["reason"]:
            raise ConfigError(f"{FILE}, entry {number}", sorted(entry), f"fields {', '.join(_FIELDS)}")
        change = Change(*(entry[name] for name in Change._fields))
        _check_lines(root, number, change)
        found[change] = entry["reason"]
    return found


def _check_lines(root: Path, number: int, change: Change) -> None:
    path = root / change.file
    lines = _stripped(path.read_text("utf-8")) if path.is_file() else ""
    if f"\n{_stripped(change.before)}\n" not in f"\n{lines}\n":
        raise ConfigError(f"{FILE}, entry {number}, before", change.before, f"lines of {change.file}")


def _stripped(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
