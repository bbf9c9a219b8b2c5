"""Pictures of the pages: the documents behind each one, and whether those have changed since.

Owns: the format of `lab/sources/pictures.toml`, described in CONTRIBUTING.md, and its digests. A digest of
data covers the findings of a document (`results`, or the whole document without that key), so that a new
`command` or new `versions` do not invalidate a picture.
Does not know: what a picture shows.
Called by `programs.check_numbers`.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pensieve_lab.pages.expressions import Documents, ExpressionError

SOURCES = "pictures.toml"
_KINDS = ("*.png", "*.svg")
_REASONS = {
    "drawing": "drawn by hand or from code, without data",
    "screenshot": "of a running program",
    "demonstration": "drawn by a command that makes its own data; no document was kept",
    "undocumented": "drawn from data that were not kept or not recorded",
}
_HEADER = """# What each picture of the pages was drawn from; CONTRIBUTING.md says how to write this.
# After a picture was drawn again, `check_numbers --record_pictures` writes its digests.
"""


def digest_of_data(names: Iterable[str], documents: Documents) -> str:
    """Return the digest of the findings in these documents."""
    sha = hashlib.sha256()
    for name in names:
        document = documents.read(name)
        found = document.get("results", document) if isinstance(document, dict) else document
        sha.update(json.dumps(found, sort_keys=True).encode() + b"\n")
    return sha.hexdigest()[:16]


def digest_of_picture(path: Path) -> str:
    """Return the digest of a picture's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def check_pictures(lab: Path, documents: Documents) -> list[str]:
    """Return the errors: pictures without an entry, changed data, changed bytes."""
    entries, root = _entries(lab), lab.parent
    paths = [
        path for folder in (root / "docs", lab / "docs") for kind in _KINDS for path in folder.rglob(kind)
    ]
    found = {path.relative_to(root).as_posix(): path for path in paths}
    listed = [entry["path"] for entry in entries]
    errors = [f"{name}: has no entry in sources/{SOURCES}" for name in sorted(set(found) - set(listed))]
    errors += [
        f"{name}: is in sources/{SOURCES} but is not a picture" for name in sorted(set(listed) - set(found))
    ]
    errors += [
        f"{name}: has two entries" for name in sorted({name for name in listed if listed.count(name) > 1})
    ]
    for entry in entries:
        if entry["path"] in found:
            errors += [
                f"{entry['path']}: {problem}" for problem in _problems(entry, found[entry["path"]], documents)
            ]
    return errors


def _problems(entry: dict[str, Any], path: Path, documents: Documents) -> list[str]:
    if "documents" not in entry:
        reason = entry.get("reason")
        known = ", ".join(_REASONS)
        return (
            []
            if reason in _REASONS
            else [f"reason is {reason!r}; it must be one of {known}, or name documents"]
        )
    try:
        data = digest_of_data(entry["documents"], documents)
    except ExpressionError as error:
        return [str(error)]
    problems = []
    if data != entry.get("data"):
        problems.append(f"data is {entry.get('data')}, but the documents have {data}; draw it again")
    if (picture := digest_of_picture(path)) != entry.get("picture"):
        problems.append(
            f"picture is {entry.get('picture')}, but the file has {picture}; see --record_pictures"
        )
    return problems


def record_pictures(lab: Path, documents: Documents) -> list[str]:
    """Write the digests of redrawn pictures, and return their names.

    A picture with unchanged bytes was not redrawn, so it keeps its digest of data.
    """
    changed, lines = [], [_HEADER]
    for entry in _entries(lab):
        if "documents" in entry:
            picture = digest_of_picture(lab.parent / entry["path"])
            if picture != entry.get("picture"):
                changed.append(entry["path"])
                entry = {**entry, "data": digest_of_data(entry["documents"], documents), "picture": picture}
        lines.append(f"[[picture]]\n{''.join(map(_line, entry.items()))}")
    (lab / "sources" / SOURCES).write_text("\n".join(lines), encoding="utf-8")
    return changed


def _line(item: tuple[str, Any]) -> str:
    """Return a key and its value as a line of TOML; JSON writes these values in the same way."""
    key, value = item
    if isinstance(value, list):
        return f"{key} = [\n{''.join(f'    {json.dumps(one)},{chr(10)}' for one in value)}]\n"
    return f"{key} = {json.dumps(value)}\n"


def _entries(lab: Path) -> list[dict[str, Any]]:
    path = lab / "sources" / SOURCES
    entries: list[dict[str, Any]] = []
    if path.is_file():
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["picture"]
    return entries
