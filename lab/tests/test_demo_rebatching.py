"""The demo of padded batches: its pictures, and that all answers equal those of the paged engine."""

from __future__ import annotations

import re

import pytest

from tests.launching import load

pytestmark = pytest.mark.long  # answers of both engines are compared in `rebatching/test_real_models`, too
demo = load("demo_rebatching")
FLAGS = {"shared_llm": False, "progress": "false"}


def test_it_runs(launch, capsys, tmp_path, compilation_cache):
    plot = tmp_path / "columns.png"
    flags = FLAGS | {"compilation_cache_dir": compilation_cache}
    assert launch("demo_rebatching", plot=plot, **flags) == 0
    shown = capsys.readouterr().out
    assert "12 of 12 answers equal" in shown
    pictures = re.findall(r"^(\w+): .*\n((?:row \d  \S+\n)+)span", shown, re.MULTILINE)
    assert [name for name, _ in pictures] == ["none", "shape", "embed"]
    table = dict(re.findall(r"^(none|shape|embed) +(\d+) ", shown, re.MULTILINE))
    for name, picture in pictures:
        rows = re.findall(r"row \d  (\S+)", picture)
        assert len(rows) == 4 and {len(row) for row in rows} == {int(table[name])}
        letters = "".join(rows).replace(".", "")
        prompts = re.sub("[^a-z]", "", letters)
        # The first token of a reply is a prompt's: of its prefill, or of a step that has the prompt in it.
        expected = {
            letter: num - (letter.lower() not in prompts)
            for letter, (_, num) in zip("ABCDEFGHIJKL", demo._QUERIES, strict=True)
        }
        assert {letter: letters.upper().count(letter) for letter in expected} == expected
        assert bool(prompts) == (name == "shape")
    assert int(table["embed"]) < int(table["none"]) and int(table["shape"]) < int(table["none"])
    assert plot.stat().st_size > 1000


def test_another_answer_is_found(launch, capsys, monkeypatch, compilation_cache):
    paged = demo.paged

    def wrong(vocab_size):
        answers = paged(vocab_size)
        return [(*answers[0][:-1], (answers[0][-1] + 1) % vocab_size), *answers[1:]]

    monkeypatch.setattr(demo, "paged", wrong)
    assert launch("demo_rebatching", compilation_cache_dir=compilation_cache, **FLAGS) == 1
    assert "11 of 12 answers equal" in capsys.readouterr().out
