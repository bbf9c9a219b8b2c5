"""`pensieve`: its list, its version, unknown commands, and that none of this waits for JAX."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys

import pytest

from pensieve_jax.commands import launch
from pensieve_jax.commands.main import COMMANDS, main
from tests.launching import ROOT, load

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def pensieve(monkeypatch, capsys):
    """Run it in this process without starting a command; return status, output and errors."""

    def pensieve(*arguments):
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pensieve", *arguments])
        monkeypatch.setattr(launch, "run", lambda command: sys.exit(f"runs {command.__module__}"))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    yield pensieve
    for number, handler in before.items():  # `serve` ignores SIGHUP
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "arguments", [(), ("help",), ("help", "nope"), ("--help",), ("-h",), ("--helpfull",), ("--helpshort",)]
)
def test_every_command_is_listed(pensieve, arguments):
    status, out, err = pensieve(*arguments)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_may_be_requested_in_words(pensieve, monkeypatch, name):
    monkeypatch.setattr(load(name), "define_flags", lambda: None)
    assert pensieve("help", name)[0] == f"runs pensieve_jax.commands.{name}"
    assert sys.argv == [f"pensieve {name}", "--help"]


def test_version(pensieve):
    assert pensieve("--version") == (0, f"{importlib.metadata.version('pensieve-jax')}\n", "")


@pytest.mark.parametrize("name", ["nope", "main", "--model=x", "Chat"])
def test_an_unknown_command_is_one_line_and_status_2(pensieve, name):
    status, out, err = pensieve(name, "--help")
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert all(command in err for command in (repr(name), *COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_help_flags_and_main(pensieve, monkeypatch, name):
    module = load(name)
    monkeypatch.setattr(module, "define_flags", lambda: None)
    assert pensieve(name, "--model=x") == (f"runs pensieve_jax.commands.{name}", "", "")
    assert sys.argv == [f"pensieve {name}", "--model=x"]
    assert f"pensieve {name}" in module.__doc__, "the help shows how it is started"


def test_the_list_waits_for_no_jax():
    """Only commands that compute wait for two seconds of imports."""
    code = (
        "import sys; from pensieve_jax.commands.main import main\n"
        "try: main()\nexcept SystemExit as ended: print(ended.code, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_help_of_a_command_through_a_pipe_that_closes():
    """In `pensieve chat --help | head -3` the reader leaves before the rest is written."""
    command = f"{sys.executable} -c 'from pensieve_jax.commands.main import main; main()' chat --helpfull"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 3; exit ${{PIPESTATUS[0]}}"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 141) and done.stderr == ""
    assert done.stdout.splitlines()[0] == "Chat in the terminal, with streamed replies."
    assert len(done.stdout.splitlines()) == 3
