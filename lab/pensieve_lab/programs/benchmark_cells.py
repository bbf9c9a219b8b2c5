"""Times a cell on this device by batch size, and a launch on the host: figure 2.3 of the thesis.

    python -m pensieve_lab.programs.benchmark_cells --model=lstm --hidden_size=1024 --plot=cells.png
    python -m pensieve_lab.programs.benchmark_cells --model=tree_lstm --max_batch=64

A launch has one, two or five tasks, which run in sequence in one program; a task gathers its rows, runs its
cell and scatters. For comparison, a step of cuDNN's LSTM is timed over a contiguous batch of sentences of 24
words, through JAX and, if it is installed, through torch. The second table is about the host alone: requests
are unfolded, launches formed and their ends recorded, with a device that takes no time. The best maximum
batch for serving is the one beyond which throughput stops growing. The last line is one JSON document (see
`--json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from pensieve_jax.cellular import CellularConfig, CellularEngine
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.cells import host_costs, library_lstms, task_times
from pensieve_lab.cells.model_flags import define_model_flags, model_from_flags
from pensieve_lab.cells.models import Model
from pensieve_lab.experiments.panels import Panel, draw_panels

FLAGS = flags.FLAGS
_LIBRARY_BATCHES = (64, 512)
_LOADS = ((1, 1), (100, 8), (1000, 100))  # running requests, and requests per submit_many
_UNITS = {
    **task_times.UNITS,
    **host_costs.UNITS,
    "step_s": "seconds of a peer's step over a contiguous batch",
}


def time_peers() -> list[dict[str, Any]]:
    """Time every peer and batch; return nothing for models other than LSTM."""
    if FLAGS.model != "lstm":
        return []
    jobs = [(peer, size) for peer in library_lstms.available(FLAGS.dtype) for size in _LIBRARY_BATCHES]
    return [
        {
            "peer": peer,
            "batch_size": size,
            "step_s": library_lstms.step_s(
                peer, hidden_size=FLAGS.hidden_size, dtype=FLAGS.dtype, batch_size=size
            ),
        }
        for peer, size in tqdm(jobs, "peers", disable=not shows_progress(), leave=False)
    ]


def time_host(engine: CellularEngine, model: Model) -> list[dict[str, float]]:
    """Time the host with each load; return a row per load."""
    found = []
    for num_running, num_together in _LOADS:
        requests = model.requests(20 * num_running + 200, FLAGS.seed)
        config = CellularConfig(num_rows=FLAGS.num_rows)
        found.append(
            host_costs.host_costs(
                engine.types,
                model.unfold,
                model.unfold_many,
                config,
                requests,
                num_running=num_running,
                num_together=num_together,
            )
        )
    return found


def show(tasks: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], host: Sequence[Any]) -> None:
    """Print the measured figures as tables."""
    by_size: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in tasks:
        by_size.setdefault((row["cell"], row["batch_size"]), {})[row["num_tasks"]] = row
    nums = sorted({row["num_tasks"] for row in tasks})
    lines = []
    for (name, size), by_num in by_size.items():
        longest = by_num[nums[-1]]
        taken = [round(1e6 * by_num[num]["task_s"], 1) for num in nums]
        dispatch = round(1e6 * longest["dispatch_s"], 1)
        lines.append([name, size, *taken, dispatch, round(size / longest["task_s"])])
    columns = [f"us, launches of {num}" for num in nums]
    print(table(["cell", "batch", *columns, "dispatch, us", "cells/s"], lines), end="\n\n")
    if steps:
        others = [[one["peer"], one["batch_size"], round(1e6 * one["step_s"], 1)] for one in steps]
        print(table(["peer", "batch", "us/step"], others), end="\n\n")
    print("The host, with a device that takes no time")
    costs = [
        [
            one["num_running"],
            round(one["cells_per_launch"]),
            *(round(1e6 * one[name], 1) for name in ("form_s", "complete_s", "submit_s")),
            round(one["requests_per_s"]),
        ]
        for one in host
    ]
    columns = ["running", "cells a launch", "form, us", "complete, us", "submit one, us", "requests/s"]
    print(table(columns, costs))


def panels(tasks: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> list[Panel]:
    """Make the panels of time and throughput over batch size, as in figure 2.3."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in tasks:
        name = f"{row['cell']}, {row['num_tasks']} in a launch"
        curves.setdefault(name, []).append((row["batch_size"], row["task_s"]))
    for one in steps:
        curves.setdefault(one["peer"], []).append((one["batch_size"], one["step_s"]))
    return [
        Panel(
            title="time of a task",
            x_label="batch size",
            y_label="microseconds",
            curves={name: [(size, 1e6 * took) for size, took in one] for name, one in curves.items()},
            dashed=frozenset(one["peer"] for one in steps),
            log_x=True,
        ),
        Panel(
            title="throughput",
            x_label="batch size",
            y_label="thousand cells a second",
            curves={name: [(size, size / took / 1e3) for size, took in one] for name, one in curves.items()},
            dashed=frozenset(one["peer"] for one in steps),
            log_x=True,
        ),
    ]


def main() -> int:
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    model = model_from_flags()
    with CellularEngine(
        model.cells,
        model.unfold,
        CellularConfig(num_rows=FLAGS.num_rows, compile_at_start=True),
        compilation_cache_dir=FLAGS.compilation_cache_dir,
        unfold_many=model.unfold_many,
        progress=shows_progress(),
    ) as engine:
        tasks = task_times.task_times(engine, seed=FLAGS.seed, shown=shows_progress())
        host = time_host(engine, model)
    steps = time_peers()
    show(tasks, steps, host)
    if FLAGS.plot is not None:
        title = f"{FLAGS.model}, hidden size {FLAGS.hidden_size}, {FLAGS.dtype}: {device_name()}"
        draw_panels(panels(tasks, steps), title, Path(FLAGS.plot))
    results = {
        "model": FLAGS.model,
        "hidden_size": FLAGS.hidden_size,
        "dtype": FLAGS.dtype,
        "num_rows": FLAGS.num_rows,
        "points": tasks,
        "peers": steps,
        "host": host,
    }
    print_document(json_line("cells", results, units=_UNITS, device=device_name()))
    return 0


def define_flags() -> None:
    define_model_flags()
    flags.DEFINE_integer("num_rows", 16_384, "Number of state rows.", lower_bound=1)
    flags.DEFINE_string("plot", None, "PNG file for a plot of time and throughput over batch size.")
    flags.DEFINE_string("compilation_cache_dir", None, "Directory of the compilation cache.")
    flags.DEFINE_boolean("progress", None, "Show progress bars. Default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
