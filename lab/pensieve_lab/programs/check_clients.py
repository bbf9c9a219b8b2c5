"""Checks users' client libraries against a server: what works, what is refused by design, what fails.

    python -m pensieve_lab.programs.check_clients --langchain_python=/path/to/python \\
        --open_responses=/path/to/checkout

The program starts `pensieve serve` with the model in the package, or uses the server at `--url`. It runs the
openai client, strict, synchronous and asynchronous. With the flags it also runs langchain-openai in an
interpreter that has it, and Open Responses' compliance test. All answers are then checked against the schemas
of OpenAI's own API document. The last line is one JSON document (see `--json`); the exit status is 1 if a
case fails.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.clients import completion_cases, response_cases
from pensieve_lab.clients.cases import CASES, Outcome, run_case
from pensieve_lab.clients.openai_schemas import EXCEPTED, SCHEMAS, Schemas, all_complaints
from pensieve_lab.clients.other_programs import run_langchain, run_open_responses
from pensieve_lab.clients.recorder import Recorder
from pensieve_lab.serving.served import ServedProcess

FLAGS = flags.FLAGS
_OPENAI = (response_cases, completion_cases)  # imported for their cases
_SIZES = ("--model=chat", "--dtype=float32", "--gpu_pages=256", "--max_num_running=8")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yield the address of the given server, or of one that runs meanwhile."""
    if FLAGS.url:
        yield FLAGS.url.rstrip("/").removesuffix("/v1")
        return
    with (
        tempfile.TemporaryDirectory() as private,
        ServedProcess([*_SIZES, f"--history={private}/chats.sqlite"]) as served,
    ):
        yield served.address


def run_openai(url: str) -> list[Outcome]:
    """Run every case with both clients."""
    pairs = list(itertools.product(CASES, (False, True)))
    with tqdm(pairs, desc="openai", disable=None) as bar:
        return [run_case(one, url, is_async=is_async) for one, is_async in bar]


def counted(outcomes: Sequence[Outcome]) -> list[tuple[str, str, int, int, int]]:
    """Return client, area, and the numbers of passed, refused by design and failed cases."""
    groups = dict.fromkeys((one.client, one.area) for one in outcomes)
    return [
        (
            client,
            area,
            sum(one.problem is None and not one.is_refusal for one in mine),
            sum(one.problem is None and one.is_refusal for one in mine),
            sum(one.problem is not None for one in mine),
        )
        for client, area in groups
        for mine in [[one for one in outcomes if (one.client, one.area) == (client, area)]]
    ]


def measure() -> dict[str, Any]:
    """Run all requested checks."""
    versions = {"openai": importlib.metadata.version("openai")}
    with server() as address, Recorder(address) as recorder:
        url = f"{recorder.address}/v1"
        outcomes = run_openai(url)
        if FLAGS.langchain_python:
            more, found = run_langchain(FLAGS.langchain_python, url)
            outcomes, versions = outcomes + more, versions | found
        if FLAGS.open_responses:
            outcomes += run_open_responses(FLAGS.bun, FLAGS.open_responses, url)
    recorder.wait_for_all()
    schemas = Schemas.of_file(Path(FLAGS.openapi))
    return {
        "clients": versions,
        "cases": [
            {"client": client, "area": area, "passed": passed, "refused": refused, "failed": failed}
            for client, area, passed, refused, failed in counted(outcomes)
        ],
        "problems": [
            {"client": one.client, "area": one.area, "name": one.name, "problem": one.problem}
            for one in outcomes
            if one.problem is not None
        ],
        "refused_by_design": sorted({f"{one.area}: {one.name}" for one in outcomes if one.is_refusal}),
        "num_requests": len(recorder.exchanges),
        "num_bodies_checked": sum(map(schemas.num_bodies, recorder.exchanges)),
        "against_schema": all_complaints(schemas, recorder.exchanges),
        "excepted": EXCEPTED,
    }


def main() -> int:
    results = measure()
    columns = ("client", "area", "passed", "refused by design", "failed")
    print(table(columns, [tuple(row.values()) for row in results["cases"]]))
    for problem in results["problems"]:
        print("failed:", ": ".join(problem.values()))
    for line in results["against_schema"]:
        print("against OpenAI's schema:", line)
    print(f"{results['num_bodies_checked']} bodies and events of {results['num_requests']} requests checked.")
    print_document(json_line("clients", results, units={"cases": "number"}, device=device_name()))
    return EXIT_FAILED if results["problems"] or results["against_schema"] else 0


def define_flags() -> None:
    flags.DEFINE_string("url", None, "Address of a running server; default: start one.")
    flags.DEFINE_string("openapi", str(SCHEMAS), "OpenAI's API document, or the part that tests use.")
    flags.DEFINE_string("langchain_python", None, "Python interpreter with langchain-openai.")
    flags.DEFINE_string("open_responses", None, "Checkout of github.com/openresponses/openresponses.")
    flags.DEFINE_string("bun", "bun", "Runtime of its compliance test.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
