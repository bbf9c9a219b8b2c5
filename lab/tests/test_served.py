"""A program's server process that does not start or does not end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pensieve_lab.serving import served


class Process:
    """Child process that prints lines, and ends when terminated, or only when killed."""

    def __init__(self, lines=(), *, ends=True) -> None:
        self.done: list[str] = []
        self._ends = ends
        self.stdout = Output(lines)

    def poll(self):
        return None

    def terminate(self) -> None:
        self.done.append("terminate")

    def kill(self) -> None:
        self.done.append("kill")
        self._ends = True

    def wait(self, timeout=None) -> int:
        if not self._ends:
            raise subprocess.TimeoutExpired("serve", timeout)
        return 3


class Output(list):
    def __init__(self, lines) -> None:
        super().__init__(lines)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Interrupted(Output):
    def __iter__(self):
        raise KeyboardInterrupt


def started(monkeypatch, process):
    commands = []

    def popen(command, **_):
        commands.append(command)
        return process

    monkeypatch.setattr(served.subprocess, "Popen", popen)
    found = served.ServedProcess(["--model=chat"])
    assert commands[0][0] == sys.executable and commands[0][-1] == "--model=chat"
    return found


def test_it_says_where_it_is_and_is_ended(monkeypatch):
    process = Process(["serving chat at http://127.0.0.1:81\n"])
    with started(monkeypatch, process) as server:
        assert server.address == "http://127.0.0.1:81"
    assert process.done == ["terminate"] and process.stdout.is_closed


def test_one_that_ends_before_it_is_ready_is_an_error(monkeypatch):
    with pytest.raises(served.ServerEndedError, match="status 3"):
        started(monkeypatch, Process(["nothing of interest\n"]))


def test_an_interrupt_during_the_start_leaves_no_process(monkeypatch):
    process = Process()
    process.stdout = Interrupted([])
    with pytest.raises(KeyboardInterrupt):
        started(monkeypatch, process)
    assert process.done == ["terminate"]


def test_one_that_does_not_end_is_killed_and_that_is_told(monkeypatch):
    process = Process(["http://127.0.0.1:81\n"], ends=False)
    server = started(monkeypatch, process)
    with pytest.raises(subprocess.TimeoutExpired):
        server.close()
    assert process.done == ["terminate", "kill"]
