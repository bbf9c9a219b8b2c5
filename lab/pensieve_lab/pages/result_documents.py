"""Result documents: where each comes from, and whether its summary is that of its raw data.

Owns: the requirements on each kind of document, and the list of documents from before these rules.
Does not know: pages, or the digests of accepted documents (`recorded`).
Called by `pages.recorded` and `programs.check_numbers`.

`lab/sources/summary_only.toml` names the older documents with the SHA-256 of each file, so that they can be
removed but not edited. Every other document must name a clean commit of this history whose source files are
those that ran. A document that holds measured load points must hold the requests of each.

A load point's summary is compared with its requests (`recomputed`), and its settings with the command
(`command_flags`). These fields follow from neither:

- of a document: `hardware`, `versions`, `environment`, `trace`, `costs`, `start_up_s`, and settings whose
  flags the command leaves out;
- of a load point: `sessions_digest`, `num_mid_life`, `preparation_s`, `steps`, `host_*`, `num_refused`, the
  counters of pages, copies, compilations and steps, and `num_suspensions` beyond its lower bound.

Raw data and command can be replaced themselves. Only the digests in `lab/sources/documents.toml` show such
edits.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import json
import math
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.commands.provenance import commit_digest, git
from pensieve_lab.pages.command_flags import PROGRAM, point_faults, runs, system_faults
from pensieve_lab.pages.recomputed import differences
from pensieve_lab.serving.request_table import COLUMNS, END, LAGS

REQUESTS, PROVENANCE = "requests", "provenance"
SUMMARY_ONLY_SINCE = ("0cc9d001e890e70d3c9082a9b96a248afbf4fe84", "docs/results")
"""The last commit whose documents may be listed as summary only, with their content at that commit."""
_MEASURED = {"requests", "sessions_digest", "max_client_lag_s", "client_lag_s"}
"""Fields of load points that only a measurement has."""
_ARRAYS = {*COLUMNS, *LAGS, END}
_HARDWARE = ("device", "cpu", "num_cpus", "memory_bytes", "gpus")
_GPU = ("cuda", "gpu")  # prefixes of the names of devices with a driver


class Rules(NamedTuple):
    """Rules from `summary_only.toml`.

    Attributes:
      kinds: required data of a document, by the name of its benchmark: `REQUESTS` or `PROVENANCE`.
      summary_only: SHA-256 of each older document, by file name.
      attachments: SHA-256 of each file other than a document, such as a profiler's output.
      computed: the script of each kind whose load points are computed and have no requests.
    """

    kinds: Mapping[str, str]
    summary_only: Mapping[str, str]
    attachments: Mapping[str, str]
    computed: Mapping[str, str]

    @property
    def listed(self) -> dict[str, str]:
        """SHA-256 by name of each file for which only the digest is compared."""
        return {**self.summary_only, **self.attachments}


class History:
    """The commits of a repository.

    Attributes:
      notice: reason that commits cannot be looked up here, or None.
    """

    def __init__(self, root: Path) -> None:
        """Read the commits that HEAD reaches."""
        self._root = root
        is_shallow = git(root, "rev-parse", "--is-shallow-repository")
        self.notice = None
        if is_shallow is None or not (root / ".git").exists():
            self.notice = "there is no git history: revisions of result documents were not looked up"
        elif is_shallow.strip() == "true":
            self.notice = "the git history is shallow: only revisions within it were looked up"
        self._commits = set() if is_shallow is None else set((git(root, "rev-list", "HEAD") or "").split())

    def blobs(self, revision: str, folder: str) -> dict[str, str] | None:
        """Return git's digest of each file of a folder at a commit, or None for an unknown commit.

        `folder` is a path in the repository, as it was at that commit.
        """
        if revision not in self._commits:
            return None
        lines = (git(self._root, "ls-tree", revision, f"{folder}/") or "").splitlines()
        entries = [line.partition("\t") for line in lines]
        return {path.rpartition("/")[2]: entry.split()[2] for entry, _, path in entries}

    def error(self, revision: str, digest: Any) -> str | None:
        """Return the error of a commit and the digest of its files, or None."""
        if revision not in self._commits:
            return (
                None
                if self.notice
                else f"revision {revision} is not reachable from HEAD; merge it, or run again"
            )
        committed = _committed(self._root, revision)
        if digest != committed:
            return f"source_digest is {digest}; the files of {revision[:12]} have {committed}"
        return None


@functools.cache
def _committed(root: Path, revision: str) -> str | None:
    return commit_digest(root, revision)


def read_rules(path: Path) -> Rules:
    """Read the rules from `summary_only.toml`."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return Rules(*(found[name] for name in ("kinds", "summary_only", "attachments", "computed")))


