"""The run of Figure 11: settings, parts with time limits, resuming, and a small rehearsal."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pensieve_jax import ConfigError
from tests.deadlines import TIMEOUT_S, wait_until
from tests.launching import ROOT, load

script = load("run_figure11")
timed_process = load("pensieve_lab.parallel.timed_process")
figure11 = load("pensieve_lab.parallel.figure11")
tokens = load("check_parallel")

RESULTS = ROOT / "lab" / "results"
SMALL = {
    "model": "random:llama-tiny", "tensor_parallel_size": 2, "gpu_pages": 24, "cpu_pages": 24,
    "chunk_tokens": 16, "max_num_staged_pages": 4, "token_buckets": 64, "max_num_running": 8,
    "max_context_tokens": 300,
    "loads": "stateless:6,pensieve:6", "num_conversations": 200,
    "think": "exponential:0.5", "mid_life_s": 20, "warm_up_s": 0.2, "window_s": 1, "drain_s": 20,
    "max_client_lag_s": 1e6, "decodes": "2", "prompts": "", "context_tokens": 20, "num_repeats": 1,
    "num_launches": 2, "ceiling_bytes": 2**20, "ceiling_matrix": 32,
}  # fmt: skip


def flags_of(words):
    """Return the flags with a value, by name."""
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, equals, value in pairs if equals}


COMMITTED = [
    (path.name, flags_of(shlex.split(json.loads(path.read_text("utf-8"))["command"])))
    for loops in ("h200x2_open", "h200x4_open_opt-66b", "h100x4_open_llama2-70b")
    for path in sorted(RESULTS.glob(f"{loops}_*.json"))
    if "vllm" not in path.name
]


@pytest.mark.parametrize(("model", "num_devices"), figure11.SETTINGS, ids=lambda value: str(value))
def test_settings_are_those_of_committed_documents(launch, capsys, model, num_devices):
    """Every flag of every committed loop of the model is set, and no other; host memory may be left out."""
    launch(
        "run_figure11", shared_llm=False, model=f"random:{model}", tensor_parallel_size=num_devices, parts=""
    )
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["settings"]
    ours = flags_of(settings["loops"]) | {"loads": None, "max_run_s": None, "seeds": None, "seed": None}
    known = {figure11.load_name(one) for one in figure11.asked_loads()}
    theirs = [
        (name, flags)
        for name, flags in COMMITTED
        if (flags["model"], flags["tensor_parallel_size"]) == (f"random:{model}", str(num_devices))
    ]
    assert len(theirs) >= 5
    for name, flags in theirs:
        for flag, value in flags.items():
            said = ours[flag].removesuffix(".0") if ours[flag] else None
            assert said in (None, value) or (flag, value) == ("cpu_bytes", "0GB"), (name, flag)
        system, rate = name.removesuffix(".json").partition(f"{model}_")[2].split("_")[:2]
        assert f"{system}:{float(rate):g}" in known, name
    assert set(ours) == {flag for _, flags in theirs for flag in flags} | {"max_run_s", "seeds", "seed"}
    assert flags_of(settings["steps"]).items() >= {"num_repeats": "4", "dtype": "bfloat16"}.items()
    assert settings["tokens"][0] == f"--model=random:{'llama' if 'llama' in model else 'opt'}-tiny"


def test_flags_and_variables_go_before_settings(launch, capsys):
    launch("run_figure11", shared_llm=False, parts="", gpu_pages=7, cpu_pages=3, loads="pensieve:2")
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["settings"]
    loops = flags_of(settings["loops"])
    assert (loops["gpu_pages"], loops["cpu_pages"], loops["window_s"]) == ("7", "3", "45.0")
    assert "cpu_bytes" not in loops
    for part in settings.values():
        assert "--tensor_parallel_size=4" in part, "which is no default of the parts"
    assert "--model=random:llama2-70b" in settings["steps"] and loops["model"] == "random:llama2-70b"
    given = figure11.environment({"NCCL_NVLS_ENABLE": "1", "HOME": "/"})
    assert given["NCCL_NVLS_ENABLE"] == "1" and given["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.94"


def test_each_system_has_a_point_before_one_has_two():
    loads = [("a", 1.0), ("a", 2.0), ("b", 3.0), ("a", 3.0), ("c", 1.0), ("b", 1.0)]
    assert figure11.interleaved(loads) == [
        ("a", 1.0), ("b", 3.0), ("c", 1.0), ("a", 2.0), ("b", 1.0), ("a", 3.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"parts": "steps,all"}, "--parts is 'all'.*among tokens, steps, loops"),
        ({"loads": "penieve:1"}, "--loads is 'penieve:1'.*systems among pensieve"),
        ({"loads": "", "model": "random:llama-tiny"}, "--loads.*given.*llama2-70b on 4"),
        ({"rates": "3"}, "--rates.*left out"),
        ({"seeds": "0,1"}, "--seeds.*another document"),
        ({"tensor_parallel_size": 1, "loads": "pensieve:1"}, "--tensor_parallel_size is 1.*at least 2"),
        ({"documents": "/nowhere/h200x4"}, "--documents.*a directory that exists"),
        ({"gpu_pages": 1}, "gpu_pages is 1"),
    ],
)
def test_what_cannot_work_is_refused(launch, values, says):
    with pytest.raises(ConfigError, match=says):
        launch("run_figure11", shared_llm=False, **values)


def is_running(pid):
    """Return whether a process has not ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_hangs_ends_with_what_it_started(tmp_path, monkeypatch):
    """It ends at its limit, which passes once it has begun to hang, and its output is reported."""
    looks, begun = [], tmp_path / "begun"
    clock = SimpleNamespace(monotonic=lambda: 2.0 if looks and begun.exists() else 0.0)
    monkeypatch.setattr(timed_process, "time", clock)
    monkeypatch.setattr(timed_process, "_POLL_S", 0.01)
    words = ["sh", "-c", f"sleep 600 & echo $!; echo > {begun}; wait"]
    ended = timed_process.run_with_limit(words, os.environ, 1.2, lambda: looks.append(1))
    assert (ended.wall_s, ended.failed, ended.status) == (2.0, "took longer than 1 s", None)
    wait_until(lambda: not is_running(int(ended.output)))  # a signal takes a moment
    assert len(looks) >= 2, "while it runs, and at its end"


