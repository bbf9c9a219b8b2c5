"""The matrix of clients: its list, environments, processes, causes and tables."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from pensieve_jax import ConfigError
from pensieve_lab.client_matrix import environments
from pensieve_lab.client_matrix.catalogue import PROGRAMS, load_clients
from pensieve_lab.client_matrix.causes import Result, result_of
from pensieve_lab.client_matrix.environments import Environments, NotInstalledError
from pensieve_lab.client_matrix.report import ClientResults, counted, document, markdown, rows, summary
from pensieve_lab.client_matrix.running import Ended, NotStartedError, run_programs
from pensieve_lab.client_matrix.servers import given_address
from pensieve_lab.clients.recorder import Exchange

PROGRAM_FILE = """
import os, sys, threading
import trial

@trial.program("first", "passes")
def passes():
    print("noise")
    print("noise behind @trial {}")

@trial.program("tool", "fails")
async def fails():
    trial.check(False, {"calls": []})

@trial.program("other", "ends the process")
def ends():
    print("no more memory", file=sys.stderr, flush=True)
    os._exit(7)

@trial.program("other", "hangs")
def hangs():
    threading.Event().wait()

@trial.program("other", "comes last")
def last():
    trial.check((trial.url(), trial.model(), os.environ["EXTRA"]) == ("url", "model", "given"), sys.argv)

trial.main()
"""


@pytest.fixture
def programs(tmp_path):
    shutil.copy(PROGRAMS / "trial.py", tmp_path)
    path = tmp_path / "programs.py"
    path.write_text(PROGRAM_FILE)
    return [sys.executable, str(path)]


def test_programs_go_on_behind_one_that_hangs_or_ends_the_process(programs):
    found = {one.name: one for one in run_programs(programs, ["url", "model"], 5.0, {"EXTRA": "given"})}
    assert list(found) == [
        *("first: passes", "tool: fails", "other: ends the process", "other: hangs"),
        "other: comes last",
    ]
    assert found["first: passes"].problem is None and found["other: comes last"].problem is None
    assert found["tool: fails"].problem == "AssertionError: found \"{'calls': []}\""
    assert "status 7" in found["other: ends the process"].problem
    assert found["other: ends the process"].problem.endswith("no more memory")
    assert found["other: hangs"].is_late and "5 s" in found["other: hangs"].problem


def test_a_file_that_does_not_start_says_why(tmp_path):
    path = tmp_path / "programs.py"
    path.write_text("import a_module_that_is_missing")
    with pytest.raises(NotStartedError, match="a_module_that_is_missing"):
        list(run_programs([sys.executable, str(path)], ["url", "model"], 5.0, {}))


def exchange(status, answer):
    return Exchange("POST", "/v1/responses?x=1", "{}", status, "application/json", {}, answer)


REFUSED = '{"error": {"message": "leave it out", "code": "unsupported_parameter", "param": "tools"}}'
ENDED = Ended("tool: x", "Error: 400", False, 1.0)


@pytest.mark.parametrize(
    ("ended", "exchanges", "outcome", "cause"),
    [
        (Ended("tool: x", None, False, 1.0), [exchange(400, REFUSED)], "passed", ""),
        (
            ENDED,
            [exchange(200, "{}"), exchange(400, REFUSED)],
            "refused",
            "400 unsupported_parameter (tools)",
        ),
        (ENDED, [exchange(404, "no")], "refused", "404"),
        (
            ENDED,
            [exchange(500, '{"error": {"type": "api_error"}}')],
            "server error",
            "500 api_error (POST /v1",
        ),
        (ENDED, [exchange(200, "{}")], "answer", "Error: 400"),
        (ENDED, [], "client", "Error: 400"),
        (Ended("tool: x", "late", True, 9.0), [exchange(400, REFUSED)], "time limit", "late"),
    ],
)
def test_the_cause_is_found_in_the_answers(ended, exchanges, outcome, cause):
    result = result_of(ended, exchanges)
    assert result.outcome == outcome and result.cause.startswith(cause)


def test_every_file_of_programs_belongs_to_a_client():
    clients = load_clients()
    assert {client.programs.name for client in clients} == {
        path.name for path in PROGRAMS.glob("*_programs.*")
    }
    assert all(client.version[0].isdigit() for client in clients)
    assert len({client.slug for client in clients}) == len(clients)


def test_clients_are_chosen_by_name():
    assert [client.name for client in load_clients(["codex", "openai"])] == ["openai", "Codex CLI"]
    with pytest.raises(ConfigError, match="--clients"):
        load_clients(["opnai"])


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(environments.subprocess, "run", run)
    (client,) = load_clients(["Vercel AI SDK"])
    first = Environments(tmp_path, 9.0).command(client)
    assert first == ["node", str(tmp_path / "vercel" / "vercel_programs.mjs")]
    assert commands[0][:2] == ["npm", "install"] and (tmp_path / "vercel" / "trial.mjs").is_file()
    assert Environments(tmp_path, 9.0).command(client) == first and len(commands) == 1


def test_a_failed_installation_says_why_and_is_tried_again(tmp_path, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "No matching distribution\nfound")

    monkeypatch.setattr(environments.subprocess, "run", run)
    (client,) = load_clients(["openai"])
    for _ in range(2):
        with pytest.raises(NotInstalledError, match="status 1: No matching distribution found"):
            Environments(tmp_path, 9.0).command(client)


def found_results():
    first, second = load_clients(["openai", "anthropic"])
    passed, failed = Result("tool: x", "passed", "", 0.26), Result("tool: x", "answer", "no | call", 1.0)
    other = Result("first: y", "refused", "400 (tools)", 0.1)
    return [
        ClientResults(first, None, {"scripted": [passed, other], "chat": [failed, other]}),
        ClientResults(second, "pip ended with status 1"),
    ]


def test_what_passes_by_the_script_alone_fails_for_the_models_weakness():
    counts = counted(found_results())
    assert counts == {"scripted": {"passed": 1, "refused": 1}, "chat": {"weak model": 1, "refused": 1}}
    found = document(found_results())["clients"]
    assert found[0]["programs"][2]["outcome"] == "weak model" and found[0]["programs"][0]["seconds"] == 0.3
    assert found[1]["not_installed"] == "pip ended with status 1"


def test_the_tables_name_every_program_and_what_was_not_installed():
    found = rows(found_results())
    assert [row[4] for row in found] == ["passed", "refused", "weak model", "refused", "not installed"]
    assert summary(found_results())[1][3:] == ("0 of 2", "weak model", "1 weak model, 1 refused")
    assert "no \\| call" in markdown("abcdef", found)


def test_an_address_where_no_server_answers_is_refused():
    with socket.socket() as bound:  # bound, but it does not listen
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="--url"):
            given_address(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
    with pytest.raises(ConfigError, match="--url"):
        given_address("localhost")
