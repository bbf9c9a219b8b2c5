"""The demo of cells: its pictures, and that every answer equals that of its sentence alone."""

from __future__ import annotations

import re


def test_it_runs(launch, capsys, tmp_path):
    plot = tmp_path / "cells.png"
    assert launch("demo_cells", shared_llm=False, plot=plot, progress="false") == 0
    shown = capsys.readouterr().out
    assert "12 of 12 translations equal those of the sentence alone" in shown
    lines = re.findall(r"^ *\d+ \((\d+) \+ (\d+)\)  (.*)$", shown, re.MULTILINE)
    assert len(lines) == 24
    for source, target, line in lines:
        assert re.fullmatch(r" *[e.]*[d.]*", line)
        assert (line.count("e"), line.count("d")) == (int(source), int(target))
    tasks, padded = (int(one) for one in re.findall(r"^(\d+) tasks", shown, re.MULTILINE))
    assert tasks < padded
    assert plot.stat().st_size > 1000
