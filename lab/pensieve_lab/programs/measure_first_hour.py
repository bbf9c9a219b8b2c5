"""Measures the first hour of a new user: the installation, and each command to its first answer.

    python -m pensieve_lab.programs.measure_first_hour --json=first_hour.json
    python -m pensieve_lab.programs.measure_first_hour --checkout=path/to/an/older/checkout

The commit of `--checkout` is installed in a fresh virtual environment, as `pip install ".[server]"` does,
from the package index of pip's settings. Then its commands run in an empty directory, in the order of README,
each on the CPU of this machine. All share one cache of compiled programs. It is empty at the beginning of the
first round, `cold`, and full in the second, `warm`. The installation is repeated with the packages that pip
has stored.

Prints a table and one JSON document (see `--json`) as the last line. On a machine that others use, compare
seconds of processor time, which count all processes of a command, rather than wall times.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from pensieve_jax import ConfigError, PensieveError
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.provenance import git
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[3]
ROUNDS = ("cold", "warm")
UNITS = {"wall_s": "s", "cpu_s": "s of processor time", "installed_bytes": "bytes"}
CELLS = """
from model_defs.recurrent import Seq2Seq
from pensieve_jax.cellular import CellularConfig, CellularEngine
model = Seq2Seq.random(hidden_size=64, vocab_size=1000, seed=0)
cells = model.cells(encoder_max_batch=8, decoder_max_batch=4)
cache = "{cache}"
with CellularEngine(cells, model.unfold, CellularConfig(num_rows=64), compilation_cache_dir=cache) as engine:
    print(engine.run([model.request([5, 9, 2], num_target_steps=4)])[0].tokens)