def test_ending_the_call_ends_its_part(tmp_path):
    """The call is ended by the signal that `timeout` sends."""
    pid_file = tmp_path / "pid"
    words = ["sh", "-c", f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 600"]
    code = (
        "import os; from pensieve_lab.parallel import timed_process; "
        f"timed_process.run_with_limit({words!r}, os.environ, 600)"
    )
    call = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "lab")
    wait_until(lambda: pid_file.exists() or call.poll() is not None)
    call.terminate()
    assert call.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(int(pid_file.read_text("utf-8"))))


def test_a_command_that_fails_says_why():
    ended = timed_process.run_with_limit(
        [sys.executable, "-c", "raise SystemExit('x' * 5000)"], os.environ, 30
    )
    assert ended.failed == "ended with status 1" and ended.output == "x" * 1999 + "\n"
    assert timed_process.run_with_limit([sys.executable, "-c", "print(1)"], os.environ, 30)[1:] == (
        None,
        0,
        "",
    )


def point(system, rate, *, is_void=False):
    """Make a document of a load point with the fields that are read."""
    points = [{"rate": rate, "seed": 0, "void": is_void, "requests_per_s": 1, "normalized_latency_s": None}]
    return {"results": {"system": system, "points": points}, "hardware": {"device": "a GPU"}}


def left_out(system):
    return {"results": {"system": system, "points": []}, "hardware": {"device": "a GPU"}}


class Stubs:
    """Replacement of each part's command by one that writes given documents and then acts as scripted."""

    def __init__(self, monkeypatch) -> None:
        self.written: dict[str, list] = {"tokens": [self.plain()], "steps": [self.plain()], "loops": []}
        self.then: dict[str, str] = {}
        self.asked: list[tuple[str, list[str], float]] = []
        monkeypatch.setattr(script, "command", self.command)

    @staticmethod
    def plain():
        return {"results": {"variants": {"default": {"steps": {}}}}, "hardware": {"device": "a GPU"}}

    def command(self, part, document, loads, *, max_run_s):
        self.asked.append((part, [figure11.load_name(one) for one in loads], max_run_s))
        lines = "".join(json.dumps(one) + "\n" for one in self.written[part])
        document.write_text(lines, encoding="utf-8")
        return ["sh", "-c", self.then.get(part, "exit 0")]


LOADS = {
    "model": "random:llama-tiny", "tensor_parallel_size": 2, "loads": "stateless:1,stateless:2,pensieve:3",
    "warm_up_s": 1, "window_s": 2, "drain_s": 3,
}  # fmt: skip


@pytest.fixture
def stubs(monkeypatch):
    return Stubs(monkeypatch)


@pytest.fixture
def figure(launch, tmp_path, capsys):
    """Run a call that keeps its document; returns the parts, and what was printed."""

    def figure(*, status=0, **values):
        path = tmp_path / "figure11.json"
        assert launch("run_figure11", shared_llm=False, json=path, **LOADS | values) == status
        out = capsys.readouterr().out
        document = json.loads(path.read_text("utf-8"))
        assert json.loads(out.splitlines()[-1]) == document
        return document["results"]["parts"], out

    return figure


