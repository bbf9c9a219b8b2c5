"""The client examples of the documentation work: curl commands and Python."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import pensieve_jax
from pensieve_jax import LLM
from pensieve_lab.serving.served import ServedProcess
from tests.launching import ROOT
from tests.server.engine_process import front

ADDRESS = "http://127.0.0.1:8000"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CLIENTS = ROOT / "docs" / "clients.md"
ANTHROPIC = ROOT / "docs" / "anthropic.md"
STRUCTURED = ROOT / "docs" / "structured_outputs.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


COMMANDS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(blocks(page, "sh"))
    if "curl " in block and ADDRESS in block
]


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
@pytest.mark.parametrize("block", COMMANDS)
def test_shell_commands_of_the_page_run(chat_server: ServedProcess, tmp_path: Path, block: str) -> None:
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.replace(ADDRESS, chat_server.address)],
        cwd=tmp_path,
        env={**os.environ, "CURL_HOME": str(tmp_path), "key": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip() and '"error": {' not in done.stdout


def run_python(block: str, served: ServedProcess, names: dict[str, Any], capsys: Any) -> None:
    """Run it, and compare its output with the comments after its prints."""
    capsys.readouterr()
    exec(compile(block.replace(ADDRESS, served.address), CLIENTS.name, "exec"), names)
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)


def test_the_clients_page_shows_curl_and_openai() -> None:
    assert sum(1 for one in COMMANDS if one.id and one.id.startswith(CLIENTS.name)) == 2
    assert sum("langchain" not in block for block in blocks(CLIENTS, "python")) == 6


def test_openai_examples_run(chat_server: ServedProcess, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks(CLIENTS, "python"):
        if "langchain" not in block:
            run_python(block, chat_server, names, capsys)
    names["client"].close()


@pytest.mark.skipif(importlib.util.find_spec("langchain_openai") is None, reason="needs langchain-openai")
def test_langchain_examples_run(chat_server: ServedProcess, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks(CLIENTS, "python") if "langchain" in block)
    run_python(block, chat_server, {}, capsys)


@pytest.mark.skipif(importlib.util.find_spec("anthropic") is None, reason="needs anthropic")
def test_the_example_of_anthropics_client_runs(
    chat_server: ServedProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks(ANTHROPIC, "python")
    run_python(block, chat_server, {}, capsys)


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance")
def test_the_examples_of_structured_output_run(
    chat_server: ServedProcess,
    compilation_cache: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def smaller(model: str) -> LLM:
        return LLM(model, config=front.config(compilation_cache), progress=False)

    by_library, by_http = blocks(STRUCTURED, "python")
    monkeypatch.setattr(pensieve_jax, "LLM", smaller)
    exec(compile(by_library, STRUCTURED.name, "exec"), {})
    assert capsys.readouterr().out.strip() in ("good", "bad")
    names: dict[str, Any] = {}
    program = by_http.replace(ADDRESS, chat_server.address)
    # Annotations are classes in the reader's program, too.
    exec(compile(program, STRUCTURED.name, "exec", dont_inherit=True), names)
    names["client"].close()
    assert isinstance(names["completion"].choices[0].message.parsed, names["Review"])
