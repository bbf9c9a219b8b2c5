"""A program on its own terminal: typed input, and shown output."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.deadlines import TIMEOUT_S

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PASTE, PASTED = "\x1b[200~", "\x1b[201~"  # a terminal puts these around pasted text


class Terminal:
    """Runs the program while it is entered.

    Attributes:
        shown: all output so far, without control sequences.
        status: exit status of the program, once `wait` has returned.
    """

    def __init__(
        self, command: Sequence[str], *, root: Path, environment: Mapping[str, str], output: str | None = None
    ) -> None:
        """Create it; `output` is a file that takes the program's output in place of the terminal."""
        self.shown = ""
        self.status: int | None = None
        self._master, slave = os.openpty()
        # A session leader that opens a terminal is controlled by it, so it gets Ctrl-C.
        name = os.ttyname(slave)
        # In a shell's background job, Ctrl-C is ignored, and programs inherit that.
        heeds = ["env", "--default-signal=INT"]
        script = f"exec {shlex.join([*heeds, *command])} <{name} >{output or name} 2>{name}"
        self._process = subprocess.Popen(
            ["sh", "-c", script], cwd=root, env={**environment, "TERM": "xterm"}, start_new_session=True
        )
        self._slave = slave  # open, so that reading never fails before the program is there

    def type(self, keys: str) -> None:
        """Type like a person; return at once."""
        os.write(self._master, keys.encode())

    def type_ahead(self, keys: str) -> None:
        """Type keys, one of them Enter, while the program does not read; return once they have arrived."""
        self.type(keys)
        pending = bytearray(4)
        while fcntl.ioctl(self._slave, termios.FIONREAD, pending) or not any(pending):
            select.select([], [], [], 0.01)

    def interrupt(self) -> None:
        """Type Ctrl-C once the program waits for a key.

        Python's readline misses one that comes before, or together with a key, so it is typed once the
        program has slept in one call for a while.
        """
        process = Path(f"/proc/{self._process.pid}")
        before, now = -1, _num_switches(process)
        while before != now or not _waits_for_input(process):
            select.select([], [], [], 0.1)
            before, now = now, _num_switches(process)
        self.type("\x03")

    def see(self, words: str) -> str:
        """Wait until these words appear after the ones seen before; return the output up to them."""
        start = len(self.shown)
        while words not in self.shown[start:]:
            self._read()
        end = self.shown.index(words, start) + len(words)
        seen, self._rest = self.shown[start:end], self.shown[end:]
        self.shown = self.shown[:end]
        return seen

    def see_something(self) -> None:
        """Wait until there is output other than blanks."""
        start = len(self.shown)
        while not self.shown[start:].strip():
            self._read()

    def wait(self) -> int:
        """Wait until the program ends; return its status."""
        self.status = self._process.wait(TIMEOUT_S)
        while select.select([self._master], [], [], 0)[0]:
            self._read()
        return self.status

    _rest = ""

    def _read(self) -> None:
        if self._rest:
            self.shown, self._rest = self.shown + self._rest, ""
            return
        deadline_s = time.monotonic() + TIMEOUT_S
        while not select.select([self._master], [], [], 1)[0]:
            assert self._process.poll() is None, f"it ended; shown: {self.shown[-300:]!r}"
            assert time.monotonic() < deadline_s, f"nothing more; shown: {self.shown[-300:]!r}"
        text = os.read(self._master, 1 << 16).decode(errors="replace")
        self.shown += _CONTROLS.sub("", text).replace("\r\n", "\n")

    def __enter__(self) -> Self:
        """Start the program and return this terminal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the program if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)


def _num_switches(process: Path) -> int:
    """Return how often it has gone to sleep."""
    status = (process / "status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[1])


def _waits_for_input(process: Path) -> bool:
    """Tell whether it sleeps in a call that waits for files, as far as the kernel shows."""
    where = (process / "wchan").read_text()
    is_asleep = (process / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    return is_asleep and (where in ("", "0") or "poll" in where or "select" in where)
