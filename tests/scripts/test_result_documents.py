"""Documents are checked against their data: an edited one fails, whatever was edited."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launching import load
from tests.scripts.serving_fakes import session
from tests.scripts.test_provenance import commit, git, tree  # noqa: F401  # a fixture
from tests.scripts.test_serving_run import Window, run_ticks

check_numbers = load("check_numbers")
documents = load("pages.result_documents")
request_table = load("serving.request_table")
serving_figures = load("serving.figures")
provenance = load("pensieve_jax.commands.provenance")

WINDOW = Window(10.0, 20.0, drain_s=7.0)
HARDWARE = {"device": "gpu: H200", "cpu": "a", "num_cpus": 2, "memory_bytes": 3}
KINDS = {"serving_benchmark": "requests", "steps": "provenance"}
RULES = documents.Rules(KINDS, {}, {})


def measured_point(window: Window = WINDOW) -> dict[str, Any]:
    """Two turns a second; one ends after the window, one that is not answered."""
    steady = [session(f"s{i}", i / 2, (5, 3), (4, 1), think_s=[1.0]) for i in range(40)]
    run, _ = run_ticks(*steady, session("long", 14.0, (5, 100)), session("late", 9.5, (7, 8)), window=window)
    return {
        **{"rate": 2.0, "seed": 0, "arrivals": None, "sessions_digest": "0" * 64, "max_client_lag_s": 0.75},
        "requests": request_table.request_table(run),
        **serving_figures.figures(run, 0.75),
    }


def results(**changes: Any) -> dict[str, Any]:
    settings = {"warm_up_s": 10.0, "window_s": 10.0}
    loop = {"system": "pensieve", "loop": "open loop", "settings": settings, "left_out": []}
    return copy.deepcopy({**loop, "points": [measured_point()], **changes})


def faults(found: dict[str, Any]) -> list[str]:
    return list(documents.request_faults(found))


def test_a_measured_summary_is_that_of_its_requests() -> None:
    found = results()
    (point,) = found["points"]
    assert point["num_requests"] > 20 and point["num_unfinished"] == 1
    assert point["normalized_latency_of_ended_s"] != point["normalized_latency_s"]
    assert faults(found) == []


def test_a_closed_loop_counts_as_a_whole() -> None:
    found = results(loop="closed loop", settings={}, points=[measured_point(Window())])
    assert found["points"][0]["num_unfinished"] == 0
    assert faults(found) == []


SUMMARY = (
    *(("requests_per_s",), ("sent_requests_per_s",), ("output_tokens_per_s",), ("seconds",)),
    *(("num_requests",), ("num_unfinished",), ("history_tokens",), ("output_tokens",), ("prefilled_tokens",)),
    *((name,) for name in ("recomputed_tokens", "wasted_tokens", "gpu_hit_rate", "cpu_hit_rate")),
    *(
        (name, part)
        for name in (
            "normalized_latency_s",
            "normalized_latency_of_ended_s",
            "first_token_s",
            "output_token_s",
        )
        for part in ("mean", "p50", "p90", "p99")
    ),
    *((name, part) for name in ("latency_s", "latency_at_least_s") for part in ("mean", "p99")),
    *(("client_lag_s", part) for part in ("p50", "p99", "max")),
)


@pytest.mark.parametrize("path", SUMMARY, ids=".".join)
def test_an_edited_summary_fails(path: tuple[str, ...]) -> None:
    found = results()
    part = found["points"][0]
    for name in path[:-1]:
        part = part[name]
    value = part[path[-1]]
    part[path[-1]] = value + 1 if isinstance(value, int) else value * 1.001 + 1e-4
    (fault,) = faults(found)
    assert fault.startswith(f"pensieve, rate 2.0, seed 0: {path[0]} is ")


def test_every_figure_that_is_computed_again_is_edited_above() -> None:
    arrays = documents.unpacked(measured_point()["requests"])
    again = load("pages.recomputed").recomputed(arrays, (10.0, 20.0), 0.75)
    assert again.keys() == {path[0] for path in SUMMARY} | {"void"}


def test_a_missing_figure_and_a_void_run_that_says_it_is_not() -> None:
    found = results()
    del found["points"][0]["first_token_s"]
    found["points"][0]["max_client_lag_s"] = 0.1
    assert [fault.partition(": ")[2].partition(" ")[0] for fault in faults(found)] == [
        "void",
        "first_token_s",
    ]
    found = results()
    found["points"][0]["void"] = 0
    assert len(faults(found)) == 1


def test_another_window_fails() -> None:
    assert faults(results(settings={"warm_up_s": 10.0, "window_s": 9.0}))


@pytest.mark.parametrize(
    ("requests", "fault"),
    [
        (None, "requests is missing"),
        ({"sha256": "0" * 64}, "requests is missing"),
        ({"sha256": "0" * 64, "npz_base64": "*"}, "not base64"),
        ({"sha256": "0" * 64, "npz_base64": "AAAA"}, "the document says 000"),
        ({"sha256": hashlib.sha256(bytes(3)).hexdigest(), "npz_base64": "AAAA"}, "not a .npz"),
        (request_table.packed({"turn": np.zeros(1)}), "requests lacks arrival_us, conversation"),
    ],
)
def test_requests_that_cannot_be_read(requests: Any, fault: str) -> None:
    found = results()
    found["points"][0]["requests"] = requests
    (told,) = faults(found)
    assert fault in told


def test_a_point_without_requests_or_sessions() -> None:
    found = results()
    del found["points"][0]["requests"], found["points"][0]["sessions_digest"]
    assert [fault.rpartition(": ")[2] for fault in faults(found)] == [
        "sessions_digest is missing",
        "requests is missing, so its summary cannot be computed again",
    ]


def test_requests_that_no_run_can_have_seen() -> None:
    found = results()
    arrays = documents.unpacked(found["points"][0]["requests"])
    for name, change in (("first_token_us", -(10**8)), ("prefilled_tokens", 1), ("output_tokens", -1000)):
        edited = {**arrays, name: arrays[name].copy()}
        edited[name][0] += change
        found["points"][0]["requests"] = request_table.packed(edited)
        assert any("1 requests have" in fault for fault in faults(found)), name
    shorter = {**arrays, "turn": arrays["turn"][1:]}
    found["points"][0]["requests"] = request_table.packed(shorter)
    assert "different lengths" in faults(found)[0]


def test_points_that_no_time_was_left_for_and_none_at_all() -> None:
    assert faults(results(points=[], left_out=[{"rate": 2.0}])) == []
    assert "no load points" in faults(results(points=[]))[0]
    assert "no load points" in faults({"curves": {}})[0]


def test_several_systems_of_one_document() -> None:
    edited = results(system="stateless")
    edited["points"][0]["requests_per_s"] *= 2
    (fault,) = faults({"systems": [results(), edited]})
    assert fault.startswith("stateless, rate 2.0, seed 0: requests_per_s")


# Where a document comes from


@pytest.fixture
def folder(tree: Path) -> Path:  # noqa: F811
    """A repository with a document of its commit; the document is not committed, as none needs to be."""
    (tree / "results").mkdir()
    write(tree, "a.json", document(tree))
    return tree


def document(root: Path, kind: str = "steps", **changes: Any) -> dict[str, Any]:
    state = provenance.read_source_state(root, None)
    hardware = HARDWARE | {"gpus": [{"name": "H200", "driver": "1"}]}
    fields = {"command": "c", "hardware": hardware, **state._asdict()}
    return {
        "benchmark": kind,
        "results": results() if kind == "serving_benchmark" else {},
        **fields,
        **changes,
    }


def write(root: Path, name: str, *lines: Any) -> None:
    (root / "results" / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def errors(root: Path, rules: Any = RULES) -> list[str]:
    return documents.check_results(root / "results", rules, documents.History(root))


def test_a_document_of_a_clean_commit_passes(folder: Path) -> None:
    assert errors(folder) == []
    write(folder, "b.json", document(folder, "serving_benchmark"), document(folder, "serving_benchmark"))
    assert errors(folder) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tree_is_clean": False}, "tree_is_clean is not true"),
        ({"tree_is_clean": None}, "tree_is_clean is not true"),
        ({"revision": None}, "revision is missing"),
        ({"revision": "0" * 40}, "not reachable from HEAD"),
        ({"source_digest": "0" * 64}, "source_digest is 0000"),
        ({"source_digest": None}, "source_digest is None"),
        ({"command": ""}, "command is missing"),
        ({"hardware": HARDWARE}, "hardware lacks gpus"),
        ({"hardware": HARDWARE | {"gpus": [], "num_cpus": None}}, "hardware lacks num_cpus"),
        ({"hardware": HARDWARE | {"gpus": []}}, "driver is not known"),
        ({"benchmark": "new"}, "its kind 'new' is not named"),
    ],
)
def test_what_a_document_must_say(folder: Path, changes: dict[str, Any], fault: str) -> None:
    write(folder, "a.json", document(folder, **changes))
    (told,) = errors(folder)
    assert told.startswith("a.json: ") and fault in told


def test_a_processor_needs_no_driver(folder: Path) -> None:
    write(folder, "a.json", document(folder, hardware=HARDWARE | {"device": "cpu: cpu", "gpus": []}))
    assert errors(folder) == []


def test_a_commit_of_another_branch(folder: Path) -> None:
    first = git(folder, "rev-parse", "HEAD")
    (folder / "scripts/a.py").write_text("of a branch")
    commit(folder)
    of_branch = document(folder)
    write(folder, "a.json", of_branch)
    assert errors(folder) == []
    git(folder, "checkout", "-q", "--force", first)
    (folder / "results").mkdir(exist_ok=True)
    write(folder, "a.json", of_branch)
    (told,) = errors(folder)
    assert "not reachable from HEAD" in told


def test_a_shallow_clone_says_what_it_did_not_look_up(folder: Path, tmp_path: Path) -> None:
    old = document(folder)
    (folder / "scripts/a.py").write_text("later")
    commit(folder)
    write(folder, "a.json", old)
    assert errors(folder) == []
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth=1", folder.as_uri(), str(clone))
    shutil.rmtree(clone / "results")
    shutil.copytree(folder / "results", clone / "results")
    write(clone, "b.json", document(clone, source_digest="0" * 64))
    assert [error.partition(" is ")[0] for error in errors(clone)] == ["b.json: source_digest"]
    assert "shallow" in documents.History(clone).notice
    shutil.rmtree(clone / ".git")
    assert errors(clone) == [] and "no git history" in documents.History(clone).notice


def test_older_documents_may_go_but_not_change(folder: Path) -> None:
    write(folder, "old.json", {"benchmark": "steps"})
    digest = hashlib.sha256((folder / "results/old.json").read_bytes()).hexdigest()
    rules = RULES._replace(summary_only={"old.json": digest})
    assert errors(folder, rules) == []
    write(folder, "old.json", {"benchmark": "steps", "results": 1})
    assert "old.json: it was edited" in errors(folder, rules)[0]
    (folder / "results/old.json").unlink()
    assert "old.json: there is no such file" in errors(folder, rules)[0]


def test_a_new_document_of_the_old_form_fails(folder: Path) -> None:
    write(folder, "b.json", {"benchmark": "steps", "results": {}, "revision": "0" * 40, "command": "c"})
    assert {error.partition(":")[0] for error in errors(folder)} == {"b.json"}


def test_files_that_are_no_documents(folder: Path) -> None:
    (folder / "results/a.txt").write_text("text")
    (folder / "results/b.json").write_text("{")
    (folder / "results/c.json").write_text("[1]\n")
    (folder / "results/d.json").write_text("")
    told = errors(folder)
    assert [one.partition(":")[0] for one in told] == ["a.txt", "b.json", "c.json", "d.json"]
    digest = hashlib.sha256(b"text").hexdigest()
    assert len(errors(folder, RULES._replace(attachments={"a.txt": digest}))) == 3


def test_the_committed_documents() -> None:
    docs = check_numbers.ROOT / "docs"
    rules = documents.read_rules(docs / "sources" / check_numbers.SUMMARY_ONLY)
    history = documents.History(check_numbers.ROOT)
    assert documents.check_results(docs / "results", rules, history) == []
    assert set(rules.kinds.values()) == {documents.REQUESTS, documents.PROVENANCE}


def test_check_numbers_tells_of_documents(monkeypatch, capsys, launch) -> None:
    monkeypatch.setattr(check_numbers, "check", lambda *_: [])
    monkeypatch.setattr(check_numbers, "check_results", lambda *_: ["a.json: it was edited"])
    assert launch("check_numbers", shared_llm=False) == 1
    assert "a.json: it was edited" in capsys.readouterr().out
