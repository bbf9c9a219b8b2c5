"""Lines of the product as they are executed, by `sys.monitoring`.

Owns: the monitor of this process, and the name of a line.
Does not know: tests.
Called by `mutation.recording`, and by started processes through `site/sitecustomize.py`.

Only code of the product reports lines, and each line once until lines are asked for anew, so this costs
little. A line is named by its file, the qualified name of its code and its distance from that code's first
line, so changes elsewhere in the file leave the name as it is. The module imports only the standard library,
since every process that a test starts imports it.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

LINES_FILE: Final = "MUTANTS_LINES_FILE"  # where a started process writes, with its process id appended
LINES_ROOT: Final = "MUTANTS_LINES_ROOT"
LINES_PACKAGES: Final = "MUTANTS_LINES_PACKAGES"
_TOOL_ID: Final = 3  # tests that interrupt at chosen lines take 4
_EVENTS: Final = sys.monitoring.events.LINE


class Line(NamedTuple):
    """An executed line, named so that changes elsewhere in its file do not matter."""

    file: str
    code: str
    offset: int


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that it contains."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


class LineMonitor:
    """Monitor of every module of some packages that is imported after its start."""

    def __init__(self, root: str, packages: Sequence[str], report: Callable[[Line], Any]) -> None:
        """Monitor packages of one root, and report each line."""
        self._root = os.path.join(root, "")
        self._folders = tuple(os.path.join(root, package, "") for package in packages)
        self._report = report

    def start(self) -> None:
        """Hook into imports: compiled modules pass through the loader's `get_code`."""
        sys.monitoring.use_tool_id(_TOOL_ID, "mutants")
        sys.monitoring.register_callback(_TOOL_ID, _EVENTS, self._line)
        loader: Any = importlib.machinery.SourceFileLoader
        get_code = loader.get_code

        def monitored(self_: Any, name: str) -> CodeType | None:
            code = get_code(self_, name)
            if code is not None and code.co_filename.startswith(self._folders):
                for part in code_objects(code):
                    sys.monitoring.set_local_events(_TOOL_ID, part, _EVENTS)
            return code

        loader.get_code = monitored

    def report_again(self) -> None:
        """Report lines that were reported before, too."""
        sys.monitoring.restart_events()

    def _line(self, code: CodeType, line: int) -> Any:
        file = code.co_filename.removeprefix(self._root)
        self._report(Line(file, code.co_qualname, line - code.co_firstlineno))
        return sys.monitoring.DISABLE


def write_lines() -> None:
    """Write the lines of this process to its file, if a test started it."""
    prefix = os.environ.get(LINES_FILE)
    if not prefix:
        return
    fd = os.open(f"{prefix}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(line: Line) -> None:
        os.write(fd, "\t".join(map(str, line)).encode() + b"\n")  # at once: the process may be killed

    packages = os.environ[LINES_PACKAGES].split(os.pathsep)
    LineMonitor(os.environ[LINES_ROOT], packages, write).start()


def read_lines(path: Path) -> set[Line]:
    """Return what one process wrote; the last line of a killed process may be incomplete."""
    found = set()
    for row in path.read_text("utf-8").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            file, code, offset = row.split("\t")
            found.add(Line(file, code, int(offset)))
    return found
