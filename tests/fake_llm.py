"""An `LLM` on the engine tests' fake runner: everything between a caller and the device, without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pensieve_jax import LLM, EngineConfig
from pensieve_jax.text import Tokenizer, byte_tokenizer
from tests.engine.harness import Harness

TOKENIZER = byte_tokenizer()


def fake_llm(
    monkeypatch: pytest.MonkeyPatch, *, tokenizer: Tokenizer | None = TOKENIZER, path: Path | None = None
) -> tuple[LLM, Harness]:
    """Return an LLM and its engine's harness; `path` is a history file."""
    harness = Harness(tokenizer=tokenizer, path=path)
    return llm_of(monkeypatch, harness, tokenizer), harness


def llm_of(monkeypatch: pytest.MonkeyPatch, harness: Harness, tokenizer: Tokenizer | None = TOKENIZER) -> LLM:
    """Return an LLM on a harness's engine."""
    parts = SimpleNamespace(
        engine=harness.engine,
        runner=harness.runner,
        config=EngineConfig(),
        model_config=None,
        tokenizer=tokenizer,
    )
    monkeypatch.setattr("pensieve_jax.llm.assemble", lambda *_, **__: parts)
    return LLM(progress=False)