"""
_LINE = {"turns": [{"messages": [{"role": "user", "content": "Hi! My cat is called Miro."}]}]}
_LEFT_OUT = re.compile("JAX_|XLA_|OPENBLAS_|PYTHON|VIRTUAL_ENV$")
_ADDRESS = re.compile(r"^serving .* at (http://\S+)", re.MULTILINE)
_LIMIT_S = 1800.0
_POLL_S = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


class StepFailedError(PensieveError):
    """A command of the first hour failed."""


class Times(NamedTuple):
    """Wall seconds, and seconds of processor time of all processes of a step."""

    wall_s: float
    cpu_s: float


class Place(NamedTuple):
    """Where the commands run: an empty directory, and the variables of their environment."""

    directory: Path
    environment: Mapping[str, str]


def run_to_end(command: list[str], place: Place, text: str = "") -> Times:
    """Run a command with `text` as its input; raises StepFailedError with its output."""
    began_s, before_s = time.monotonic(), _children_s()
    done = subprocess.run(
        command,
        input=text,
        cwd=place.directory,
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise StepFailedError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}")
    return Times(time.monotonic() - began_s, _children_s() - before_s)


def serve_one(place: Place) -> Times:
    """Start a server and send a request; return the times until its answer. Ctrl-C stops the server."""
    log = place.directory / "server.log"
    began_s = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["pensieve", "serve", "--port=0"],
            cwd=place.directory,
            env=place.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while (found := _ADDRESS.search(log.read_text("utf-8", "replace"))) is None:
            if server.poll() is not None or time.monotonic() - began_s > _LIMIT_S:
                raise StepFailedError(f"pensieve serve did not serve:\n{log.read_text('utf-8')[-2000:]}")
            time.sleep(_POLL_S)
        body = json.dumps({"input": "Hi! My cat is called Miro."}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{found[1]}/v1/responses", body, headers)
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
            json.load(answer)
        return Times(time.monotonic() - began_s, tree_cpu_s(server.pid))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(_LIMIT_S)


def tree_cpu_s(pid: int) -> float:
    """Return the seconds of processor time of a process and its descendants, also of those that ended."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()  # from the third field on
            stats[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    tree = {pid}
    while grown := {child for child, (parent, _) in stats.items() if parent in tree} - tree:
        tree |= grown
    return sum(stats[one][1] for one in tree if one in stats) / _TICKS


def size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory, without following links."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() or path.is_symlink())


def install(source: Path, extras: str, work: Path, name: str) -> tuple[Times, Path]:
    """Install a checkout in a new environment; return the times of pip, and the environment's folder."""
    venv = work / name
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    environment = {**_clean_environment(), "PIP_CACHE_DIR": str(work / "pip")}
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{source}[{extras}]"]
    return run_to_end(pip, Place(work, environment)), venv


def commands(work: Path) -> dict[str, Callable[[Place], Times]]:
    """Return the steps that follow the installation, in the order of README."""
    conversations = work / "conversations.jsonl"
    conversations.write_text(json.dumps(_LINE) + "\n")
    cells = work / "cells.py"
    cells.write_text(CELLS.format(cache=work / "cells"))
    generate = ["pensieve", "generate", f"--input={conversations}", "--output=turns.jsonl"]
    return {
        "serve": serve_one,
        "chat": lambda place: run_to_end(["pensieve", "chat"], place, "Hello!\n"),
        "generate": lambda place: run_to_end(generate, place),
        "demo": lambda place: run_to_end(["pensieve", "demo"], place),
        "cells": lambda place: run_to_end(["python", str(cells)], place),
    }


def measure(checkout: Path, extras: str, rounds: tuple[str, ...] = ROUNDS) -> dict[str, Any]:
    """Install the commit of a checkout and run its commands; return sizes, and times by step and round."""
    with _source(checkout) as (work, source):
        times: dict[str, dict[str, Times]] = {"install": {}}
        for name in rounds:
            times["install"][name], venv = install(source, extras, work, f"venv-{name}")
            _say("install", name, times["install"][name])
        environment = {
            **_clean_environment(),
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(work / "cache"),
        }
        steps = commands(work)
        for name in rounds:
            for step, take in steps.items():
                place = Place(Path(tempfile.mkdtemp(dir=work)), environment)
                times.setdefault(step, {})[name] = take(place)
                _say(step, name, times[step][name])
        packages = list(importlib.metadata.distributions(path=[str(next(venv.glob("lib/*/site-packages")))]))
        return {
            "extras": extras,
            "installed_bytes": size_of(venv),
            "num_packages": len(packages),
            "versions": {one.name: one.version for one in packages if one.name in ("jax", "jaxlib", "flax")},
            "compiled_bytes": size_of(work / "cache"),
            "steps": {
                step: {name: one._asdict() for name, one in found.items()} for step, found in times.items()
            },
        }


def rows(steps: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[object]]:
    """Return the lines of the table."""
    return [
        [step, *(round(found[name][key], 1) for name in found for key in ("wall_s", "cpu_s"))]
        for step, found in steps.items()
    ]


def main() -> int:
    """Measure, and print the table and the document."""
    checkout = Path(FLAGS.checkout)
    commit = git(checkout, "rev-parse", "HEAD")
    if commit is None:
        raise ConfigError("--checkout", FLAGS.checkout, "a folder with a git checkout of this project")
    before = os.getloadavg()
    found = measure(checkout, FLAGS.extras)
    print(
        table(
            ["step", *(f"{name} {unit}, s" for name in ROUNDS for unit in ("wall", "CPU"))],
            rows(found["steps"]),
        )
    )
    print(f"{found['num_packages']} packages, {found['installed_bytes'] / 1e6:.0f} MB installed")
    measured = {"measured_commit": commit.strip(), "load_before": before, "load_after": os.getloadavg()}
    print_document(json_line("first_hour", {**measured, **found}, units=UNITS, device="cpu"))
    return 0


def define_flags() -> None:
    """Define the flags of this program."""
    flags.DEFINE_string("checkout", str(ROOT), "Checkout whose commit is measured; default: this one.")
    flags.DEFINE_string("extras", "server", "Extras to install, separated by commas.")
    define_document_flag()


# Private functions


@contextlib.contextmanager
def _source(checkout: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder, and one within it that has the files of a checkout's commit."""
    with tempfile.TemporaryDirectory(prefix="pensieve-first-hour-") as folder:
        source = Path(folder, "source")
        source.mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=checkout, check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "-x"], input=archive, cwd=source, check=True)
        yield Path(folder), source


def _clean_environment() -> dict[str, str]:
    """Return this environment without what makes Python or JAX behave otherwise than for a new user."""
    return {name: value for name, value in os.environ.items() if not _LEFT_OUT.match(name)}


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _say(step: str, name: str, times: Times) -> None:
    print(f"{step}, {name}: {times.wall_s:.1f} s, CPU {times.cpu_s:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    define_flags()
    run(main)
