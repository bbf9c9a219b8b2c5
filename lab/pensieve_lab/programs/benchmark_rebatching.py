r"""Padded batches that queries join and leave: tables and figures of the Baton paper, and further
measurements.

    python -m pensieve_lab.programs.benchmark_rebatching --part=table2 --max_batch=2,4,6,8,10 \
        --plot=figures.png
    python -m pensieve_lab.programs.benchmark_rebatching --part=table1 --length_scale=0.125 --max_batch=8 \
        --kv_bytes=32GiB
    python -m pensieve_lab.programs.benchmark_rebatching --part=load --trace=sharegpt_lengths.csv.gz \
        --rates=1,2 \
        --seeds=0,1,2 --kv_bytes=1GiB,512MiB
    python -m pensieve_lab.programs.benchmark_rebatching --part=steps --batch=8 --length=8192

*table1* and *table2* serve the paper's sets of queries, which arrive at once: 120 long and short ones, and 30
short ones. Methods are settings of one engine on the same weights, memory and prompts. *Benchmark* runs a
batch until its last query has ended. *PD* computes prompts of similar length together, separately from steps.
*Baton* lets queries join by vector shaping, and *Baton-PD* by vector embedding. All return an answer when its
query ends. Steps are reported beside seconds, since the paper is about steps. *load* sends queries with a
trace's lengths as a Poisson process, some of them urgent. It reports latencies per seed and pooled, and what
preemption costs the other queries. *steps* times single launches beside the bytes that they have to move.
After each run of the other parts, its changes of the ring's shape are repeated alone, to know their share of
the run. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from model_defs import source_config
from model_defs.registry import resolve_dtype
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import num_bytes, shows_progress
from pensieve_jax.commands.launch import check_can_write, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.decoding.device.weights import serving_dtype
from pensieve_jax.model_source import resolve_model
from pensieve_lab.rebatching import launch_times, methods, pooled, real_time
from pensieve_lab.rebatching.figures import draw_over_time
from pensieve_lab.rebatching.flags import (
    budgets,
    config,
    define_rebatching_flags,
    loads,
    numbers,
    steps_config,
)
from pensieve_lab.rebatching.launch_times import LaunchTimes
from pensieve_lab.rebatching.loads import Load
from pensieve_lab.rebatching.runners import MEMORY_UNITS, Runners, memory, peak_bytes
from pensieve_lab.serving.report import append_line
from pensieve_lab.steps.ceilings import measure_ceilings

FLAGS = flags.FLAGS
Row = dict[str, Any]
_COLUMNS = (
    *("method", "batch", "seed", "steps", "seconds", "speed-up", "fewer steps, x", "tokens/s"),
    *("tail, %", "waiting, %", "late, %", "read/live", "relayouts, %"),
)
_LOAD_COLUMNS = (
    *("method", "MiB", "batch", "rate", "seed", "queries", "p50, s", "p99, s", "urgent p50, s"),
    *("urgent p99, s", "others p99, s", "tokens/s", "suspensions", "relayouts, %"),
)
_POOLED_COLUMNS = (
    *("method", "MiB", "batch", "rate", "seeds", "urgent", "p50, s", "p99, s", "first p99, s", "others"),
    *("p50, s", "p99, s", "first p99, s", "suspensions", "others lose, s", "at most, s"),
)
_LAUNCH_COLUMNS = ("launch", "batch", "length", "ms", "bound, ms", "arithmetic, ms", "% of bound")


def serve_all(names: Sequence[str], every: Sequence[Load]) -> tuple[list[Row], Row]:
    """Return a row for every budget, batch size, load and method, and the device memory used."""
    rows: list[Row] = []
    context = max(load.max_context_tokens for load in every)
    sizes = [(kv_bytes, batch) for kv_bytes in budgets() for batch in numbers("max_batch")]
    bases = {size: config(size[1], size[0], context) for size in sizes}
    runners = Runners(FLAGS.model, FLAGS.dtype, bases[sizes[0]], progress=shows_progress())
    jobs = [(size, name) for size in sizes for name in _by_runner(names)]
    taken: dict[tuple[int, int, str], Row] = {}
    for size, name in tqdm(jobs, "methods", disable=not shows_progress(), leave=False):
        chosen = methods.config_of(name, bases[size])
        runner = runners.runner(chosen)
        kind = (*size, methods.runner_config(chosen).insertion)
        place = dict(zip(("kv_bytes", "batch", "insertion"), kind, strict=True))
        before = taken.setdefault(kind, place | {"peak_before_runs_bytes": peak_bytes(), "max_kv_bytes": 0})
        for load in every:
            prompts = load.prompts(runners.model_config.vocab_size)
            found = real_time.serve(runner, chosen, load, prompts)
            named = {"method": name, "kv_bytes": size[0], "batch": size[1], "seed": load.seed}
            named |= {"load": load.name, "digest": load.digest, "rate": load.rate}
            rows.append(named | found)
            if FLAGS.output_json is not None:
                append_line(Path(FLAGS.output_json), json.dumps(rows[-1]))
            print(f"{name}, {size[1]} rows, {load.name}: {found['seconds']:.2f} s", flush=True)
        most = max(before["max_kv_bytes"], *(row["stats"]["max_kv_bytes"] for row in rows[-len(every) :]))
        seen = {"max_kv_bytes": most, "peak_bytes_in_use": rows[-1]["peak_bytes_in_use"]}
        taken[kind] = before | memory(runner, size[0]) | seen
    rows.sort(key=lambda row: _order(row, sizes, names))
    return rows, taken[kind] | {"runners": list(taken.values())}


def _order(row: Row, sizes: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[Any, ...]:
    size = row["kv_bytes"], row["batch"]
    return sizes.index(size), row["rate"] or 0, row["seed"], names.index(row["method"])


def _by_runner(names: Sequence[str]) -> Iterator[str]:
    """Yield the methods so that those that share programs are consecutive."""
    yield from sorted(names, key=lambda name: methods.METHODS[name]["insertion"] == "shape")


def compare(rows: Sequence[Row]) -> None:
    """Add each row's speed-up over `Benchmark`, if that ran on the same load."""
    first = {_place(row): row for row in rows if row["method"] == methods.BENCHMARK}
    for row in rows:
        other = first.get(_place(row))
        row["speed_up"] = None if other is None else other["seconds"] / row["seconds"]
        row["fewer_steps"] = None if other is None else other["steps"] / row["steps"]


