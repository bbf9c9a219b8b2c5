"""Compares the simulator of padded batches with measured runs: the same queries, settings and steps.

    python -m pensieve_lab.programs.validate_ring_costs --documents=lab/results/h200_rebatching_table2.json

`--documents` are of benchmark_rebatching.py, table1 or table2. Each point is simulated with the costs of
`--profile`; steps must be the same, and seconds show the error. Flags give the settings that documents do not
have (`--prefill_batch`, `--prefill_tokens`). The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax.commands.engine_flags import num_bytes
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching import RebatchingConfig
from pensieve_lab.rebatching import loads, methods
from pensieve_lab.rebatching.costs import RingCosts
from pensieve_lab.rebatching.simulation import simulate

FLAGS = flags.FLAGS
_COLUMNS = ("load", "batch", "method", "steps", "simulated", "seconds", "simulated, s", "error, %")
_UNITS = {
    "seconds": "from the first arrival to the last answer",
    "error": "relative error of simulated seconds",
}


def read(name: str) -> dict[str, Any]:
    """Read the results of a document; raises ConfigError."""
    try:
        results: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))["results"]
        if results["part"] not in ("table1", "table2"):
            raise ConfigError("--documents", name, "documents of --part=table1 or table2")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("--documents", name, "a document of benchmark_rebatching.py", str(error)) from error
    return results


def load_of(results: dict[str, Any], seed: int) -> loads.Load:
    """Make the queries of a point."""
    if results["part"] == "table2":
        return loads.table2(seed, results["length_scale"])
    return loads.table1(seed, results["length_scale"], doubled=results["doubled"])


def simulated(results: dict[str, Any], point: dict[str, Any], costs: RingCosts) -> dict[str, Any]:
    """Simulate a measured point; return both results."""
    load = load_of(results, point["seed"])
    if load.digest != point["digest"]:
        raise ConfigError("--documents", point["load"], "a document with the queries that this version makes")
    base = RebatchingConfig(
        max_batch=point["batch"],
        kv_bytes=point.get("kv_bytes") or num_bytes("--kv_bytes", results["kv_bytes"]),
        lengths=tuple(map(int, results["lengths"])) or None,
        max_context_tokens=load.max_context_tokens,
        prefill_batch=FLAGS.prefill_batch,
        prefill_tokens=FLAGS.prefill_tokens,
    )
    config = methods.config_of(point["method"], base)
    served = simulate(config, costs, load.queries, max_positions=max(load.max_context_tokens, 2048))
    return {
        "load": point["load"],
        "batch": point["batch"],
        "method": point["method"],
        "seed": point["seed"],
        "steps": point["steps"],
        "simulated_steps": served.metrics.num_steps,
        "seconds": point["seconds"],
        "simulated_seconds": served.completion_s,
        "error": served.completion_s / point["seconds"] - 1,
    }


def main() -> int:
    costs = RingCosts.load(FLAGS.profile)
    rows = [
        simulated(results, point, costs)
        for results in map(read, FLAGS.documents)
        for point in results["points"]
    ]
    names = ("load", "batch", "method", "steps", "simulated_steps", "seconds", "simulated_seconds")
    shown = [[*(row[name] for name in names), round(100 * row["error"], 1)] for row in rows]
    print(table(_COLUMNS, shown))
    document = {"profile": FLAGS.profile, "documents": FLAGS.documents, "points": rows}
    print_document(json_line("ring cost validation", document, units=_UNITS, device="none: simulated"))
    return 0 if all(row["steps"] == row["simulated_steps"] for row in rows) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_list("documents", None, "Measured runs.")
    require("documents")
    flags.DEFINE_string("profile", "h200_llama2-7b", "Costs: a file, or the name of one in the package.")
    flags.DEFINE_integer("prefill_batch", 4, "Value of the measured runs.", lower_bound=1)
    flags.DEFINE_integer("prefill_tokens", 4096, "Value of the measured runs.", lower_bound=32)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
