"""Documents are checked against their data: any edit is detected."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.tests.serving_fakes import session
from lab.tests.test_serving_run import Window, run_ticks
from pensieve_lab.pages.command_flags import runs
from tests.commands.test_provenance import commit, git, tree  # noqa: F401  # a fixture
from tests.launching import load

check_numbers = load("check_numbers")
documents = load("pensieve_lab.pages.result_documents")
recorded = load("pensieve_lab.pages.recorded")
command_flags = load("pensieve_lab.pages.command_flags")
request_table = load("pensieve_lab.serving.request_table")
serving_figures = load("pensieve_lab.serving.figures")
provenance = load("pensieve_jax.commands.provenance")

KV_BYTES = 1_114_112  # 64 pages of 32 rows and 2 of scales: 2 layers, 4 heads, keys and values, 32 bytes
KV_NUMBERS = 1_048_576  # without the scales
WINDOW = Window(10.0, 20.0, drain_s=7.0)
HARDWARE = {"device": "gpu: H200", "cpu": "a", "num_cpus": 2, "memory_bytes": 3}
KINDS = {"serving_benchmark": "requests", "steps": "provenance"}
KINDS |= {"serving": "provenance", "simulation": "provenance"}
RULES = documents.Rules(KINDS, {}, {}, {"simulation": "simulate"})
COMMAND = (
    "python -m pensieve_lab.programs.benchmark_serving --model=random:opt-tiny --dtype=float32 "
    "--gpu_pages=64 "
    "--kv_dtype=int8 --max_num_running=8 --rates=1,2 --seed=0 --warm_up_s=10 --window_s=10 --drain_s=7 "
    "--max_client_lag_s=0.75"
)
CONFIG = {"cache": {"gpu_pages": 64, "kv_dtype": "int8"}, "scheduler": {"max_num_running": 8}}


def measured_point(window: Window = WINDOW) -> dict[str, Any]:
    """Two turns per second; one ends after the window, and one is not answered."""
    steady = [session(f"s{i}", i / 2, (5, 3), (4, 1), think_s=[1.0]) for i in range(40)]
    run, _ = run_ticks(*steady, session("long", 14.0, (5, 100)), session("late", 9.5, (7, 8)), window=window)
    return {
        **{"rate": 2.0, "seed": 0, "arrivals": None, "sessions_digest": "0" * 64, "max_client_lag_s": 0.75},
        "requests": request_table.request_table(run),
        **serving_figures.figures(run, 0.75),
    }


def results(**changes: Any) -> dict[str, Any]:
    settings = {"warm_up_s": 10.0, "window_s": 10.0, "drain_s": 7.0, "seed": 0}
    loop = {"system": "pensieve", "loop": "open loop", "settings": settings, "left_out": []}
    loop |= {"model": "random:opt-tiny", "dtype": "float32", "config": CONFIG, "kv_bytes": KV_BYTES}
    return copy.deepcopy({**loop, "points": [measured_point()], **changes})


def faults(found: dict[str, Any], command: str = COMMAND) -> list[str]:
    return list(documents.request_faults(found, command))


def test_a_measured_summary_is_that_of_its_requests() -> None:
    found = results()
    (point,) = found["points"]
    assert point["num_requests"] > 20 and point["num_unfinished"] == 1
    assert point["normalized_latency_of_ended_s"] != point["normalized_latency_s"]
    assert faults(found) == []


def test_a_closed_loop_counts_as_a_whole() -> None:
    found = results(loop="closed loop", settings={}, points=[measured_point(Window())])
    found["points"][0] |= {"rate": None, "max_client_lag_s": None}
    assert found["points"][0]["num_unfinished"] == 0
    command = COMMAND.partition(" --rates")[0]
    assert faults(found, f"{command} --closed_loop") == []


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
    again = load("pensieve_lab.pages.recomputed").recomputed(arrays, (10.0, 20.0), 0.75)
    assert again.keys() == {path[0] for path in SUMMARY} | {"void"}


def test_a_missing_figure_and_a_void_run_that_says_it_is_not() -> None:
    found = results()
    del found["points"][0]["first_token_s"]
    found["points"][0]["max_client_lag_s"] = 0.1
    late = COMMAND.replace("lag_s=0.75", "lag_s=0.1")
    assert [fault.partition(": ")[2].partition(" ")[0] for fault in faults(found, late)] == [
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


def test_no_load_point_at_all() -> None:
    for found in (results(points=[]), results(points=[], left_out=[{"rate": 2.0}]), {"curves": {}}):
        assert "no load points" in faults(found)[0]
    both = {"systems": [results(), results(points=[], left_out=[{"rate": 1.0}])]}
    assert faults(both) == []
    del both["systems"][1]["left_out"]
    assert "no load points and left none out" in faults(both)[0]


def test_a_load_point_outside_of_the_points() -> None:
    found = results(more=[{"requests_per_s": 99.0}])
    assert "1 load points are outside" in faults(found)[0]


# What the command says

EDITS = (
    *(("points", 0, name, value) for name, value in (("rate", 3.0), ("seed", 1), ("arrivals", "a.csv"))),
    *(("points", 0, "max_client_lag_s", value) for value in (0.8, None)),
    *(("settings", name, 11.0) for name in ("drain_s", "seed")),
    *(("config", "cache", name, value) for name, value in (("gpu_pages", 65), ("kv_dtype", None))),
    *(("config", "scheduler", "max_num_running", 9), ("system", "stateless"), ("loop", "closed loop")),
    *(("system", "pensieve, prompts only"), ("model", "random:opt-13b"), ("dtype", "bfloat16")),
    ("kv_bytes", 1),
)


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edit_that_contradicts_the_command_fails(edit: tuple[Any, ...]) -> None:
    *path, name, value = edit
    found = results()
    part: Any = found
    for step in path:
        part = part[step]
    assert part[name] != value
    part[name] = value
    assert any(f"{name} is {value}" in fault for fault in faults(found))
    if name not in ("system", "loop", "points", "max_client_lag_s", "arrivals", "rate", "seed", "kv_bytes"):
        del part[name]
        assert any(f"{name} is missing" in fault for fault in faults(found))


def test_another_command_fails() -> None:
    assert "does not run benchmark_serving," in faults(results(), "python")[0]
    for flag in ("--kv_dtype=int8", "--max_client_lag_s=0.75"):
        (fault, *_) = faults(results(), COMMAND.replace(flag, ""))
        assert flag[2:].partition("=")[0] in fault or "kv_bytes" in fault
    assert any("stateless" in fault for fault in faults(results(), f"{COMMAND} --system stateless"))


@pytest.mark.parametrize(
    ("command", "is_run"),
    [
        ("python scripts/benchmark_serving.py --rates=1", True),
        ("python -m pensieve_lab.programs.benchmark_serving --rates=1", True),
        ("python -m pensieve_lab.programs.compare_checkouts --program=benchmark_serving", False),
        ("python -m pensieve_lab.programs.benchmark_serving_grid", False),
    ],
)
def test_a_command_runs_the_program_that_it_names_and_no_value_of_a_flag(command: str, is_run: bool) -> None:
    assert runs(command, "benchmark_serving") is is_run


def test_several_loads_of_one_command() -> None:
    command = COMMAND.replace("--rates=1,2", "--loads=pensieve:2,stateless:1")
    assert faults(results(), command) == []
    assert "rate is 2.0; the command has [1.0]" in "".join(faults(results(system="stateless"), command))


def test_options_of_vllm() -> None:
    options = {"num_gpu_blocks_override": 64, "kv_cache_dtype": "fp8", "max_num_seqs": 8}
    options |= {"kv_transfer_config": {"offload_prompt_only": False}}
    found = results(system="vllm-offload", options=options, kv_bytes=KV_NUMBERS)
    del found["config"]
    command = COMMAND.replace("int8", "float8_e4m3fn") + " --system=vllm-offload"
    assert faults(found, command) == []
    found["options"]["kv_transfer_config"]["offload_prompt_only"] = True
    assert "the command does not name it" in faults(found, command)[0]
    found["system"] += ", prompts only"
    assert faults(found, command + " --vllm_offload_prompt_only") == []
    assert "kv_dtype is fp8" in faults(found, command.replace("--kv_dtype=float8_e4m3fn", ""))[1]


def test_kv_bytes_are_those_of_the_engine() -> None:
    """The check's own arithmetic agrees with the benchmark's for both kinds of pages."""
    kv_memory = load("pensieve_lab.serving.kv_memory")
    model = command_flags.PRESETS["opt-tiny"]
    for dtype, kv_dtype in (("float32", "int8"), ("bfloat16", None), ("bfloat16", "float8_e4m3fn")):
        cache = kv_memory.CacheConfig(gpu_pages=64, kv_dtype=kv_dtype)
        system = {"model": "random:opt-tiny", "dtype": dtype}
        flags = {"gpu_pages": "64"} | ({"kv_dtype": kv_dtype} if kv_dtype else {})
        for is_ours in (True, False):
            described = {"config": {"cache": {"gpu_pages": 64, "kv_dtype": kv_dtype}}} if is_ours else {}
            expected = kv_memory.kv_bytes(described, model, dtype, cache, is_ours=is_ours)
            assert command_flags.kv_bytes(system | described, flags) == expected


def test_counts_that_requests_bound() -> None:
    found = results()
    (point,) = found["points"]
    arrays = documents.unpacked(point["requests"])
    inside = np.flatnonzero(
        (arrays["arrival_us"] >= 10**7) & (arrays["end_us"] < 2 * 10**7) & (arrays["end_us"] >= 0)
    )
    arrays["wasted_tokens"][inside[:3]] = 1
    point |= {"requests": request_table.packed(arrays), "wasted_tokens": 3, "num_suspensions": 3}
    assert faults(found) == []
    for count in (2, 0, None):
        point["num_suspensions"] = count
        assert f"num_suspensions is {count}; its requests give at least 3" in faults(found)[0]
    point |= {"num_suspensions": 3, "num_refused": None}
    assert "num_refused is None" in faults(found)[0]


def test_several_systems_of_one_document() -> None:
    edited = results(system="stateless")
    edited["points"][0]["requests_per_s"] *= 2
    command = COMMAND.replace("--rates=1,2", "--loads=pensieve:2,stateless:2")
    (fault,) = faults({"systems": [results(), edited]}, command)
    assert fault.startswith("stateless, rate 2.0, seed 0: requests_per_s")


# Where a document comes from


@pytest.fixture
def folder(tree: Path) -> Path:  # noqa: F811
    """Make a repository with a document of its commit; the document need not be committed."""
    (tree / "results").mkdir()
    write(tree, "a.json", document(tree))
    return tree


def document(root: Path, kind: str = "steps", **changes: Any) -> dict[str, Any]:
    state = provenance.read_source_state(root, None)
    hardware = HARDWARE | {"gpus": [{"name": "H200", "driver": "1"}]}
    command = COMMAND if kind == "serving_benchmark" else "c"
    fields = {"command": command, "hardware": hardware, **state._asdict()}
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


@pytest.mark.parametrize(
    "changes",
    [
        {"benchmark": "serving"},
        {"benchmark": "simulation"},
        {"benchmark": "serving", "command": "c"},
        {"benchmark": "simulation", "command": "python -m pensieve_lab.programs.simulate"},
    ],
    ids=str,
)
def test_another_kind_hides_no_load_points(folder: Path, changes: dict[str, Any]) -> None:
    edited = document(folder, "serving_benchmark", **changes)
    edited["results"]["points"][0]["requests_per_s"] *= 2
    write(folder, "a.json", edited)
    assert any("requests_per_s is" in error for error in errors(folder))
    del edited["results"]["points"][0]["requests"]
    write(folder, "a.json", edited)
    assert any("requests is missing" in error for error in errors(folder))


def test_another_kind_hides_no_missing_load_points(folder: Path) -> None:
    write(folder, "a.json", document(folder, "serving", command=COMMAND))
    assert any("it has no load points" in error for error in errors(folder))


def test_computed_load_points_need_no_requests(folder: Path) -> None:
    computed = {"systems": {"pensieve": [{"rate": 1.0, "requests_per_s": 3.0}]}}
    simulated = document(
        folder,
        "simulation",
        results=computed,
        command="python -m pensieve_lab.programs.simulate --seed=0",
    )
    write(folder, "a.json", simulated)
    assert errors(folder) == []
    write(folder, "a.json", {**simulated, "benchmark": "steps"})
    assert errors(folder) != []


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


def test_nothing_is_added_to_the_older_documents(folder: Path) -> None:
    write(folder, "old.json", {"benchmark": "steps"})
    first = commit(folder)
    write(folder, "new.json", {"benchmark": "steps"})
    commit(folder)

    def added(*names: str, since: str = first) -> list[str]:
        rules = RULES._replace(summary_only=dict.fromkeys(names, "0" * 64))
        return documents.check_summary_only(
            folder / "results", rules, documents.History(folder), (since, "results")
        )

    assert added("old.json", "a.json") == []
    assert "new.json: nothing is added" in added("old.json", "new.json")[0]
    write(folder, "old.json", {"benchmark": "step"})
    assert "old.json: it was edited after" in added("old.json")[0]
    (folder / "results/old.json").unlink()
    assert added("old.json") == []
    assert "is not reachable" in added("old.json", since="0" * 40)[0]
    shutil.rmtree(folder / ".git")
    assert added("new.json") == []


@pytest.fixture
def lab_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Make the laboratory of a repository whose earlier commit has one older document."""
    lab = folder / "lab"
    (lab / "sources").mkdir(parents=True)
    shutil.move(folder / "results", lab / "results")
    (lab / "results/a.json").unlink()
    (lab / "results/old.json").write_text('{"s": 1}')
    list_as_summary_only(lab)
    since = commit(folder)
    (lab / "later").touch()
    commit(folder)
    monkeypatch.setattr(check_numbers, "SUMMARY_ONLY_SINCE", (since, "lab/results"))
    return lab


