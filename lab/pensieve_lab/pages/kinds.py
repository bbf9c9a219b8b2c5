"""Reasons for which a figure may stand on a page without a document: a closed list of kinds.

Owns: the kinds, their meanings, and the form of their figures; the figures of the front page without a
document; and which numbers of a document are settings. Only figures of kind `tested`, and on the front page
of kind `setting`, are compared with anything.
Does not know: how a page is read.
Called by `pages.sources`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """An accepted reason.

    Attributes:
      meaning: definition of the kind.
      form: pattern that each figure must match completely.
      may_stand_on_front_page: whether `FRONT_PAGE` may name such figures.
    """

    meaning: str
    form: str = r".*"
    may_stand_on_front_page: bool = True


KINDS = {
    "setting": Kind("chosen for a run, a command, a test or an example: loads, seeds, levels, lengths"),
    "size": Kind("a size, shape or count of code, a model, a file or a data set"),
    "constant": Kind("a default, limit or constant of the code or of another program"),
    "status": Kind("a status of HTTP or of a process, or a signal", r"-?\d{1,3}"),
    "aim": Kind("a target, a tolerance or a threshold, set before the measurement"),
    "paper": Kind("a name or a condition of a paper: its figures, sections and settings, never its results"),
    "version": Kind("a version of a program or a format", r"\d+(?:\.\d+)*"),
    "date": Kind("a date, a time of day or a year", r"\d{1,4}"),
    "label": Kind("the name of a step, an item, a row, a page or a table", r"-?\d+(?:\.\d+)*|[a-z-]+"),
    "definition": Kind(
        "follows from definitions, or is arithmetic on sizes and settings", may_stand_on_front_page=False
    ),
    "example": Kind("quoted text, or the output of one run that shows only its form"),
    "tested": Kind("what a test compares with this page; `test` names it"),
    "wording": Kind("a word that measures nothing: `half a minute`, `twice` for a second time", r"[a-z-]+"),
    "reading": Kind(
        "a rounded figure, range or ratio of tables on the same page", may_stand_on_front_page=False
    ),
    "estimate": Kind("estimated or assumed, and the page says so", may_stand_on_front_page=False),
    "undocumented": Kind(
        "measured, counted or simulated, and no document was kept", may_stand_on_front_page=False
    ),
}

FRONT_PAGE = {
    ("Pensieve in JAX", "paper"): "25",
    ("Install", "version"): "3.12",
    ("Serve", "size"): "11",
    ("Python", "tested"): "45",
    ("How fast", "aim"): "18",
    ("How fast", "setting"): "60 20",
    ("How fast", "version"): "0.26.0 0.26.0",
}
"""All figures of the README without a document, by heading and kind.

A page and its sources can be edited together so that they agree; a figure that is added here is a change of
code.
"""


def settings_of(document: Any) -> set[float]:
    """Return the numbers in a document's command and in its `settings`, `config` and `options`."""
    if not isinstance(document, Mapping):
        return set()
    found = {float(number) for number in re.findall(r"(?<=[=:,])\d+(?:\.\d+)?", str(document.get("command")))}
    results = document.get("results", {})
    for system in results.get("systems", [results]) if isinstance(results, Mapping) else ():
        for name in ("settings", "config", "options"):
            found |= set(_numbers(system.get(name)))
    return found


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def problems(entry: dict[str, Any], *, is_front_page: bool) -> list[str]:
    """Return the unknown kinds of a prose entry, and its figures that match no kind's form."""
    named = entry.get("kind", [])
    kinds = [named] if isinstance(named, str) else named
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        return [f"kind is {unknown[0]!r}; it must be one of {', '.join(KINDS)}"]
    if not kinds:
        return [f"kind is missing; it must be one of {', '.join(KINDS)}"]
    found = list(_front_page_problems(entry, kinds)) if is_front_page else []
    for shown in entry["figures"].split():
        if not any(re.fullmatch(KINDS[kind].form, shown.lstrip("+")) for kind in kinds):
            found.append(f"{shown} is not of the form of {' or '.join(kinds)}")
    return found


def _front_page_problems(entry: dict[str, Any], kinds: list[str]) -> Iterator[str]:
    """Yield the reasons that keep an entry from the front page."""
    if len(kinds) > 1:
        yield "kind is a list; on the front page each kind has an entry of its own"
        return
    (kind,) = kinds
    if not KINDS[kind].may_stand_on_front_page:
        yield f"kind is {kind!r}; on the front page such a figure needs a document"
    elif entry["figures"] != FRONT_PAGE.get((entry["heading"], kind)):
        yield (
            f"figures are {entry['figures']!r}; kinds.FRONT_PAGE names "
            f"{FRONT_PAGE.get((entry['heading'], kind), 'none')!r} of this heading and kind"
        )
