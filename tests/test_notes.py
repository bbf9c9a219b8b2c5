"""Notes of tests that pass reach the end of the terminal's output."""

from __future__ import annotations

import io

import pytest

from conftest import pytest_terminal_summary


def report(when: str, *properties: tuple[str, object]) -> pytest.TestReport:
    return pytest.TestReport(
        "a.py::t", ("a.py", 1, "t"), {}, "passed", None, when, user_properties=properties
    )


def summary(pytestconfig: pytest.Config, **stats: list[object]) -> str:
    out = io.StringIO()
    reporter = pytest.TerminalReporter(pytestconfig, out)
    reporter.stats = stats
    pytest_terminal_summary(reporter)
    return out.getvalue()


def test_a_note_is_shown_once(pytestconfig):
    """A report repeats its properties in every phase."""
    note = ("note", "3 of 5 odd")
    stats = {"passed": [report("call", note, ("other", 1))], "": [report("setup", note), object()]}
    text = summary(pytestconfig, **stats)
    assert text.count("a.py::t: 3 of 5 odd") == 1 and "other" not in text


def test_no_notes_no_section(pytestconfig):
    assert summary(pytestconfig, passed=[report("call")]) == ""
