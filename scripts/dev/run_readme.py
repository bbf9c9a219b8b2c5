"""Run the shell commands of README.md as a new user would. The exit status is 1 if one fails.

    python scripts/dev/run_readme.py
    python scripts/dev/run_readme.py --list   # the commands, and why some are not run

Commands are the lines of `sh` blocks, and after these the commands within sentences, such as `make demo`.
They run in a copy of the checkout, in a virtual environment of its own. It finds the dependencies in the
environment of this Python, so that pip downloads only what builds the package. Servers listen at a free port
instead of 8000. They are stopped by Ctrl-C: those of blocks when all blocks have run.

A command runs unless `NOT_RUN` has it with a reason. Python blocks are run by `tests/test_front_page.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from absl import flags

from pensieve_jax import PensieveError
from pensieve_jax.commands.launch import EXIT_FAILED, run

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[2]
PROGRAMS = ("curl", "make", "pensieve", "pip", "python")
"""Code within a sentence is a command if it begins with one of these."""
NOT_RUN = {"pensieve serve MODEL": "MODEL stands for a checkpoint of the reader"}
_BLOCK = re.compile(r"^```sh\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_ANY_BLOCK = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_PORT = "8000"
_READY = re.compile(r"^serving .* at http://", re.MULTILINE)
_POLL_S = 0.1
_STOP_S = 60.0
_INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT, 2)  # the last two are those of make
_SHOWN_LINES = 30


class CommandFailedError(PensieveError):
    """A command of the README failed, or took too long."""


class Command(NamedTuple):
    """A command of the README: its text on one line, and whether it is in a block of its own."""

    text: str
    is_block: bool

    @property
    def is_server(self) -> bool:
        """Whether the command serves until it is stopped."""
        return self.text.split()[:2] in (["pensieve", "serve"], ["make", "serve"])


def commands_of(page: str) -> list[Command]:
    """Return each command of a page once: those of blocks, then those within sentences."""
    lines = [line for block in _BLOCK.findall(page) for line in block.replace("\\\n", " ").splitlines()]
    found = [Command(text, True) for line in lines if (text := " ".join(_without_comment(line).split()))]
    for code in _CODE.findall(_ANY_BLOCK.sub("", page)):
        program, *rest = code.split()
        if program in PROGRAMS and rest:
            found.append(Command(" ".join(code.split()), False))
    firsts: dict[str, Command] = {}
    for command in found:
        firsts.setdefault(command.text, command)
    return list(firsts.values())


def _without_comment(line: str) -> str:
    """Cut a line of a shell at the first `#` that begins a word outside of quotes."""
    for match in re.finditer(r"(?<!\S)#", line):
        with contextlib.suppress(ValueError):  # a quote is open
            shlex.split(line[: match.start()])
            return line[: match.start()]
    return line


class Runner:
    """Runs commands in a directory, each within `limit_s` seconds, with servers at `port`."""

    def __init__(self, directory: Path, environment: Mapping[str, str], port: int, limit_s: float) -> None:
        self._directory, self._port, self._limit_s = directory, port, limit_s
        self._environment = {**environment, "SERVE_FLAGS": f"--port={port}"}  # of the Makefile
        self._servers: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def run(self, command: Command) -> None:
        """Run a command to its end, or start a server and wait for its address.

        Raises CommandFailedError with the end of the command's output.
        """
        log = Path(tempfile.mkstemp(dir=self._directory, suffix=".log")[1])
        text = command.text.replace(f":{_PORT}", f":{self._port}")
        if command.is_server and text.startswith("pensieve"):
            text = f"{text} --port={self._port}"
        with log.open("wb") as output:
            process = self._start(text, output)
        if command.is_server:
            self._servers.append((command.text, process, log))
            self._await_address(process, command.text, log)
        elif status := self._end_of(process, command.text, log):
            raise _failed(command.text, f"exit status {status}", log)

    def stop_servers(self) -> None:
        """Stop all servers as Ctrl-C does; raises CommandFailedError if one did not end as it should."""
        while self._servers:
            text, process, log = self._servers.pop(0)
            _signal(process, signal.SIGINT)
            status = self._end_of(process, text, log, _STOP_S)
            if status not in _INTERRUPTED:
                raise _failed(text, f"exit status {status} after Ctrl-C", log)

    def kill_servers(self) -> None:
        """Kill the servers that still run."""
        for _, process, _ in self._servers:
            _signal(process, signal.SIGKILL)
            process.wait()

    # Private methods

    def _start(self, text: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _end_of(
        self, process: subprocess.Popen[bytes], text: str, log: Path, limit_s: float | None = None
    ) -> int:
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()
            raise _failed(text, f"no end within {limit_s:g} s", log) from None

    def _await_address(self, process: subprocess.Popen[bytes], text: str, log: Path) -> None:
        until_s = time.monotonic() + self._limit_s
        while not _READY.search(log.read_text("utf-8", "replace")):
            if process.poll() is not None:
                raise _failed(text, f"exit status {process.returncode} before it served", log)
            if time.monotonic() > until_s:
                raise _failed(text, f"no address within {self._limit_s:g} s", log)
            time.sleep(_POLL_S)


def _failed(text: str, problem: str, log: Path) -> CommandFailedError:
    last = log.read_text("utf-8", "replace").splitlines()[-_SHOWN_LINES:]
    return CommandFailedError("\n".join([f"{text}: {problem}", *last]))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def checkout_copy() -> Iterator[Path]:
    """Yield a temporary copy of this checkout's files, but of those alone that a user needs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", ":!lab", ":!tests"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="pensieve-readme-") as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # not a file that was deleted and is not committed yet
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def new_environment(directory: Path) -> dict[str, str]:
    """Create `.venv` in a directory, and return the variables of a shell that uses it.

    Its Python finds the packages of this Python, but none that `.pth` files add, as an editable install does.
    """
    base = str(getattr(sys, "_base_executable", sys.executable))
    venv = directory / ".venv"
    subprocess.run([base, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = venv / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')  # the pip of this Python, for the new environment
    pip.chmod(0o755)
    (directory / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    return {
        **{name: value for name, value in os.environ.items() if name not in left_out},
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHON": base,  # with which `make` updates the environment
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(directory / ".cache"),
        "CURL_HOME": str(directory),
    }


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def run_all(commands: list[Command], runner: Runner) -> None:
    """Run the commands and print the seconds of each; raises CommandFailedError at the first that fails."""
    try:
        for command in commands:
            if not command.is_block:  # each stands for itself
                runner.stop_servers()
            began_s = time.monotonic()
            runner.run(command)
            print(f"{time.monotonic() - began_s:6.1f} s  {command.text}", flush=True)
        runner.stop_servers()
    finally:
        runner.kill_servers()


def main() -> int:
    """Run the commands, or list them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background; servers would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    found = commands_of((ROOT / "README.md").read_text(encoding="utf-8"))
    if left := NOT_RUN.keys() - {command.text for command in found}:
        print(f"run_readme: README.md has no command {', '.join(sorted(left))}; remove it from NOT_RUN")
        return EXIT_FAILED
    to_run = [command for command in found if command.text not in NOT_RUN]
    for text, reason in NOT_RUN.items():
        print(f"not run   {text}: {reason}")
    if FLAGS.list:
        print("\n".join(f"run       {command.text}" for command in to_run))
        return 0
    with checkout_copy() as directory:
        runner = Runner(directory, new_environment(directory), free_port(), FLAGS.limit_s)
        try:
            run_all(to_run, runner)
        except CommandFailedError as error:
            print(f"run_readme: {error}")
            return EXIT_FAILED
    return 0


def define_flags() -> None:
    """Define the flags of this script."""
    flags.DEFINE_boolean("list", False, "List the commands instead of running them.")
    flags.DEFINE_float("limit_s", 600.0, "Seconds that a command may take.", lower_bound=0.0)


if __name__ == "__main__":
    define_flags()
    run(main)
