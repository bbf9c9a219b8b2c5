"""Many starts of launchers: one process imports what takes seconds, and forks for each start.

A forked process has parsed no flag and started no device; it exits as a separate process does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_FORKS = """
import json, os, runpy, sys, tempfile, traceback
from pensieve_jax import LLM  # with all that takes seconds

def begin(script, arguments, stdout, stderr):
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    sys.argv = [script, *arguments]
    try:
        if script == "-c":
            sys.argv = arguments
            exec(compile(arguments[0], "<code>", "exec"), {"__name__": "__main__"})
        else:
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

done = []
for script, *arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        if not (pid := os.fork()):
            begin(script, arguments, stdout, stderr)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
        done.append([status, *texts])
json.dump(done, sys.stdout)
"""


class Done(NamedTuple):
    """Result of a start, named as in `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def start_all(
    commands: Sequence[tuple[str, ...]], *, root: Path, environment: Mapping[str, str]
) -> dict[tuple[str, ...], Done]:
    """Run each command separately in `root`: a script and its arguments, or "-c", code and arguments."""
    forks = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS],
        cwd=root,
        env=environment,
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {command: Done(*done) for command, done in zip(commands, json.loads(forks.stdout), strict=True)}
