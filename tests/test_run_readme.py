"""`scripts/dev/run_readme.py`: which commands a page has, and that one that fails is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deadlines import TIMEOUT_S
from tests.launching import ROOT, load

run_readme = load("scripts.dev.run_readme")

PAGE = """
`make serve` and `pensieve
chat` do it; `chat`, `--port` and `pensieve` are no commands.
```sh
pip install .     # `make lint` in a comment
# a comment

curl http://127.0.0.1:8000 \\
    -d 'a # b'
```
```python
print("`make test`")
```
Again: `make serve`, and `pip install .`.
```sh
pensieve serve --history=a
```
"""
SERVER = """#!/bin/sh
trap 'exit 130' INT
echo "serving it at http://127.0.0.1:${2#--port=}" > here.txt
cat here.txt
while true; do read line < pipe; done
"""


def texts(page: str) -> list[str]:
    return [command.text for command in run_readme.commands_of(page)]


def test_commands_of_blocks_come_first_and_each_once() -> None:
    assert texts(PAGE) == [
        "pip install .",
        "curl http://127.0.0.1:8000 -d 'a # b'",
        "pensieve serve --history=a",
        "make serve",
        "pensieve chat",
    ]


def test_servers_are_those_commands_that_serve() -> None:
    assert [one.text for one in run_readme.commands_of(PAGE) if one.is_server] == [
        "pensieve serve --history=a",
        "make serve",
    ]


def test_the_readme_has_the_commands_that_are_not_run() -> None:
    found = texts((ROOT / "README.md").read_text(encoding="utf-8"))
    assert run_readme.NOT_RUN.keys() <= set(found)
    assert {'pip install ".[server]"', "make demo", "make serve"} <= set(found)


@pytest.fixture
def runner(tmp_path: Path):
    """Yield a runner whose `pensieve serve` is a script; a test may replace it."""
    program = tmp_path / "pensieve"
    program.write_text(SERVER)
    program.chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    runner = run_readme.Runner(tmp_path, environment, 8123, TIMEOUT_S)
    yield runner
    runner.kill_servers()


def command(text: str, is_block: bool = True):
    return run_readme.Command(text, is_block)


def test_a_server_runs_beside_later_commands_and_ends_before_those_in_sentences(
    runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        command("pensieve serve"),
        command("grep -q 127.0.0.1:8000 here.txt"),
        command("rm pipe here.txt", is_block=False),
    ]
    run_readme.run_all(commands, runner)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == [one.text for one in commands]


def test_a_command_that_fails_is_reported_with_its_output(runner) -> None:
    with pytest.raises(run_readme.CommandFailedError, match=r"exit status 3\nno such page"):
        run_readme.run_all([command("echo no such page; exit 3")], runner)


def test_a_failing_part_of_a_pipe_counts(runner) -> None:
    with pytest.raises(run_readme.CommandFailedError, match="exit status 1"):
        run_readme.run_all([command("false | cat")], runner)


def test_a_server_that_ends_early_is_reported(runner, tmp_path: Path) -> None:
    (tmp_path / "pensieve").write_text("#!/bin/sh\necho no memory\n")
    with pytest.raises(run_readme.CommandFailedError, match=r"exit status 0 before it served\nno memory"):
        run_readme.run_all([command("pensieve serve")], runner)


def test_a_server_that_died_before_ctrl_c_is_reported(runner, tmp_path: Path) -> None:
    (tmp_path / "pensieve").write_text("#!/bin/sh\necho serving it at http://here\nexit 1\n")
    with pytest.raises(run_readme.CommandFailedError, match="exit status 1 after Ctrl-C"):
        run_readme.run_all([command("pensieve serve")], runner)


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    runner = run_readme.Runner(tmp_path, os.environ, 8123, 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(run_readme.CommandFailedError, match="no end within"):
        runner.run(command("cat pipe"))
