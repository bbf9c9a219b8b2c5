r"""The paper's Figure 11 on several devices, measured: tokens, steps and open loops, in resumable parts.

    python -m pensieve_lab.programs.run_figure11 --model=random:llama2-70b --tensor_parallel_size=4 \
        --compilation_cache_dir=compiled --json=llama2-70b.json
    python -m pensieve_lab.programs.run_figure11 --model=random:llama2-70b --tensor_parallel_size=4 --parts= \
        --json=llama2-70b.json --documents=lab/results/h200x4

Parts, each in its own process, in this order:
  tokens  check_parallel.py: float32 tokens of a tiny model of the family equal one device's and the dense
          reference's, while KV leaves memory and comes back;
  steps   profile_parallel.py: steps of the model, `--decodes` and `--prompts`, and their share of the bound;
  loops   benchmark_serving.py: open loops of `--loads`, ordered so that each system has a point before any
          has two.
All of them end within `--budget_s`: tokens may take a fifth of it, steps two fifths, loops what is left. A
part that takes longer is killed, and the next part begins. The same command with the same `--json` continues
with what is missing: parts that are not done, then failed parts, and loads without a point. A load that was
running when the loops failed comes last. Compiled steps are stored in `--compilation_cache_dir`, which may be
copied and shortens the starts of the second call. Only `--parts` are run.

Settings of Llama-2-70B and OPT-66B on two and on four devices (memory, users, windows, loads, and environment
variables: `pensieve_lab.parallel.figure11`) are those of lab/results. Given flags and variables override
them.

`--json` is written after each part and each load point, and holds each part's own document; the document of a
load point is one of benchmark_serving. `--documents=lab/results/h200x4` writes each of them as a file, for
example h200x4_open_llama2-70b_pensieve_2.5.json, for compare_serving.py, validate_simulator.py, and the rows
of `experiments.measured_loops`. The exit status is 1 if tokens differ or a part of this call failed.
"""

from __future__ import annotations

import functools
import os
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import define_engine_flags
from pensieve_jax.commands.launch import EXIT_FAILED, check_can_write, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_lab.parallel.case_flags import define_case_flags
from pensieve_lab.parallel.figure11 import (
    LOOPS,
    PARTS,
    STEPS,
    TOKENS,
    Load,
    asked_loads,
    command,
    environment,
    load_name,
    model_name,
    part_flags,
    take_settings,
)
from pensieve_lab.parallel.progress import BENCHMARK, DONE, Progress, ran_out_of_time, read_lines, write_whole
from pensieve_lab.parallel.timed_process import run_with_limit
from pensieve_lab.serving.load_points import define_load_flags

FLAGS = flags.FLAGS
UNITS = {"*_s": "seconds", "documents": "each has its own units"}
_SHARES = {TOKENS: 0.2, STEPS: 0.4, LOOPS: 1.0}  # maximum shares of the budget
_MIN_SHARE = 0.05  # minimum share left to begin a part


