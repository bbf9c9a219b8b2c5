"""Digests of accepted result documents, so that an edit of one shows as a second changed line.

Owns: `lab/sources/documents.toml`: the SHA-256 and the commit of each document, by file name.
Does not know: what makes a document acceptable (`result_documents`).
Called by `programs.check_numbers`.

Older documents and attachments have their digests in `summary_only.toml` and no entry here.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pensieve_lab.pages.result_documents import Rules, read_documents

_HEADER = """# The SHA-256 of each accepted document in lab/results, and the commit that it names.
# `python -m pensieve_lab.programs.check_numbers --record_documents` writes this file.
"""


class Record(NamedTuple):
    """SHA-256 of a document's file, and the commits that its documents name."""

    sha256: str
    revision: str


def read_records(path: Path) -> dict[str, Record]:
    """Read the records by file name; empty without the file."""
    if not path.is_file():
        return {}
    return {name: Record(**one) for name, one in tomllib.loads(path.read_text(encoding="utf-8")).items()}


def check_records(folder: Path, rules: Rules, records: Mapping[str, Record]) -> list[str]:
    """Return a sentence for each document without a record, and for each record with other content."""
    errors = []
    found = _documents(folder, rules)
    for name, path in found.items():
        if name not in records:
            errors.append(f"{name}: its digest is not recorded; see --record_documents")
        elif (now := _record(path)) != records[name]:
            errors.append(f"{name}: it was edited: {_shown(now)} is not the recorded {_shown(records[name])}")
    gone = sorted(records.keys() - found.keys())
    return errors + [
        f"{name}: it has a record but is not such a document; see --record_documents" for name in gone
    ]


def record_documents(folder: Path, path: Path, rules: Rules) -> tuple[list[str], list[str]]:
    """Write the records of new and of repeated documents only.

    Returns:
      The names that were written or removed, and a sentence for each refused document, whose content changed
        without its commit.
    """
    records = read_records(path)
    current, refused = {}, []
    for name, file in _documents(folder, rules).items():
        current[name] = _record(file)
        old = records.get(name)
        if old is not None and old != current[name] and old.revision == current[name].revision:
            refused.append(
                f"{name}: it was edited: its commit is the recorded one; restore it, or run it again"
            )
            current[name] = old
    changed = sorted(name for name in records | current if records.get(name) != current.get(name))
    lines = [f"{json.dumps(name)} = {_line(record)}\n" for name, record in sorted(current.items())]
    path.write_text(f"{_HEADER}\n{''.join(lines)}", encoding="utf-8")
    return changed, refused


def _documents(folder: Path, rules: Rules) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir()) if path.name not in rules.listed}


def _record(path: Path) -> Record:
    try:
        documents = read_documents(path)
    except (json.JSONDecodeError, UnicodeDecodeError):
        documents = []
    revisions = {str(one.get("revision")) for one in documents if isinstance(one, dict)}
    return Record(hashlib.sha256(path.read_bytes()).hexdigest(), " ".join(sorted(revisions)))


def _line(record: Record) -> str:
    return f'{{ sha256 = "{record.sha256}", revision = {json.dumps(record.revision)} }}'


def _shown(record: Record) -> str:
    return f"{record.sha256[:12]} of {record.revision[:12] or 'no commit'}"
