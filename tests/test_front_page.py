"""The README's first example runs twice unchanged, and the second run finds its history in the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pensieve_jax
from pensieve_jax import LLM
from tests.launching import ROOT
from tests.server.engine_process import front

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_example_runs_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compilation_cache: str,
) -> None:
    """It runs on a smaller engine, whose programs other tests have compiled."""

    def smaller(*, history: str) -> LLM:
        return LLM(config=front.config(compilation_cache), history=history, progress=False)

    section = README.partition("\n## Python\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (said,) = re.findall(r"`(recomputed_tokens=\d+)`", section)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pensieve_jax, "LLM", smaller)
    for is_second in (False, True):
        exec(compile(block, "README.md", "exec"), {})
        first_line = capsys.readouterr().out.splitlines()[0]
        assert (f" {said}," in first_line) is is_second, first_line