def list_as_summary_only(lab: Path) -> None:
    digest = hashlib.sha256((lab / "results/old.json").read_bytes()).hexdigest()
    (lab / "sources/summary_only.toml").write_text(
        f'[kinds]\n[computed]\n[attachments]\n[summary_only]\n"old.json" = "{digest}"\n'
    )


def test_an_older_document_is_not_edited_with_its_digest(lab_folder: Path, tmp_path: Path) -> None:
    """Only the history shows the edit, so a clone without it fails whatever the document says."""

    def told(lab: Path, **flags: bool) -> list[str]:
        return check_numbers.document_errors(lab, documents.History(lab.parent), **flags)

    assert told(lab_folder) == []
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth=1", lab_folder.parent.as_uri(), str(clone))
    for lab in (lab_folder, clone / "lab"):
        (lab / "results/old.json").write_text('{"s": 2}')
        list_as_summary_only(lab)
    assert "old.json: it was edited after" in told(lab_folder)[0]
    for missing in ("the git history is shallow", "there is no git history"):
        (error,) = told(clone / "lab")
        assert missing in error and "--allow_missing_history" in error
        assert told(clone / "lab", allow_missing_history=True) == []
        shutil.rmtree(clone / ".git", ignore_errors=True)


def test_without_the_history_no_digest_is_recorded(monkeypatch, capsys, launch, lab_folder: Path) -> None:
    shutil.rmtree(lab_folder.parent / ".git")
    monkeypatch.setattr(check_numbers, "ROOT", lab_folder.parent)
    assert launch("check_numbers", record_documents=True, shared_llm=False) == 1
    assert "there is no git history" in capsys.readouterr().out
    flags = {"record_documents": True, "allow_missing_history": True}
    assert launch("check_numbers", **flags, shared_llm=False) == 0
    assert "not checked: there is no git history" in capsys.readouterr().out