def _place(row: Row) -> tuple[int, int, str]:
    return row["kv_bytes"], row["batch"], row["digest"]


def show_table(rows: Sequence[Row]) -> None:
    """Print a line per row of the tables' parts."""
    lines = []
    for row in rows:
        idle = [round(100 * row["idle"][why], 1) for why in ("tail", "waiting", "late")]
        times = [
            row["seconds"],
            _or_blank(row["speed_up"]),
            _or_blank(row["fewer_steps"]),
            row["tokens_per_s"],
        ]
        lines.append(
            [
                row["method"],
                row["batch"],
                row["seed"],
                row["steps"],
                *times,
                *idle,
                _or_blank(row["read_over_live"]),
                round(100 * row["relayouts"]["share_of_run"], 2),
            ]
        )
    print(table(_COLUMNS, lines))


def show_load(rows: Sequence[Row]) -> None:
    """Print a line per row of the loads."""
    lines = []
    for row in rows:
        latency = row["latency_s"]
        urgent, others = latency.get("priority 1", {}), latency.get("priority 0", {})
        lines.append(
            [
                *(row["method"], row["kv_bytes"] >> 20, row["batch"], row["rate"], row["seed"]),
                row["num_queries"],
                *(latency["all"]["p50"], latency["all"]["p99"]),
                *(urgent.get("p50", ""), urgent.get("p99", ""), others.get("p99", "")),
                *(row["tokens_per_s"], row["stats"]["num_suspensions"]),
                round(100 * row["relayouts"]["share_of_run"], 2),
            ]
        )
    print(table(_LOAD_COLUMNS, lines))


def show_pooled(rows: Sequence[Row]) -> None:
    """Print a line per pooled row."""
    lines = []
    for row in rows:
        cells = [row["method"], row["kv_bytes"] >> 20, row["batch"], row["rate"], len(row["seeds"])]
        for kind in ("priority 1", "priority 0"):
            latency, first = row["latency_s"].get(kind, {}), row["first_token_s"].get(kind, {})
            cells.append(row["num_queries"].get(kind, 0))
            cells += [latency.get("p50", ""), latency.get("p99", ""), first.get("p99", "")]
        lost = row["lost"] or {}
        lines.append([*cells, row["num_suspensions"], lost.get("mean_s", ""), lost.get("max_s", "")])
    print(table(_POOLED_COLUMNS, lines))