def check_summary_only(folder: Path, rules: Rules, history: History, since: tuple[str, str]) -> list[str]:
    """Return a sentence for each summary-only document that `since` lacks or holds differently.

    Args:
      since: a commit, and the folder of the documents at that commit.
    """
    blobs = history.blobs(*since)
    if blobs is None:
        return (
            [] if history.notice else [f"{since[0]} is not reachable from HEAD; summary_only.toml needs it"]
        )
    errors = []
    for name in rules.summary_only:
        path = folder / name
        if name not in blobs:
            errors.append(f"{name}: nothing is added to [summary_only]; give it what its kind must hold")
        elif path.is_file() and _blob_digest(path.read_bytes()) != blobs[name]:
            errors.append(f"{name}: it was edited after {since[0][:12]}; restore it, or run it again")
    return errors


def _blob_digest(content: bytes) -> str:
    """Return the digest by which git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def check_results(folder: Path, rules: Rules, history: History) -> list[str]:
    """Return a sentence for each fault of the documents in `folder`, which has no subfolders."""
    errors = []
    files = {path.name: path for path in sorted(folder.iterdir())}
    listed = rules.listed
    for name, path in files.items():
        if name in listed:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            faults = (
                []
                if digest == listed[name]
                else [f"it was edited: its SHA-256 is {digest}, not {listed[name]}"]
            )
        elif path.suffix == ".json":
            faults = list(_faults(path, rules, history))
        else:
            faults = ["it is not a document; name it under [attachments] in summary_only.toml"]
        errors += [f"{name}: {fault}" for fault in faults]
    gone = sorted(listed.keys() - files.keys())
    return errors + [f"{name}: there is no such file; take it out of summary_only.toml" for name in gone]


def read_documents(path: Path) -> list[Any]:
    """Return the JSON documents of a file with one document, or with one per line.

    Raises:
      json.JSONDecodeError: the file has neither form.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _faults(path: Path, rules: Rules, history: History) -> Iterator[str]:
    """Yield the faults of a file of documents."""
    try:
        documents = read_documents(path)
    except json.JSONDecodeError as error:
        yield f"it is not JSON: {error}"
        return
    if not documents:
        yield "it is empty"
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("results", {}), dict):
            yield "it is not a document: it or its results are not an object"
            continue
        yield from provenance_faults(document, history)
        kind = str(document.get("benchmark"))
        if kind not in rules.kinds:
            yield f"its kind {kind!r} is not named under [kinds] in summary_only.toml"
        elif rules.kinds[kind] == REQUESTS or _needs_requests(document, rules.computed.get(kind)):
            yield from request_faults(document.get("results", {}), str(document.get("command")))


def _needs_requests(document: Mapping[str, Any], computed_by: str | None) -> bool:
    """Return whether a document holds measured load points; `computed_by` is the script of its kind."""
    command = str(document.get("command"))
    points = list(_load_points(document.get("results")))
    is_computed = computed_by is not None and runs(command, computed_by)
    return runs(command, PROGRAM) or any(not is_computed or _MEASURED & point.keys() for point in points)