# The digests of accepted documents


def test_an_edit_of_an_accepted_document_shows(folder: Path) -> None:
    results_folder, path = folder / "results", folder / "documents.toml"

    def told() -> list[str]:
        return recorded.check_records(results_folder, RULES, recorded.read_records(path))

    def record() -> tuple[list[str], list[str]]:
        return recorded.record_documents(results_folder, path, RULES)

    assert told() == ["a.json: its digest is not recorded; see --record_documents"]
    assert record() == (["a.json"], []) and told() == []
    before = path.read_text()
    edited = document(folder, results={"s": 1})
    write(folder, "a.json", edited)
    assert "a.json: it was edited" in told()[0]
    changed, refused = record()
    assert changed == [] and "a.json: it was edited" in refused[0] and path.read_text() == before
    write(folder, "a.json", {**edited, "revision": "1" * 40})
    assert record() == (["a.json"], []) and told() == [] and path.read_text() != before
    (results_folder / "a.json").unlink()
    assert "a.json: it has a record" in told()[0]
    assert record() == (["a.json"], []) and told() == []


def test_listed_files_have_no_record(folder: Path) -> None:
    write(folder, "old.json", {})
    rules = RULES._replace(summary_only={"old.json": ""}, attachments={"a.json": ""})
    path = folder / "documents.toml"
    assert recorded.record_documents(folder / "results", path, rules) == ([], [])
    assert recorded.check_records(folder / "results", rules, recorded.read_records(path)) == []