def test_a_second_call_goes_on_with_what_is_missing(figure, stubs, tmp_path, monkeypatch):
    """One part hung, one failed, and loads lack points; the part that hung comes last."""
    stubs.then = {"tokens": "echo why >&2; exit 1", "steps": "sleep 60", "loops": "exit 3"}
    stubs.written["steps"] = []
    stubs.written["loops"] = [point("stateless", 1.0)]
    with monkeypatch.context() as patch:
        patch.setattr(script, "_SHARES", {"tokens": 1.0, "steps": 0.01, "loops": 1.0})
        patch.setattr(script, "_MIN_SHARE", 0.0)
        parts, out = figure(status=1, budget_s=30)
    assert [parts[name]["state"] for name in figure11.PARTS] == ["failed"] * 3
    assert parts["steps"]["tries"][0]["failed"] == "took longer than 0 s"
    assert parts["tokens"]["tries"][0]["output"] == "why\n" and "why" in out
    assert len(parts["tokens"]["documents"]) == 1, "what it found is kept"
    assert parts["loops"]["tries"][0]["during"] == "pensieve:3"

    stubs.asked.clear()
    stubs.then = {}
    stubs.written["steps"] = [stubs.plain()]
    stubs.written["loops"] = [point("stateless, lru eviction", 2.0), left_out("pensieve")]
    parts, out = figure(budget_s=50.0)
    assert [parts[name]["state"] for name in figure11.PARTS] == ["done", "done", "partly"]
    assert "left: pensieve:3" in out and len(parts["tokens"]["documents"]) == 1
    (part, loads, max_run_s) = stubs.asked[-1]
    assert (part, loads) == ("loops", ["stateless:2", "pensieve:3"]) and 40 < max_run_s < 44

    stubs.asked.clear()
    stubs.written["loops"] = [point("pensieve", 3.0)]
    parts, out = figure(documents=tmp_path / "h200x4")
    assert [one[:2] for one in stubs.asked] == [("loops", ["pensieve:3"])]
    assert "tokens, after 0 s: done before" in out and parts["loops"]["state"] == "done"
    names = sorted(path.name for path in tmp_path.glob("h200x4_*"))
    assert names == [
        f"h200x4_{name}.json"
        for name in (
            "open_llama-tiny_pensieve_3", "open_llama-tiny_stateless_1", "open_llama-tiny_stateless_2",
            "parallel_llama-tiny", "tokens_llama-tiny",
        )
    ]  # fmt: skip
    assert json.loads((tmp_path / names[0]).read_text("utf-8")) == point("pensieve", 3.0)


def test_a_void_point_is_measured_again(figure, stubs):
    stubs.then["loops"] = "exit 1"
    stubs.written["loops"] = [point("stateless", 1.0), point("pensieve", 3.0, is_void=True)]
    parts, _ = figure(status=1, parts="loops")
    assert parts["tokens"]["state"] == "not begun" and parts["loops"]["state"] == "failed"
    stubs.then.clear()
    stubs.written["loops"] = [point("pensieve", 3.0), point("stateless", 2.0)]
    parts, _ = figure(parts="loops")
    assert parts["loops"]["state"] == "done" and len(parts["loops"]["documents"]) == 3


def test_a_part_that_failed_comes_after_the_others(figure, stubs):
    stubs.then["steps"] = "exit 4"
    stubs.written["loops"] = [point("stateless", 1.0)]
    parts, out = figure(status=1)
    assert [part for part, *_ in stubs.asked] == ["tokens", "steps", "loops"]
    assert parts["steps"]["tries"][0]["failed"] == "ended with status 4"
    assert "failed, ended with status 4" in out
    stubs.asked.clear()
    figure(status=1)
    assert [part for part, *_ in stubs.asked] == ["loops", "steps"]


def test_loops_whose_start_took_all_their_time_have_not_failed(figure, stubs):
    """They end with status 1, because there is no point; a part without time left is not started."""
    stubs.then = {"loops": "exit 1", "tokens": "sleep 0.3", "steps": "sleep 0.3"}
    stubs.written["loops"] = [left_out("stateless"), left_out("pensieve")]
    parts, _ = figure(parts="loops")
    assert parts["loops"]["state"] == "partly" and "failed" not in parts["loops"]["tries"][0]
    stubs.asked.clear()
    script.FLAGS["budget_s"].value = 1.0
    call = script.Call(script.Progress({}), [("pensieve", 3.0)])
    call._start_s -= 0.96
    assert call.run("loops") and not stubs.asked
    assert call.progress.parts["loops"]["state"] == "not begun"


