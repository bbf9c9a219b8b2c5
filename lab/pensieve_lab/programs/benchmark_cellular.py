"""Recurrent models in an open loop: cellular batching and its baselines, latency over throughput.

    python -m pensieve_lab.programs.benchmark_cellular --model=lstm --hidden_size=1024 \\
        --rates=10000,40000,80000
    python -m pensieve_lab.programs.benchmark_cellular --model=seq2seq --max_batch=512,256 \\
        --data=a.de,a.en --rates=5000
    python -m pensieve_lab.programs.benchmark_cellular --model=tree_lstm --max_batch=64 \\
        --data=train_shapes.txt --rates=5000

Requests arrive as a Poisson process, and latency counts from when each was due. All systems run the same
programs on the same weights, one after the other, in one process. *cellular* is the engine. *padding* fills
buckets by length, round-robin or oldest first; it can also be an LSTM of whole sentences, by cuDNN or, if
that is missing, by a scan. *merging* joins the graphs of 64 requests, as Fold and DyNet do. Every run
continues to its last answer: beyond the peak, throughput stays and latency is that of a run of `--seconds`.
The host time that *padding* and *merging* need to choose and plan a batch is part of both, and is also
reported separately. Widths of buckets are 10 words; the names of `--systems` include others. Lengths are
drawn like Europarl's, and trees like the TreeBank's, unless `--data` has a file of them or `--num_words`
gives the length of all sentences. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from pensieve_jax.cellular import CellularConfig, CellularEngine
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.cells import loads, systems
from pensieve_lab.cells.clocks import PlanningClock
from pensieve_lab.cells.model_flags import define_model_flags, model_from_flags, numbers
from pensieve_lab.cells.models import Model
from pensieve_lab.cells.real_time import BeginTimes, serve
from pensieve_lab.cells.whole_sentences import LENGTHS, WholeSentences, limit_of_words
from pensieve_lab.experiments.panels import Panel, draw_panels

FLAGS = flags.FLAGS
_MIN_REQUESTS, _WARM_UP = 500, 300
_WHOLE_BATCHES = (1, 8, 32, 64, 128, 256)  # in addition to the largest
_CLOSE = 1e-2  # largest difference between two implementations, in float32 or bfloat16
_COLUMNS = (
    *("system", "rate", "requests/s", "p50, ms", "p90, ms", "p99, ms", "p99 to its launch, ms"),
    "planning, us/request",
)
_UNITS = loads.UNITS | {
    "queueing_s": "seconds from arrival to the launch of its first cell",
    "planning_s": "host seconds per request to choose and plan batches of whole requests",
}


def chosen_systems() -> list[str]:
    """Parse `--systems`; raises ConfigError for unknown names and for systems that cannot serve the model."""
    if FLAGS.model == "tree_lstm":
        fitting: tuple[str, ...] = systems.TREES
        others: tuple[str, ...] = (systems.IDEAL,)
    else:
        is_lstm = FLAGS.model == "lstm"
        fitting = (*systems.CHAINS, *((systems.WHOLE,) if is_lstm else ()))
        widths = (*systems.OTHER_WIDTHS.values(), *systems.OTHER_OLDEST.values())
        others = (*widths, *(systems.WHOLE_WIDTHS if is_lstm else ()), *systems.TREES[1:])
    known = (*fitting, *others)
    names = [name.strip() for name in FLAGS.systems] or list(fitting)
    for name in names:
        if name not in known:
            raise ConfigError("--systems", name, f"one of: {'; '.join(dict.fromkeys(known))}")
    longest = FLAGS.num_words or 0
    if longest > LENGTHS[-1] and not systems.WHOLE_WIDTHS.keys().isdisjoint(names):
        raise ConfigError("--num_words", longest, limit_of_words())
    return names


def check_rows(model: Model) -> None:
    """Raise ConfigError if a baseline's batch would not fit."""
    most = max(one.max_batch for one in model.cells)
    if FLAGS.num_rows < most:
        raise ConfigError("--num_rows", FLAGS.num_rows, f"at least {most}, the largest batch")


class Systems:
    """All compared systems, on the same weights."""

    def __init__(self, engine: CellularEngine, beginnings: BeginTimes, model: Model) -> None:
        """Take the engine and its observer `beginnings`."""
        self._engine, self._beginnings, self._model = engine, beginnings, model
        self._whole: WholeSentences | None = None
        self._planning = PlanningClock()

    def measure(self, name: str, rate: int) -> dict[str, Any]:
        """Serve one rate with one system; return a row."""
        planning: dict[str, float] = {}
        num = int(max(rate * FLAGS.seconds, _MIN_REQUESTS))
        requests = self._model.requests(num, FLAGS.seed)
        arrival_s = loads.arrivals(rate, num, seed=FLAGS.seed)
        if name in systems.WHOLE_WIDTHS:
            whole = self._whole_sentences()
            sentences = [one.token_ids for one in requests]
            served = whole.serve(sentences, arrival_s, width=systems.WHOLE_WIDTHS[name])
            name = name.replace(systems.WHOLE, whole.name)
        else:
            while any(worker.num_in_flight for worker in self._engine.workers):
                self._engine.step()  # padding of a batch may still run after its last answer
            self._engine.restart_with(self._planning.around(systems.SYSTEMS[name]))
            self._engine.run(self._model.requests(_WARM_UP, FLAGS.seed + 1))
            self._planning.begin()
            served = serve(self._engine, requests, arrival_s, self._beginnings)
            if self._planning.total_s is not None:
                planning = {"planning_s": self._planning.total_s / num}
        return {"system": name, "rate": rate} | loads.figures(served) | planning

    def _whole_sentences(self) -> WholeSentences:
        if self._whole is None:
            sizes = self._engine.types.types[0].batch_sizes
            few = [size for size in sizes[:-1] if size in _WHOLE_BATCHES]
            self._whole = WholeSentences(self._model.model, (*few, sizes[-1]), shown=shows_progress())
            expected = self._engine.run(self._model.requests(sizes[-1], FLAGS.seed + 2))
            sentences = [one.token_ids for one in self._model.requests(sizes[-1], FLAGS.seed + 2)]
            states = np.array([output.states[0]["h"] for output in expected], np.float32)
            furthest = float(np.abs(self._whole.run(sentences) - states).max())
            if furthest > _CLOSE:
                raise ConfigError("cuDNN's result", furthest, f"within {_CLOSE} of the cells' result")
        return self._whole