def _load_points(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects at any depth that state requests per second."""
    if isinstance(value, dict):
        if "requests_per_s" in value:
            yield value
        for part in value.values():
            yield from _load_points(part)
    elif isinstance(value, list):
        for part in value:
            yield from _load_points(part)


def provenance_faults(document: Mapping[str, Any], history: History) -> Iterator[str]:
    """Yield missing data that a repetition of the run would need."""
    if not document.get("command"):
        yield "command is missing"
    hardware = document.get("hardware", {})
    if missing := [name for name in _HARDWARE if hardware.get(name) is None]:
        yield f"hardware lacks {', '.join(missing)}"
    elif str(hardware["device"]).startswith(_GPU) and not hardware["gpus"]:
        yield "hardware.gpus is empty, so the driver is not known; nvidia-smi must run there"
    revision = document.get("revision")
    if not revision:
        yield "revision is missing; run it in a clean checkout, or set PENSIEVE_REVISION"
        return
    if document.get("tree_is_clean") is not True:
        yield "tree_is_clean is not true: its source files were not those of a commit"
        return
    if fault := history.error(revision, document.get("source_digest")):
        yield fault


def request_faults(results: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield contradictions between load points, their requests, and the command."""
    if not runs(command, PROGRAM):
        yield f"command does not run {PROGRAM}, which alone measures load points with their requests"
    systems = results.get("systems", [results])
    if not isinstance(systems, list):
        systems = [results]
    points = [point for system in systems for point in system.get("points") or ()]
    if not points:
        yield "it has no load points, so nothing of it can be computed again"
        return
    if elsewhere := sum(all(one is not point for point in points) for one in _load_points(results)):
        yield f"{elsewhere} load points are outside of `points`, so they cannot be computed again"
    for system in systems:
        name = system.get("system")
        if not system.get("points") and not system.get("left_out"):
            yield f"{name}: it has no load points and left none out"
        yield from (f"{name}: {fault}" for fault in system_faults(system, command))
        for point in system.get("points") or ():
            where = f"{name}, rate {point.get('rate')}, seed {point.get('seed')}"
            for fault in (*_point_faults(point, system), *point_faults(point, system, command)):
                yield f"{where}: {fault}"


def _point_faults(point: Mapping[str, Any], system: Mapping[str, Any]) -> Iterator[str]:
    if len(str(point.get("sessions_digest"))) != 64:
        yield "sessions_digest is missing"
    try:
        arrays = unpacked(point.get("requests"))
    except ValueError as error:
        yield str(error)
        return
    yield from differences(point, arrays, _window_s(system))


def unpacked(requests: Any) -> dict[str, Any]:
    """Return the arrays of a load point.

    Raises:
      ValueError: the arrays are missing, incomplete, or do not match the digest.
    """
    if not isinstance(requests, dict) or not {"sha256", "npz_base64"} <= requests.keys():
        raise ValueError("requests is missing, so its summary cannot be computed again")
    try:
        content = base64.b64decode(requests["npz_base64"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"requests is not base64: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != requests["sha256"]:
        raise ValueError(f"requests has the SHA-256 {digest}; the document says {requests['sha256']}")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"requests is not a .npz: {error}") from error
    if missing := _ARRAYS - arrays.keys():
        raise ValueError(f"requests lacks {', '.join(sorted(missing))}")
    if len({len(arrays[name]) for name in COLUMNS}) > 1 or len({len(arrays[name]) for name in LAGS}) > 1:
        raise ValueError("requests has arrays of different lengths")
    return arrays


def _window_s(system: Mapping[str, Any]) -> tuple[float, float]:
    """Return the window of the settings; all of a run for a closed loop, or a trace served to its end."""
    settings = system.get("settings", {})
    if system.get("loop") == "closed loop" or not settings.get("window_s"):
        return 0.0, math.inf
    return settings["warm_up_s"], settings["warm_up_s"] + settings["window_s"]
