"""Ctrl-C at chosen lines of this project's own code, through Python's line monitoring.

A trace function (`sys.settrace`) could interrupt only once: Python removes it when it raises. Here a second
interrupt can come during the cleanup after the first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pensieve_jax

PACKAGE = str(Path(pensieve_jax.__file__).parent)
_TOOL = 4  # not used by debuggers, profilers or coverage

type Line = tuple[str, int]
"""A file of the package, and a line of it."""


class Interruption:
    """Raises KeyboardInterrupt at given lines while it is entered, counted from 1 as they run.

    Attributes:
        num_lines: lines that have run.
        first: by line, the number at which it ran first.
        come: interrupts so far.
    """

    def __init__(self, *at: int) -> None:
        self.num_lines = 0
        self.first: dict[Line, int] = {}
        self.come: list[Line] = []
        self._at = frozenset(at)

    def __enter__(self) -> Interruption:
        sys.monitoring.use_tool_id(_TOOL, "interrupts")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._on_line)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)
        return self

    def __exit__(self, *_: object) -> None:
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.NO_EVENTS)
        sys.monitoring.free_tool_id(_TOOL)

    def _on_line(self, code: CodeType, line: int) -> Any:
        if not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        self.num_lines += 1
        where = code.co_filename.removeprefix(PACKAGE), line
        self.first.setdefault(where, self.num_lines)
        if self.num_lines in self._at:
            self.come.append(where)
            raise KeyboardInterrupt
        return None
