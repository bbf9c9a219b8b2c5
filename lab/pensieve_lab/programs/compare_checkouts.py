"""Runs a benchmark in two checkouts, alternating, and compares its figures.

    git worktree add /tmp/earlier REVISION
    python -m pensieve_lab.programs.compare_checkouts --earlier=/tmp/earlier \
        --program=benchmark_server --figures=engine_ms,wire_ms,front_us_per_delta,submit_us

Each run is a process that runs the checkout's own program on its own source files, with the same arguments
and the same interpreter. So a change is compared with the version before it on one machine, at nearly the
same time: one run of the earlier checkout, then one of the later one, and so on. The report has each figure's
medians, and the median, the lowest and the highest of the pairs' ratios.

A figure is the path of a number in `results` of the program's document, such as `points.0.first_token_s.p50`.
Other programs on the machine disturb both checkouts alike; `load` has the load average before each run.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table

FLAGS = flags.FLAGS
ROOT: Final = Path(__file__).parents[3]
SIDES: Final = ("earlier", "later")


def main() -> int:
    checkouts = dict(zip(SIDES, (Path(FLAGS.earlier), Path(FLAGS.later or ROOT)), strict=True))
    arguments = shlex.split(FLAGS.arguments)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    load: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FLAGS.num_pairs):
            for side, checkout in checkouts.items():
                load.append(round(os.getloadavg()[0], 2))
                path = Path(folder) / f"{side}_{number}.json"
                found[side].append(run_once(checkout, FLAGS.program, arguments, path))
                print(f"pair {number + 1} of {FLAGS.num_pairs}: {side}", file=sys.stderr, flush=True)
    figures = {name: compared(name, found) for name in FLAGS.figures}
    print(table(["figure", *SIDES, "ratio", "lowest ratio", "highest ratio"], map(_row, figures.items())))
    results = {
        "program": FLAGS.program,
        "arguments": arguments,
        "num_pairs": FLAGS.num_pairs,
        "revisions": {side: found[side][0].get("revision") for side in SIDES},
        "commands": {side: found[side][0].get("command") for side in SIDES},
        "load": load,
        "figures": figures,
    }
    units = found["later"][0].get("units", {})
    print_document(json_line("compare_checkouts", results, units=units, device=FLAGS.device))
    return 0


def run_once(checkout: Path, program: str, arguments: Sequence[str], path: Path) -> dict[str, Any]:
    """Run a program of a checkout, and return the document that it writes to `path`.

    Raises ConfigError if the checkout has no such program, or the program fails.
    """
    module, script = Path("lab/pensieve_lab/programs"), Path("scripts")
    if (checkout / module / f"{program}.py").is_file():
        command, paths = ["-m", f"pensieve_lab.programs.{program}"], [checkout, checkout / "lab"]
    elif (checkout / script / f"{program}.py").is_file():
        command, paths = [str(script / f"{program}.py")], [checkout]
    else:
        limit = f"a program in {module} or {script} of {checkout}"
        raise ConfigError("--program", program, limit)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, *command, *arguments, f"--json={path}"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode or not path.is_file():
        limit = f"one that succeeds in {checkout}; it ended with status {done.returncode}"
        raise ConfigError("--program", program, limit, done.stderr[-2000:].strip())
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def compared(name: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return both checkouts' values of a figure, their medians, and the ratios of the pairs."""
    runs = {side: [figure(document["results"], name) for document in found[side]] for side in SIDES}
    pairs = list(zip(*runs.values(), strict=True))
    ratios = [later / earlier for earlier, later in pairs] if all(runs["earlier"]) else []
    return {**{side: _spread(values) for side, values in runs.items()}, "ratio": _spread(ratios)}


def figure(results: Any, name: str) -> float:
    """Return the number at a path in `results`; raises ConfigError if it has no such path."""
    value = results
    for part in name.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError("--figures", name, "the path of a number in the program's results") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("--figures", name, f"the path of a number, but it leads to {value!r}")
    return float(value)


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "runs": list(values),
    }


def _row(figure: tuple[str, dict[str, Any]]) -> list[object]:
    name, both = figure
    ratio = both["ratio"] or {"median": "-", "lowest": "-", "highest": "-"}
    medians = [both[side]["median"] for side in SIDES]
    return [name, *medians, *(ratio[part] for part in ("median", "lowest", "highest"))]


def define_flags() -> None:
    flags.DEFINE_string("earlier", None, "Folder of the earlier checkout.")
    flags.DEFINE_string("later", None, "Folder of the later checkout; default: this one.")
    flags.DEFINE_string("program", None, "Name of the benchmark.")
    flags.DEFINE_list("figures", None, "Figures to compare: paths in its results.")
    flags.DEFINE_string("arguments", "", "Its arguments, as in a shell.")
    flags.DEFINE_integer("num_pairs", 5, "Runs of each checkout.", lower_bound=1)
    flags.DEFINE_string("device", "none (host only)", "What it runs on, for the document.")
    define_document_flag()
    require("earlier", "program", "figures")


if __name__ == "__main__":
    define_flags()
    run(main)
