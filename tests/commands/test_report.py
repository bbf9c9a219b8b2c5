"""The JSON document of a benchmark: programs always get it, a terminal only on request."""

from __future__ import annotations

import sys

import pytest
from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands import report

LINE = '{"benchmark": "x"}'


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return what `print_document` prints, by flags, on a terminal or not."""

    def printed(*arguments, is_terminal):
        values = flags.FlagValues()
        values["json"] = report._DocumentFlag()
        values(["test", *arguments])
        monkeypatch.setattr(report.flags, "FLAGS", values)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
        try:
            report.print_document(LINE)
        finally:
            out = capsys.readouterr().out.splitlines()
        return out

    return printed


def test_programs_get_the_document_as_the_last_line(printed):
    assert printed(is_terminal=False) == [LINE]
    assert printed("--json", is_terminal=False) == [LINE]
    assert printed("--nojson", is_terminal=False) == []


def test_a_terminal_gets_it_on_request(printed):
    (line,) = printed(is_terminal=True)
    assert "--json" in line and "--json=FILE" in line and LINE not in line
    assert printed("--json", is_terminal=True) == [LINE]
    assert printed("--nojson", is_terminal=True) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_file_gets_it_and_programs_too(printed, tmp_path, is_terminal):
    path = tmp_path / "document.json"
    assert printed(f"--json={path}", is_terminal=is_terminal) == ([] if is_terminal else [LINE])
    assert path.read_text() == f"{LINE}\n"


def test_an_invalid_file_is_refused_before_the_work(printed, tmp_path):
    with pytest.raises(flags.IllegalFlagValueError, match=r"--json.*a file in a directory that exists"):
        printed(f"--json={tmp_path / 'missing' / 'x.json'}", is_terminal=True)


def test_a_document_that_cannot_be_written_is_printed(printed, monkeypatch, tmp_path, capsys):
    """It may be the result of hours of work."""
    monkeypatch.setattr(
        report.Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
    )
    shown = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: shown.append(words[0]))
    with pytest.raises(ConfigError, match=r"--json is .*document\.json.*; full"):
        printed(f"--json={tmp_path / 'document.json'}", is_terminal=True)
    assert shown == [LINE]
