"""A command loads the steps that another one has compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, TINY_MODEL

_RUN = "from pensieve_jax.commands.main import main; main()"


def start(*arguments: str, cache: Path, typed: str = "") -> None:
    """Run a command to its end, with `cache` as the user's cache directory."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _RUN, *arguments],
        env={**environment, "XDG_CACHE_HOME": str(cache)},
        input=typed,
        stdout=subprocess.DEVNULL,
        text=True,
        check=True,
    )


@pytest.mark.long  # three starts
def test_the_second_command_compiles_nothing(tmp_path: Path) -> None:
    """Each program that is compiled is stored, so a start that stores none has compiled none."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}))
    cache = tmp_path / "cache"
    files = f"--input={source}", f"--output={tmp_path / 'out.jsonl'}"
    start("generate", TINY_MODEL, *files, cache=cache)
    stored = {path for path in cache.rglob("*") if path.is_file()}
    assert len(stored) > 20
    start("chat", TINY_MODEL, "--max_tokens=4", "--line_history=", cache=cache, typed="hello\n")
    code = (
        "import sys\n"
        "from pensieve_jax.commands.demo_run import DemoEngines\n"
        "engines = DemoEngines(sys.argv[1], sys.argv[2])\n"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, TINY_MODEL, str(cache / "pensieve_jax")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert {path for path in cache.rglob("*") if path.is_file()} == stored