def measure(
    engine: CellularEngine, beginnings: BeginTimes, model: Model, names: Sequence[str], rates: Sequence[int]
) -> list[dict[str, Any]]:
    """Measure every system at every rate; return a row for each."""
    both = Systems(engine, beginnings, model)
    jobs = [(name, rate) for name in names for rate in rates]
    return [
        both.measure(name, rate)
        for name, rate in tqdm(jobs, "loads", disable=not shows_progress(), leave=False)
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line per row."""
    lines = []
    for row in rows:
        latency = [round(1e3 * row["latency_s"][f"p{one}"], 2) for one in (50, 90, 99)]
        queueing = round(1e3 * row["queueing_s"]["p99"], 2)
        planning = round(1e6 * row["planning_s"], 1) if "planning_s" in row else ""
        lines.append([row["system"], row["rate"], round(row["throughput"]), *latency, queueing, planning])
    print(table(_COLUMNS, lines))


def panel(rows: Sequence[dict[str, Any]], title: str) -> Panel:
    """Make the panel of latency over throughput."""
    names = dict.fromkeys(row["system"] for row in rows)
    curves = {
        name: [(row["throughput"], 1e3 * row["latency_s"]["p90"]) for row in rows if row["system"] == name]
        for name in names
    }
    return Panel(
        title=title,
        x_label="requests/s",
        y_label="latency, 90th percentile, ms",
        curves=curves,
        y_max=FLAGS.plot_ms,
    )


def main() -> int:
    names, rates = chosen_systems(), numbers("rates")
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    model = model_from_flags()
    check_rows(model)
    config = CellularConfig(
        num_devices=FLAGS.num_devices,
        num_rows=FLAGS.num_rows,
        max_num_tasks=FLAGS.max_num_tasks,
        compile_at_start=True,
    )
    beginnings = BeginTimes()
    with CellularEngine(
        model.cells,
        model.unfold,
        config,
        observe=beginnings.observe,
        compilation_cache_dir=FLAGS.compilation_cache_dir,
        unfold_many=model.unfold_many,
        progress=shows_progress(),
    ) as engine:
        rows = measure(engine, beginnings, model, names, rates)
    show(rows)
    devices = f"{FLAGS.num_devices} x {device_name()}"
    title = f"{FLAGS.model}, hidden size {FLAGS.hidden_size}, {FLAGS.dtype}, {devices}"
    if FLAGS.plot is not None:
        draw_panels([panel(rows, title)], title, Path(FLAGS.plot))
    results = {
        "model": FLAGS.model,
        "hidden_size": FLAGS.hidden_size,
        "dtype": FLAGS.dtype,
        "cells": {one.name: one.max_batch for one in model.cells},
        "num_devices": FLAGS.num_devices,
        "max_num_tasks": FLAGS.max_num_tasks,
        "num_words": FLAGS.num_words,
        "data": [Path(one).name for one in FLAGS.data],
        "seed": FLAGS.seed,
        "points": rows,
    }
    print_document(json_line("cellular", results, units=_UNITS, device=device_name()))
    return 0


def define_flags() -> None:
    define_model_flags()
    flags.DEFINE_list("rates", ["1000", "2000"], "Arrival rates in requests/s.")
    flags.DEFINE_multi_string(
        "systems", [], "System to measure; repeat the flag for several. Default: all that serve the model."
    )
    flags.DEFINE_float(
        "seconds",
        2.0,
        "Seconds of arrivals at each rate; extended to at least 500 requests.",
        lower_bound=0.01,
    )
    flags.DEFINE_integer("num_devices", 1, "Workers.", lower_bound=1)
    flags.DEFINE_integer("num_rows", 16_384, "State rows per device.", lower_bound=1)
    flags.DEFINE_integer("max_num_tasks", 5, "Maximum number of tasks per launch.", lower_bound=1)
    flags.DEFINE_string("plot", None, "PNG file for a plot of latency over throughput.")
    flags.DEFINE_float("plot_ms", 500.0, "Cut off the plot above this latency (ms).")
    flags.DEFINE_string("compilation_cache_dir", None, "Directory of the compilation cache.")
    flags.DEFINE_boolean("progress", None, "Show progress bars. Default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
