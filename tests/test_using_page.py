"""The examples of docs/using.md run one after the other, on a smaller engine, in their own directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import pensieve_jax
from pensieve_jax import LLM
from tests.launching import ROOT
from tests.server.engine_process import front

PAGE = ROOT / "docs" / "using.md"


@pytest.mark.long
def test_the_examples_of_the_page_run_in_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compilation_cache: str,
) -> None:
    """One once named a missing directory, and later ones began conversations that existed already."""

    def smaller(model: str, *, config: Any, history: str) -> LLM:
        assert history and isinstance(config, pensieve_jax.EngineConfig)
        return LLM(model, config=front.config(compilation_cache), history=history, progress=False)

    page, _, rest = PAGE.read_text(encoding="utf-8").partition("## Beside an event loop")
    pieces = re.findall(r"```python\n(.*?)```", page + rest.partition("\n## ")[2], re.DOTALL)
    assert len(pieces) == 4, "the one of the event loop has a test of its own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pensieve_jax, "LLM", smaller)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, piece in enumerate(pieces):
            exec(compile(piece, f"using.md, piece {number}", "exec"), names)
    finally:
        names["llm"].close()
    assert "Ada" in capsys.readouterr().out