class Call:
    """One call of this program: its results so far, and its remaining time."""

    def __init__(self, progress: Progress, loads: list[Load]) -> None:
        """Start the call's time."""
        self.progress = progress
        self._loads = loads
        self._start_s = time.monotonic()

    @property
    def line(self) -> str:
        """Return all results so far as the document."""
        device = ", ".join(self.progress.devices) or "none: nothing was measured"
        return json_line(BENCHMARK, self.progress.results, units=UNITS, device=device)

    def run(self, part: str) -> bool:
        """Run what is missing of a part, and print its outcome; return False if it failed."""
        missing = self._missing(part)
        is_done = not missing if part == LOOPS else self.progress.parts[part]["state"] == DONE
        if is_done:
            self._say(part, "done before")
            return True
        limit_s = min(_SHARES[part] * FLAGS.budget_s, FLAGS.budget_s - self._taken_s())
        if limit_s < _MIN_SHARE * FLAGS.budget_s:
            self._say(part, f"not started, as {max(limit_s, 0.0):.0f} s were left")
            return True
        with tempfile.TemporaryDirectory() as directory:
            failed = self._try(part, Path(directory, "documents.json"), missing, limit_s)
        left = ", ".join(map(load_name, self._missing(part)))
        words = [self.progress.parts[part]["state"], failed or "", f"left: {left}" if left else ""]
        self._say(part, ", ".join(word for word in words if word))
        return failed is None

    def _try(self, part: str, path: Path, missing: list[Load], limit_s: float) -> str | None:
        """Run the part's command, which writes documents to `path`; return the failure, if any."""
        point_s = FLAGS.warm_up_s + FLAGS.window_s + FLAGS.drain_s
        words = command(part, path, missing, max_run_s=max(limit_s - point_s, 1.0))
        self._say(part, f"started, for at most {limit_s:.0f} s: {shlex.join(words[1:])}")
        ended = run_with_limit(
            words, environment(os.environ), limit_s, functools.partial(self._keep, part, path)
        )
        if part == LOOPS and ended.status == EXIT_FAILED and ran_out_of_time(path):
            ended = ended._replace(failed=None)
        self.progress.end(part, ended, limit_s=limit_s, left=self._missing(part))
        self._write()
        if ended.failed is not None and ended.output:
            print(ended.output, flush=True)
        return ended.failed

    def _missing(self, part: str) -> list[Load]:
        return self.progress.missing(self._loads) if part == LOOPS else []

    def _keep(self, part: str, path: Path) -> None:
        """Take over what a part has written so far, and write it to `--json`."""
        if self.progress.take(part, read_lines(path)):
            self._write()

    def _write(self) -> None:
        if isinstance(FLAGS.json, Path):
            write_whole(FLAGS.json, self.line + "\n")

    def _taken_s(self) -> float:
        return time.monotonic() - self._start_s

    def _say(self, part: str, what: str) -> None:
        print(f"{part}, after {self._taken_s():.0f} s: {what}", flush=True)


def check_flags() -> None:
    """Raise ConfigError for invalid flags before a part begins."""
    if unknown := [part for part in FLAGS.parts if part not in PARTS]:
        raise ConfigError("--parts", ",".join(unknown), f"among {', '.join(PARTS)}")
    if FLAGS.documents is not None:
        check_can_write("--documents", Path(f"{FLAGS.documents}_{model_name()}.json"))
    take_settings()


def print_tables(progress: Progress) -> None:
    """Print each step, each load point, and the state of every part."""
    steps = [
        [name, 1e3 * step["step_s"]["median"], step["share_of_bound"]]
        for document in progress.parts[STEPS]["documents"]
        for name, step in document["results"]["variants"]["default"]["steps"].items()
    ]
    points = [
        [document["results"]["system"], point["rate"], point["requests_per_s"], _milliseconds(point)]
        for document in progress.parts[LOOPS]["documents"]
        for point in document["results"]["points"]
    ]
    states = [[name, part["state"], len(part["documents"])] for name, part in progress.parts.items()]
    tables = {
        ("step", "ms", "share of bound"): steps,
        ("system", "rate", "requests/s", "ms/token"): points,
        ("part", "state", "documents"): states,
    }
    print("\n\n".join(table(columns, rows) for columns, rows in tables.items() if rows))


def _milliseconds(point: Mapping[str, Any]) -> object:
    """Return the mean ms/token, or a dash if no request was answered."""
    latency = point["normalized_latency_s"]
    return 1e3 * latency["mean"] if latency else "-"


def main() -> int:
    check_flags()
    progress = Progress({part: part_flags(part) for part in PARTS})
    if isinstance(FLAGS.json, Path):
        progress.go_on(FLAGS.json)
    call = Call(progress, asked_loads())
    failed = [part for part in progress.in_order() if part in FLAGS.parts and not call.run(part)]
    print_tables(progress)
    if FLAGS.documents is not None:
        for path in progress.write_documents(FLAGS.documents, model_name()):
            print(f"written: {path}")
    print_document(call.line)
    return EXIT_FAILED if failed else 0


def define_flags() -> None:
    flags.DEFINE_list("parts", list(PARTS), "Parts to run if they are missing.")
    flags.DEFINE_float("budget_s", 560.0, "Seconds for all parts.", lower_bound=1)
    flags.DEFINE_string("documents", None, "Prefix of file names for each part's documents.")
    flags.DEFINE_float("max_client_lag_s", 0.010, "Seconds of user lag above which a load point is void.")
    define_case_flags()
    define_load_flags()
    define_engine_flags(model="random:llama2-70b")
    FLAGS.set_default("tensor_parallel_size", 4)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