def test_points_are_kept_while_others_are_measured(figure, stubs, tmp_path, monkeypatch):
    """If the whole call is ended, the file has what was written before."""
    seen = []

    def run_with_limit(command, environment, limit_s, meanwhile):
        meanwhile()
        seen.append(json.loads((tmp_path / "figure11.json").read_text("utf-8")))
        return timed_process.ProcessResult(1.0, None, 0, "")

    monkeypatch.setattr(script, "run_with_limit", run_with_limit)
    stubs.written["loops"] = [point("stateless", 1.0)]
    figure(parts="loops")
    assert seen[0]["results"]["parts"]["loops"]["documents"] == [point("stateless", 1.0)]


def test_a_file_of_another_run_is_refused(figure, stubs, tmp_path):
    figure(parts="")
    with pytest.raises(ConfigError, match=r"--json.*same settings.*loops it has nothing.*--gpu_pages=9"):
        figure(parts="", gpu_pages=9)
    (tmp_path / "figure11.json").write_text('{"benchmark": "parallel"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--json.*this script wrote.*a document of parallel"):
        figure(parts="")


@pytest.mark.long
def test_tokens_of_two_devices(launch, compilation_cache, capsys, monkeypatch):
    """KV moves in every way and the tokens are right; both comparisons detect one wrong token."""
    kept = {}

    def different(*args):
        kept["args"] = args
        return real(*args)

    real = tokens.different
    monkeypatch.setattr(tokens, "different", different)
    flags = {"compilation_cache_dir": compilation_cache, "progress": False}
    assert launch("check_parallel", shared_llm=False, **flags) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert all(results["checks"].values()) and set(results["devices"]) == {"1", "2"}
    for figures in results["devices"].values():
        assert min(figures[name] for name in (*tokens._CHUNKS, "recomputed_tokens")) > 5
    reference, workload, one, other = kept["args"]
    output = other.outputs[-1]
    wrong = (*output.token_ids[:-1], (output.token_ids[-1] + 1) % 256)
    other.outputs[-1] = output.__class__(
        **{name: getattr(output, name) for name in output.__slots__} | {"token_ids": wrong}
    )
    assert real(reference, workload, one, other) == ([output.conversation_id], [])
    assert tokens.judge(reference, workload, other).num_wrong == 1
    checks = tokens.checks(results["devices"], {"2": tokens.Judged(1, 0)}, [output.conversation_id])
    assert [name for name, is_met in checks.items() if not is_met] == [
        "tokens are those of one device", "tokens are those of the dense reference"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tensor_parallel_size": 1}, "--tensor_parallel_size is 1.*at least 2"),
        ({"dtype": "bfloat16"}, "--dtype is 'bfloat16'.*float32"),
        ({"gpu_pages": 9}, "--gpu_pages is 9.*left out"),
        ({"num_conversations": 1}, "--num_conversations is 1.*at least 4"),
        ({"num_turns": 900}, "--num_turns is 900.*context of 2048"),
    ],
)
def test_tokens_that_cannot_be_checked(launch, values, says):
    with pytest.raises(ConfigError, match=says):
        launch("check_parallel", shared_llm=False, **values)


def test_heads_that_do_not_divide_become_one_for_each_device(launch, monkeypatch):
    monkeypatch.setattr(tokens, "measure", lambda count: pytest.fail("not asked for"))
    launch("run_figure11", shared_llm=False, parts="", **LOADS)
    monkeypatch.setattr(tokens, "PRESETS", dict(tokens.PRESETS))
    tokens.FLAGS["model"].value = "random:llama-tiny"
    tokens.fit_heads(4)
    assert tokens.FLAGS.model == "random:llama-tiny-4-kv-heads"
    fitted = tokens.PRESETS["llama-tiny-4-kv-heads"]
    assert (fitted.num_heads, fitted.num_kv_heads) == (8, 4)


@pytest.mark.long
def test_a_rehearsal_on_two_devices(launch, compilation_cache, capsys, monkeypatch, tmp_path):
    """All parts run for real; the document of a load point is like any other."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")  # as here, so that one store serves both
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = SMALL | {"compilation_cache_dir": compilation_cache, "documents": tmp_path / "cpu"}
    assert launch("run_figure11", shared_llm=False, **given) == 0
    parts = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["parts"]
    found = [(part["state"], len(part["tries"]), len(part["documents"])) for part in parts.values()]
    assert found == [("done", 1, 1), ("done", 1, 1), ("done", 1, 2)]
    assert all(parts["tokens"]["documents"][0]["results"]["checks"].values())
    (step,) = parts["steps"]["documents"][0]["results"]["variants"]["default"]["steps"].values()
    assert step["share_of_bound"] > 0
    points = sorted(map(str, tmp_path.glob("cpu_open_llama-tiny_*_6.json")))
    assert launch("compare_serving", shared_llm=False, documents=",".join(points)) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["systems"]) == {
        "pensieve", "stateless"
    }  # fmt: skip
