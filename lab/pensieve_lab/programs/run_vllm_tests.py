"""Runs vLLM's own tests of its HTTP routes against a server, and sorts the failures by cause.

    python -m pensieve_lab.programs.run_vllm_tests --sdist=vllm-0.33.0 --directory=/tmp/clients

`--sdist` is the unpacked source distribution of vLLM, of 0.33.0 or newer, from the package index. Its tests
are copied, with the names of their models replaced. What they import of vLLM is empty. Their server is one
that runs already: the scripted model's, or the one at `--url`. The packages of the tests go to an
environment below `--directory`. Many tests need vLLM's classes or a large model, so their number is not a
score. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from absl import flags
from tqdm import tqdm

from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.client_matrix.environments import Environments
from pensieve_lab.client_matrix.report import markdown
from pensieve_lab.client_matrix.servers import SCRIPTED, Target, define_server_flags, given, started
from pensieve_lab.scripted.model import make_model
from pensieve_lab.vllm_tests.copying import copy_tests, load_selection
from pensieve_lab.vllm_tests.outcomes import TestResult, result_of

FLAGS = flags.FLAGS
_MODEL: Final = "scripted"
SCRIPT: Final = Path(__file__).parents[1] / "vllm_tests" / "script.toml"
_SIZES: Final = (
    *("--dtype=float32", "--gpu_pages=2000", "--max_num_running=8", "--token_buckets=16,512"),
    "--max_position_embeddings=8192",  # what a test of the tokenizer's route expects
)
_PACKAGES: Final = (
    *(
        "pytest==9.1.1",
        "pytest-asyncio==1.4.0",
        "pytest-timeout==2.4.0",
        "openai==3.57.0",
        "anthropic==2.14.0",
    ),
    *("httpx", "requests", "jsonschema", "regex", "numpy", "pydantic", "transformers", "jinja2"),
    "typing-extensions",
)


@contextlib.contextmanager
def server(directory: Path) -> Iterator[Target]:
    """Yield the server at `--url`, or one with a scripted model."""
    if FLAGS.url:
        yield given(directory)
        return
    tokenizer = directory / "vllm_tests_model"
    tokenizer.mkdir(exist_ok=True)
    make_model(tokenizer, SCRIPT)
    with started(SCRIPTED, [*_SIZES, f"--script={SCRIPT}"]) as address:
        yield Target(address, _MODEL, tokenizer)


def run_tests(python: Path, address: str, model: str, tokenizer: Path) -> list[TestResult]:
    """Run all selected files, one process each, and return the result of every test."""
    selection = load_selection()
    results: list[TestResult] = []
    with tempfile.TemporaryDirectory() as name:
        paths = copy_tests(Path(FLAGS.sdist), Path(name), selection.files, model)
        found = Path(name) / "results.jsonl"
        with tqdm(paths, desc="vLLM's tests", disable=None) as bar:
            for path in bar:
                bar.set_postfix_str(Path(path).name)
                lines = run_file([str(python), "-m", "pytest"], path, Path(name), found, address, tokenizer)
                mine = [result_of(line, selection) for line in lines]
                counts = Counter(result.outcome for result in mine)
                tqdm.write(f"{path}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
                results += mine
    return results


def run_file(
    pytest: Sequence[str], path: str, directory: Path, found: Path, address: str, tokenizer: Path
) -> list[dict[str, Any]]:
    """Run one test file, and return the lines that the plugin wrote."""
    found.unlink(missing_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {
        **inherited,
        "VLLM_TESTS_URL": address,
        "VLLM_TESTS_TOKENIZER": str(tokenizer),
        "VLLM_TESTS_RESULTS": str(found),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={FLAGS.timeout_s:g}", "--rootdir=."]
    with contextlib.suppress(subprocess.TimeoutExpired):  # what ran before is in the file
        subprocess.run(
            [*pytest, *options, path],
            cwd=directory,
            env=environment,
            capture_output=True,
            check=False,
            timeout=FLAGS.file_s,
        )
    if not found.is_file():
        return [{"test": path, "outcome": "not collected", "message": "no result", "used": [], "errors": []}]
    return [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    directory = Path(FLAGS.directory)
    python = Environments(directory, FLAGS.install_s).python("vllm_tests", _PACKAGES)
    with server(directory) as (address, model, tokenizer):
        results = run_tests(python, address, model, tokenizer)
    rows = [(result.file, result.test, result.outcome, result.cause) for result in results]
    counts = Counter(result.outcome for result in results)
    if FLAGS.markdown:
        failed = [row for row in rows if row[2] != "passed"]
        text = markdown(("file", "test", "outcome", "cause"), failed)
        Path(FLAGS.markdown).write_text(text, encoding="utf-8")
    print(table(("outcome", "tests"), counts.most_common()))
    document = {
        "sdist": Path(FLAGS.sdist).name,
        "counts": dict(counts),
        "tests": [dict(zip(("file", "test", "outcome", "cause"), row, strict=True)) for row in rows],
    }
    print_document(json_line("vllm_tests", document, units={"counts": "tests"}, device=device_name()))
    return 0


def define_flags() -> None:
    flags.DEFINE_string("sdist", None, "Unpacked source distribution of vLLM.")
    flags.DEFINE_string("directory", None, "Directory of the tests' environment; it is made.")
    define_server_flags()
    flags.DEFINE_float("timeout_s", 60.0, "Seconds that one test may take.", lower_bound=1.0)
    flags.DEFINE_float("file_s", 600.0, "Seconds that one file may take.", lower_bound=1.0)
    flags.DEFINE_float("install_s", 600.0, "Seconds that the installation may take.", lower_bound=1.0)
    flags.DEFINE_string("markdown", None, "File for the table of tests that did not pass.")
    define_document_flag()
    require("sdist", "directory")


if __name__ == "__main__":
    define_flags()
    run(main)
