"""`measure_first_hour`: what counts as a command's time, and which commands are measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve_lab.programs import measure_first_hour
from pensieve_lab.programs.measure_first_hour import (
    Place,
    StepFailedError,
    Times,
    commands,
    run_to_end,
    serve_one,
    size_of,
    tree_cpu_s,
)

SPIN = "import time\nwhile time.process_time() < 0.3: pass\n"
SERVER = f"""#!{sys.executable}
import http.server, signal, sys
assert sys.argv[1:] == ["serve", "--port=0"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{{}}")
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
    print(f"serving it at http://127.0.0.1:{{server.server_port}}", flush=True)
    server.serve_forever()
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})


def test_a_commands_processor_time_has_that_of_its_children(place: Place) -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}], check=True)"
    times = run_to_end([sys.executable, "-c", script], place)
    assert times.cpu_s > 0.3 and times.wall_s > 0.0


def test_a_running_trees_processor_time_has_that_of_its_children() -> None:
    script = f"{SPIN}\nprint('here', flush=True)\ninput()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert tree_cpu_s(process.pid) > 0.25  # ticks are rounded down
        process.communicate("\n")


def test_a_command_that_fails_is_reported_with_its_output(place: Place) -> None:
    with pytest.raises(StepFailedError, match=r"exit status 3\nno such model"):
        run_to_end(["sh", "-c", "echo no such model; exit 3"], place)


def test_a_server_is_timed_to_its_first_answer_and_stopped(place: Place) -> None:
    program = place.directory / "pensieve"
    program.write_text(SERVER)
    program.chmod(0o755)
    assert serve_one(place).cpu_s > 0.0


def test_a_server_that_does_not_serve_is_reported(place: Place) -> None:
    program = place.directory / "pensieve"
    program.write_text("#!/bin/sh\necho no memory\n")
    program.chmod(0o755)
    with pytest.raises(StepFailedError, match="did not serve:\nno memory"):
        serve_one(place)


def test_every_command_of_the_table_is_measured(tmp_path: Path) -> None:
    assert list(commands(tmp_path)) == ["serve", "chat", "generate", "demo", "cells"]
    compile((tmp_path / "cells.py").read_text(), "cells.py", "exec")
    steps = {"serve": {"cold": Times(2.04, 1.0)._asdict(), "warm": Times(1.0, 0.5)._asdict()}}
    assert measure_first_hour.rows(steps) == [["serve", 2.0, 1.0, 1.0, 0.5]]


def test_a_links_target_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    before = size_of(tmp_path)
    (tmp_path / "link").symlink_to("file")
    assert before == 1000 and size_of(tmp_path) == 1004
