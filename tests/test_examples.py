"""Programs of `examples/` run, on a smaller engine whose steps other tests have compiled."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import pensieve_jax
from pensieve_jax import LLM, EngineConfig
from pensieve_lab.serving.served import ServedProcess
from tests.launching import ROOT
from tests.server import conftest as served
from tests.server.conftest import chat_server  # noqa: F401  # a fixture

EXAMPLES = ROOT / "examples"


def run(name: str) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.fixture
def smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilation_cache: str) -> None:
    """Make the programs' engines one of `chat_server`'s sizes, in a directory of their own."""

    def make(model: str, *, config: EngineConfig, history: str | None = None) -> LLM:
        shared = served.engine_config(compilation_cache)
        if config.cache.num_gpu_pages < 64:  # this program wants little memory
            shared = EngineConfig(cache=config.cache, scheduler=shared.scheduler, runner=shared.runner)
        return LLM(model, config=shared, history=history, progress=False)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pensieve_jax, "LLM", make)


@pytest.mark.long
@pytest.mark.usefixtures("smaller")
def test_a_chat_remembers_and_does_so_after_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    run("chat")
    assert "Ada" in capsys.readouterr().out.rpartition("> What is my name?")[2]
    run("chat")
    again = capsys.readouterr().out
    assert "Hi!" not in again and "Ada" in again and "recomputed 0" not in again


@pytest.mark.long
@pytest.mark.usefixtures("smaller")
def test_streams_of_two_turns_come_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    run("stream")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("bob: ") for line in lines) > 1
    assert sum(line.startswith("cleo: ") for line in lines) > 1


@pytest.mark.long
@pytest.mark.usefixtures("smaller")
def test_a_fork_reuses_what_the_original_computed(capsys: pytest.CaptureFixture[str]) -> None:
    run("fork")
    out = capsys.readouterr().out
    assert "Paris" in out.rpartition("Where do I live?")[2]
    assert "reused 0 tokens" not in out


@pytest.mark.long
@pytest.mark.usefixtures("smaller")
def test_dropped_chunks_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    run("explain")
    out = capsys.readouterr().out
    assert "NO_HOST_MEMORY" in out and "Ada" in out.splitlines()[-1]
    assert "(0 tokens recomputed)" not in out


@pytest.mark.long
def test_the_openai_client(
    chat_server: ServedProcess,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["openai_client.py", f"{chat_server.address}/v1"])
    run("openai_client")
    lines = capsys.readouterr().out.splitlines()
    assert "Ada" in lines[1] and lines[2].endswith("tokens were cached") and lines[3]


def test_the_page_lists_every_program() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if f"]({path.name})" not in page] == []
