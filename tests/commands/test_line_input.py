"""Typing on a terminal: long lines, recalled ones, pasted text, and the file of lines."""

from __future__ import annotations

import json
import os
import readline
import stat
import sys

import pytest

from pensieve_jax import InvalidRequestError
from pensieve_jax.commands import line_input
from pensieve_jax.commands.line_input import LineHistory
from tests.commands.terminal import PASTE, PASTED, Terminal
from tests.launching import ROOT

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
_READS = """
import sys
from pathlib import Path
from pensieve_jax import InvalidRequestError
from pensieve_jax.commands.line_input import LineInput
lines = LineInput(Path(sys.argv[1]), ["/help", "/history", "/regenerate"])
while True:
    try:
        line = lines.read("> ")
    except EOFError:
        break
    except InvalidRequestError as error:
        print("refused", error.limit, flush=True)
        continue
    print("got", len(line), ascii(line[:40]), flush=True)
"""
_ANSWERS = """
import sys
from pensieve_jax.commands.line_input import LineInput
with LineInput(None) as lines:
    for number in (1, 2):
        print("got", ascii(lines.read(f"{number}> ")), flush=True)
        print("the reply begins", flush=True)
        open(sys.argv[1]).close()  # waits until the test opens the other end
        print("and ends", flush=True)
print("left", ascii(input("now> ")), flush=True)
"""
needs_gnu_readline = pytest.mark.skipif(
    "libedit" in (readline.__doc__ or ""), reason="this Python's readline is libedit"
)


def expect(terminal, keys, words):
    """Type, and wait for the echo and the next prompt: earlier input is no longer edited."""
    terminal.type(keys)
    terminal.see(f"got {words}")
    terminal.see("> ")


@pytest.fixture
def terminal(tmp_path):
    """Return a function that starts a program which prints what it reads."""

    def start(output=None):
        command = [sys.executable, "-c", _READS, str(tmp_path / "state" / "lines")]
        return Terminal(command, root=ROOT, environment=ENVIRONMENT, output=output)

    return start


def test_a_line_has_no_limit(terminal):
    with terminal() as one:
        one.see("> ")
        expect(one, "x" * 10_000 + "\r", "10000 ")


def test_a_line_is_edited_and_recalled_in_this_session_and_the_next(terminal, tmp_path):
    up, left = "\x1b[A", "\x1b[D"
    with terminal() as one:
        one.see("> ")
        expect(one, "hell there" + left * 6 + "o\r", "11 'hello there'")
        expect(one, "and more\r", "8 ")
        expect(one, up + up + "!\r", "12 'hello there!'")
        one.type("\x04")
        assert one.wait() == 0
    path = tmp_path / "state" / "lines"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        "hello there",
        "and more",
        "hello there!",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with terminal() as two:
        two.see("> ")
        expect(two, up + "\r", "12 'hello there!'")


@needs_gnu_readline
def test_pasted_lines_are_one_message_and_so_are_continued_ones(terminal, tmp_path):
    with terminal() as one:
        one.see("> ")
        expect(one, f"{PASTE}first\rsecond\rthird{PASTED}\r", r"18 'first\nsecond\nthird'")
        one.type("a\\\r")
        one.see("... ")
        expect(one, "b\r", r"3 'a\nb'")
    with terminal() as two:
        two.see("> ")
        expect(two, "\x1b[A\x1b[A\r", r"18 'first\nsecond\nthird'")  # each is one line of the history


def test_what_is_typed_during_a_reply_is_hidden_and_begins_the_next_line(tmp_path):
    fifo = tmp_path / "go_on"
    os.mkfifo(fifo)
    with Terminal([sys.executable, "-c", _ANSWERS, str(fifo)], root=ROOT, environment=ENVIRONMENT) as one:
        one.see("1> ")
        one.type("hello\r")
        one.see("the reply begins\n")
        one.type_ahead("thanks\rwhat is\x1b[A my nane\x7f\x7fme")  # with an arrow, and a mistake mended
        fifo.write_text("")
        assert one.see("2> ") == "and ends\n2> "
        one.see("my name")
        one.type("?\r")
        one.see(r"got 'thanks\nwhat is my name?'")
        one.see("the reply begins\n")
        one.type_ahead("unfinished\rand more\r")
        fifo.write_text("")
        assert one.see("now> ") == "and ends\nnow> ", "nothing is sent by itself"
        one.type("shown\r")
        one.see("left 'shown'")


def test_tab_completes_commands(terminal):
    with terminal() as one:
        one.see("> ")
        expect(one, "/reg\t\r", "11 '/regenerate'")


def test_a_line_that_the_terminal_cut_is_refused(terminal, tmp_path):
    """The output goes to a file, so only the terminal's own editing is active."""
    output = tmp_path / "output"
    with terminal(str(output)) as one:
        one.type("short\n" + "x" * 5000 + "\n\x04")
        assert one.wait() == 0
    assert "got 5 'short'" in output.read_text()
    assert "refused shorter than the 4096 bytes" in output.read_text()


def test_the_file_of_lines_is_shortened_and_repaired(tmp_path, monkeypatch):
    monkeypatch.setattr(line_input, "MAX_NUM_KEPT", 3)
    path = tmp_path / "lines"
    path.write_text('"a"\nnot json\n7\n' + "".join(f'"{i}"\n' for i in range(7)))
    path.chmod(0o644)
    assert LineHistory(path).lines == ["4", "5", "6"]
    assert path.read_text() == '"4"\n"5"\n"6"\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_invalid_file_is_refused_and_one_that_disappears_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="--line_history"):
        LineHistory(tmp_path / "file" / "lines")
    history = LineHistory(tmp_path / "gone" / "lines")
    (tmp_path / "gone" / "lines").unlink()
    (tmp_path / "gone").rmdir()
    history.add("lost")