def _or_blank(value: float | None) -> float | str:
    return "" if value is None else value


def draw(rows: Sequence[Row]) -> None:
    """Draw the figures of the first load."""
    first = [row for row in rows if row["digest"] == rows[0]["digest"]]
    title = f"{first[0]['load']}, {FLAGS.model}, {device_name()}"
    draw_over_time(first, title, Path(FLAGS.plot))


def tables_or_load() -> tuple[Row, dict[str, str]]:
    """Run a table or load; return results and units."""
    is_load = FLAGS.part == "load"
    names = methods.chosen(FLAGS.methods, methods.OF_LOADS if is_load else methods.OF_THE_TABLES)
    rows, taken = serve_all(names, loads())
    found: Row = {"points": rows, "memory": taken}
    if is_load:
        show_load(rows)
        found["pooled"] = pooled.pooled(rows)
        show_pooled(found["pooled"])
    else:
        compare(rows)
        show_table(rows)
    if FLAGS.plot is not None:
        draw(rows)
    return found, real_time.UNITS | pooled.UNITS | MEMORY_UNITS


def steps() -> tuple[Row, dict[str, str]]:
    """Time the launches; return results and units."""
    model = source_config(resolve_model(FLAGS.model), FLAGS.max_position_embeddings)
    dtype = resolve_dtype(serving_dtype(FLAGS.dtype), model)
    heads = model.num_kv_heads // FLAGS.tensor_parallel_size
    chosen = steps_config(2 * model.num_layers * heads * model.head_dim * dtype.itemsize)
    ceilings = measure_ceilings(
        num_bytes=num_bytes("--copy_bytes", FLAGS.copy_bytes),
        matrix_size=FLAGS.matrix_size,
        dtype=dtype.name,
        repeats=5,
    )
    runner = Runners(FLAGS.model, FLAGS.dtype, chosen, progress=shows_progress()).runner(chosen)
    times = LaunchTimes(runner, ceilings)
    rows = [
        one.as_dict() for one in tqdm(times.measure(), "launches", disable=not shows_progress(), leave=False)
    ]
    lines = []
    for row in rows:
        share = "" if row["share_of_bound"] is None else round(100 * row["share_of_bound"], 1)
        arithmetic = "" if row["arithmetic_s"] is None else 1e3 * row["arithmetic_s"]
        lines.append(
            [
                row["launch"],
                row["batch"],
                row["length"],
                1e3 * row["launch_s"],
                1e3 * row["bound_s"],
                arithmetic,
                share,
            ]
        )
    print(table(_LAUNCH_COLUMNS, lines))
    taken = memory(runner, chosen.kv_bytes)
    if taken["peak_bytes_in_use"] is not None:
        over = taken["peak_bytes_in_use"] - taken["weights_bytes"] - taken["kv_bytes"]
        print(f"peak of device memory: {over:,} bytes in addition to weights and --kv_bytes")
    results = {
        "launches": rows,
        "memory": taken,
        "copies_bytes_per_s": times.copies._asdict(),
        "ceilings": ceilings._asdict(),
    }
    return results, launch_times.UNITS | MEMORY_UNITS


def main() -> int:
    if FLAGS.output_json is not None:
        check_can_write("--output_json", Path(FLAGS.output_json))
    if FLAGS.plot is not None:
        if FLAGS.part == "steps":
            raise ConfigError("--plot", FLAGS.plot, "left out for --part=steps, which only has a table")
        check_can_plot("--plot", Path(FLAGS.plot))
    found, units = steps() if FLAGS.part == "steps" else tables_or_load()
    settings = {
        name: getattr(FLAGS, name)
        for name in ("part", "model", "dtype", "kv_bytes", "lengths", "length_scale", "doubled", "seconds")
    }
    print_document(json_line("rebatching", settings | found, units=units, device=device_name()))
    return 0


def define_flags() -> None:
    define_rebatching_flags()
    flags.DEFINE_multi_string("methods", [], f"Method to run, one of {'; '.join(methods.METHODS)}.")
    flags.DEFINE_string(
        "copy_bytes", "64MiB", "steps: size of the array whose copy is timed; use 1GiB on a GPU."
    )
    flags.DEFINE_integer("matrix_size", 512, "steps: size of the timed matrix product; use 8192 on a GPU.")
    flags.DEFINE_string("output_json", None, "File to which every finished run is appended.")
    flags.DEFINE_string("plot", None, "PNG file for figures 6 to 8 of the paper.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
