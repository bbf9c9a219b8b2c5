"""The example of docs/using.md runs unchanged, on a smaller engine and in its own directory."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from pensieve_jax import AsyncEngine
from tests.launching import ROOT
from tests.server.engine_process import front


@pytest.mark.long
def test_the_example_of_the_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compilation_cache: str,
) -> None:
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    section = page.partition("## Beside an event loop")[2]
    (example,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    start = functools.partial(AsyncEngine.start, config=front.config(compilation_cache), progress=False)
    monkeypatch.setattr(AsyncEngine, "start", start)
    exec(compile(example, "using.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "You are Ada." in said and "reused_gpu_tokens" in said
    assert (tmp_path / "chats.sqlite").exists()
