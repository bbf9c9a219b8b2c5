"""Progress of a run in parts: each part's documents and attempts, kept in one file between calls.

Owns: the content of the file, reading it back, the loads that remain to be measured, and each document as a
file.
Does not know: how a part is run.
Called by `programs.run_figure11`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pensieve_jax import ConfigError
from pensieve_lab.parallel.figure11 import LOOPS, PARTS, STEPS, TOKENS, Load, load_name
from pensieve_lab.parallel.timed_process import ProcessResult

BENCHMARK = "figure11"
DONE, PARTLY, FAILED, NOT_BEGUN = "done", "partly", "failed", "not begun"
type Document = Mapping[str, Any]
_FILES = {TOKENS: "tokens", STEPS: "parallel", LOOPS: "open"}


class Progress:
    """Parts by name, and the settings that all of them must share.

    Attributes:
      settings: flags by part; a file with other settings is refused.
      parts: the `state`, `tries` and `documents` of each part; loops have a document per load point.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start without any results."""
        self.settings = dict(settings)
        self.parts: dict[str, dict[str, Any]] = {
            name: {"state": NOT_BEGUN, "tries": [], "documents": []} for name in PARTS
        }

    def go_on(self, path: Path) -> None:
        """Resume from an earlier call's file, if there is one; raises ConfigError for another run's file."""
        if not path.exists() or not path.stat().st_size:
            return
        limit = "a file that this script wrote, or a new one"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["benchmark"] != BENCHMARK:
                raise ValueError(f"a document of {document['benchmark']}")
            results = document["results"]
            settings = dict(results["settings"])
            parts = {name: dict(results["parts"][name]) for name in PARTS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("--json", str(path), limit, str(error)) from error
        for name, ours in self.settings.items():
            if (theirs := settings.get(name, [])) != ours:
                hint = (
                    f"for {name} it has {_others(theirs, ours)}, where this run has {_others(ours, theirs)}"
                )
                raise ConfigError("--json", str(path), "of a run with the same settings, or new", hint)
        self.parts = parts

    def in_order(self) -> list[str]:
        """Return all parts, failed ones last, because they may fail again and cost the others their time."""
        return sorted(PARTS, key=lambda part: self.parts[part]["state"] == FAILED)

    def missing(self, loads: Sequence[Load]) -> list[Load]:
        """Return the loads without a valid point; the load during which the loops ended comes last."""
        done = {_load(document) for document in self.parts[LOOPS]["documents"] if not _is_void(document)}
        left = [load for load in loads if load not in done]
        tries = self.parts[LOOPS]["tries"]
        culprit = tries[-1].get("during") if tries else None
        return sorted(left, key=lambda load: load_name(load) == culprit)

    def take(self, part: str, lines: Sequence[Document]) -> bool:
        """Replace older documents of a part by the given ones; return whether anything changed."""
        before = self.parts[part]["documents"]
        found = [line for line in lines if part != LOOPS or line["results"]["points"]]
        if not found:
            return False
        kept = []
        if part == LOOPS:
            again = {_load(document) for document in found}
            kept = [document for document in before if _load(document) not in again]
        self.parts[part]["documents"] = [*kept, *found]
        return self.parts[part]["documents"] != before

    def end(self, part: str, ended: ProcessResult, *, limit_s: float, left: Sequence[Load]) -> None:
        """Record the end of an attempt; `left` are the loads without a point, the running one first."""
        one: dict[str, Any] = {"limit_s": limit_s, "wall_s": ended.wall_s}
        if ended.failed is not None:
            one |= {"failed": ended.failed, "output": ended.output}
            if left:
                one["during"] = load_name(left[0])
        self.parts[part]["tries"].append(one)
        is_done = not left if part == LOOPS else ended.failed is None
        self.parts[part]["state"] = DONE if is_done else FAILED if ended.failed is not None else PARTLY

    @property
    def results(self) -> dict[str, Any]:
        """Results for the document."""
        return {"settings": self.settings, "parts": self.parts}

    @property
    def devices(self) -> list[str]:
        """Devices on which the parts ran."""
        found = (one["hardware"]["device"] for part in self.parts.values() for one in part["documents"])
        return list(dict.fromkeys(found))

    def write_documents(self, beginning: str, model: str) -> list[Path]:
        """Write each part's documents to files with this prefix; return the paths."""
        paths = []
        for name, part in self.parts.items():
            for document in part["documents"]:
                path = Path(f"{beginning}_{_FILES[name]}_{model}{_point_name(document, name)}.json")
                path.write_text(json.dumps(document) + "\n", encoding="utf-8")
                paths.append(path)
        return paths


def read_lines(path: Path) -> list[Document]:
    """Return the documents that a part has written so far."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # the last line may still be incomplete
            found.append(json.loads(line))
    return found


def ran_out_of_time(path: Path) -> bool:
    """Return whether the loops left out all points because their start took too long."""
    lines = read_lines(path)
    return bool(lines) and not any(line["results"]["points"] for line in lines)


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, so that it is always complete."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _others(flags: Sequence[str], than: Sequence[str]) -> str:
    """Return the flags that are not in `than`."""
    return " ".join(flag for flag in flags if flag not in than) or "nothing"


def _load(document: Document) -> Load:
    results = document["results"]
    return results["system"].partition(",")[0], results["points"][0]["rate"]


def _is_void(document: Document) -> bool:
    return bool(document["results"]["points"][0]["void"])


def _point_name(document: Document, part: str) -> str:
    """Return the suffix that tells a load point from the others."""
    if part != LOOPS:
        return ""
    system, rate = _load(document)
    seed = document["results"]["points"][0]["seed"]
    return f"_{system}_{rate:g}" + (f"_seed{seed}" if seed else "")
