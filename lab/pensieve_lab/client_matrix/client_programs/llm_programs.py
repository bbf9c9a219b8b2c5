"""Programs of the command `llm`.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import trial
from trial import check, program

PLUGIN = """
def get_weather(city: str) -> str:
    "Return the weather in a city."
    return "sunny, 21 degrees"
"""
SCHEMA = "name, population int"


def run(*arguments: str) -> str:
    """Run the command with a model of this server, in a directory of its own."""
    command = [sys.executable, "-m", "llm", *arguments]
    environment = {**os.environ, "LLM_USER_PATH": _directory()}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
    )
    check(done.returncode == 0, done.stderr[-1500:])
    return done.stdout


def _directory() -> str:
    directory = Path(tempfile.gettempdir()) / f"llm-programs-{os.getpid()}"
    directory.mkdir(exist_ok=True)
    (directory / "extra-openai-models.yaml").write_text(
        f"- model_id: served\n  model_name: {trial.model()}\n  api_base: {trial.url()}\n"
        "  supports_tools: true\n  supports_schema: true\n",
        encoding="utf-8",
    )
    return str(directory)


@program("first", "llm -m MODEL")
def hello() -> None:
    check(run("-m", "served", "--key", trial.NO_KEY, trial.HELLO).strip(), "no text")


@program("turns", "llm -c")
def turns() -> None:
    run("-m", "served", "--key", trial.NO_KEY, trial.NAME)
    answer = run("-c", "--key", trial.NO_KEY, trial.ASK_NAME)
    check("Ada" in answer, answer)


@program("tool", "llm --functions")
def tool() -> None:
    answer = run("-m", "served", "--key", trial.NO_KEY, "--functions", PLUGIN, trial.ASK_WEATHER)
    check("sunny" in answer, answer)


@program("structured", "llm --schema")
def schema() -> None:
    answer = run("-m", "served", "--key", trial.NO_KEY, "--schema", SCHEMA, trial.FACTS)
    check('"population"' in answer, answer)


if __name__ == "__main__":
    trial.main()