def test_only_documents_that_pass_are_recorded(monkeypatch, capsys, launch, folder: Path) -> None:
    lab = folder / "lab"
    lab.mkdir(exist_ok=True)
    shutil.move(folder / "results", lab / "results")
    (lab / "sources").mkdir()
    (lab / "sources/summary_only.toml").write_text(
        '[kinds]\nsteps = "provenance"\n[computed]\n[summary_only]\n[attachments]\n'
    )
    monkeypatch.setattr(check_numbers, "ROOT", folder)
    good = (lab / "results/a.json").read_text()
    (lab / "results/a.json").write_text(good.replace('"command": "c"', '"command": ""'))
    assert launch("check_numbers", record_documents=True, shared_llm=False) == 1
    assert "command is missing" in capsys.readouterr().out
    assert not (lab / "sources/documents.toml").exists()
    (lab / "results/a.json").write_text(good)
    assert launch("check_numbers", record_documents=True, shared_llm=False) == 0
    assert "a.json" in capsys.readouterr().out
    (lab / "results/a.json").write_text(good.replace('"command": "c"', '"command": "d"'))
    assert launch("check_numbers", record_documents=True, shared_llm=False) == 1
    assert "a.json: it was edited" in capsys.readouterr().out


def test_the_committed_documents() -> None:
    lab = check_numbers.ROOT / "lab"
    rules = documents.read_rules(lab / "sources" / check_numbers.SUMMARY_ONLY)
    history = documents.History(check_numbers.ROOT)
    allowed = os.environ.get("TESTS_WITHOUT_HISTORY") == "1"
    found = check_numbers.document_errors(lab, history, allow_missing_history=allowed)
    assert found == [], "TESTS_WITHOUT_HISTORY=1 allows a checkout without its history"
    assert set(rules.kinds.values()) == {documents.REQUESTS, documents.PROVENANCE}


def test_check_numbers_tells_of_documents(monkeypatch, capsys, launch) -> None:
    monkeypatch.setattr(check_numbers, "check", lambda *_: [])
    monkeypatch.setattr(check_numbers, "check_results", lambda *_: ["a.json: it was edited"])
    assert launch("check_numbers", shared_llm=False) == 1
    assert "a.json: it was edited" in capsys.readouterr().out
