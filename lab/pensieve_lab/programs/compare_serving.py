r"""Compares systems on the same loads by the latency of their answers, from files of the serving benchmark.

    for system in rebatching stateless transformers; do
      python -m pensieve_lab.programs.benchmark_serving --system=$system --rates=2,5 --seeds=0,1 \
        --output_json=$system.jsonl
    done
    python -m pensieve_lab.programs.compare_serving \
        --documents=rebatching.jsonl,stateless.jsonl,transformers.jsonl \
        --plot=compared.png

Points of one load are put side by side. The program refuses documents whose points of one load had different
arrivals (`sessions_digest`), or that differ in model, trace, device or window. For one system it refuses two
configurations and a load that was measured twice. It also refuses systems with different device memory for
the KV cache (`kv_bytes`), unless `--allow_different_memory` is given or a system does not know its own.

Seeds of a load become one row: medians of their percentiles, and sums of what was answered. The row names its
seeds, which may differ between systems. If not all requests were answered when a run ended, its latencies
include the unanswered ones with the time they had waited, so they are lower bounds. The last line is one JSON
document (see `--json`), with every system's configuration, versions, commands and hardware.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.serving.compared import draw
from pensieve_lab.serving.report import COMMON, leaves, no_document, own_fields, read_documents

FLAGS = flags.FLAGS
Row = dict[str, Any]
_FLAG = "--documents"
_ABOUT = ("versions", "revision", "command", "hardware")  # origin of a document
_FIGURES = (
    *("rate", "seed", "sessions_digest", "void", "seconds", "num_requests", "num_unfinished"),
    *("sent_requests_per_s", "requests_per_s", "output_tokens_per_s"),
)
_SPREADS = {"latency_s": "latency_at_least_s", "first_token_s": "first_token_s"}
_PARTS = ("p50", "p99")
_COLUMNS = (
    *("system", "arrivals", "rate", "sent/s", "seeds", "requests/s", "tokens/s", "p50, s", "p99, s"),
    *("first p50, s", "first p99, s", "unfinished", "void"),
)
_UNITS = {
    "rate": "conversations that arrive per second",
    "sent_per_s": "arrivals per second in the windows of all seeds",
    "requests_per_s, output_tokens_per_s": "answered requests, and their tokens, per second in the windows "
    "of all seeds, whenever the requests arrived",
    "latency_s": "seconds from arrival to the last token, of requests that arrived in a window; unanswered "
    "requests count until the run ended",
    "first_token_s": "seconds from arrival to the first token, of those that were answered",
    "p50, p99": "percentiles of a load point; for several seeds their median, minimum and maximum",
    "kv_bytes": "device memory given to the KV cache; null: known only to the system",
    "left_out": "load points skipped because of --max_run_s",
}


class Documents:
    """Contents of files; a document that cannot be compared with earlier ones is refused.

    Attributes:
      points: every load point, with its system.
      common: fields that all documents share, among them their device.
      systems: by name, each system's own fields, its documents' origins, and skipped load points.
    """

    def __init__(self, *, same_memory: bool) -> None:
        """Start empty; with `same_memory`, systems must have equal `kv_bytes` if both are known."""
        self._same_memory = same_memory
        self.points: list[Row] = []
        self.common: Row = {}
        self.systems: dict[str, Row] = {}
        self._first: dict[Any, tuple[str, Row]] = {}  # by key, where a value that must agree occurred first

    def add(self, where: str, document: Mapping[str, Any]) -> None:
        """Add a document; raises ConfigError if it cannot be compared."""
        try:
            results = document["results"]
            system = str(results["system"])
            common = {name: results[name] for name in COMMON}
            # Points name their seeds; a generated trace, which the settings' seed determines, has its digest.
            common["settings"] = {key: one for key, one in common["settings"].items() if key != "seed"}
            common["device"] = document["hardware"]["device"].rpartition(": ")[2]
            own, memory = own_fields(results), {"kv_bytes": results["kv_bytes"]}
            about = {name: document[name] for name in _ABOUT}
            points = [_point(system, point) for point in results["points"]]
            left_out = list(results["left_out"])
        except (KeyError, TypeError, AttributeError) as error:
            raise no_document(_FLAG, where, error) from error
        self._agree(where, "all", leaves(common))
        self._agree(where, f"system {system}", own, "two configurations need two names, or two comparisons")
        if self._same_memory and memory["kv_bytes"] is not None:
            self._agree(where, "memory", memory, "--allow_different_memory compares them anyway")
        for point in points:
            self._add_point(where, point)
        self.common = self.common or common
        said = {name: results[name] for name in {field.partition(".")[0]: None for field in own}}
        entry = self.systems.setdefault(system, said | {"documents": [], "left_out": []})
        entry["left_out"] += left_out
        about |= {"environment": document.get("environment"), "file": where.rpartition(", line ")[0]}
        if about not in entry["documents"]:  # every load point has its own line
            entry["documents"].append(about)

    def _add_point(self, where: str, point: Row) -> None:
        load = f"arrivals {point['arrivals'] or 'poisson'}, rate {point['rate']}, seed {point['seed']}"
        key = (point["system"], load)
        if key in self._first:
            limit = "files that have a load point of a system once, by its arrivals, rate and seed"
            hint = f"{point['system']}, {load} is in {self._first[key][0]} as well"
            raise ConfigError(_FLAG, where, limit, hint)
        self._first[key] = (where, {})
        self._agree(where, load, {f"sessions_digest ({load})": point["sessions_digest"]})
        self.points.append(point)

    def _agree(self, where: str, key: str, said: Row, hint: str = "") -> None:
        """Raise ConfigError unless earlier values of `key` are equal."""
        first_where, first = self._first.setdefault(key, (where, said))
        for name in dict.fromkeys([*first, *said]):
            before, found = (json.dumps(one.get(name)) for one in (first, said))
            if before != found:
                limit = f"of the same {name} as {first_where}, {before}"
                raise ConfigError(_FLAG, where, limit, f"found {found}{hint and f'; {hint}'}")


def _point(system: str, point: Mapping[str, Any]) -> Row:
    """Return the compared figures of a load point; raises KeyError or TypeError if one is missing."""
    arrivals = point["arrivals"]
    found = {name: point[name] for name in _FIGURES}
    for name, figure in _SPREADS.items():
        spread = point[figure]
        found[name] = spread and {part: spread[part] for part in _PARTS}
    return {"system": system, "arrivals": arrivals and Path(arrivals).name, **found}


def read(paths: Sequence[Path], *, same_memory: bool) -> Documents:
    """Read files; raises ConfigError."""
    documents = Documents(same_memory=same_memory)
    for where, document in read_documents(_FLAG, paths):
        documents.add(where, document)
    if not documents.points:
        raise ConfigError(_FLAG, ",".join(map(str, paths)), "files with a load point")
    return documents


def rows_of(points: Sequence[Row]) -> list[Row]:
    """Make a row per system and load, ordered by rate and then in the order of the systems."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for point in points:
        groups.setdefault((point["arrivals"] or "", point["rate"] or 0.0, point["system"]), []).append(point)
    systems = list(dict.fromkeys(point["system"] for point in points))
    order = sorted(groups, key=lambda key: (*key[:2], systems.index(key[2])))
    return [_row(groups[key]) for key in order]


def _row(alike: Sequence[Row]) -> Row:
    """Make the row of one system and load."""
    seconds = sum(point["seconds"] for point in alike)

    def rate(name: str) -> float:
        return sum((point[name] or 0.0) * point["seconds"] for point in alike) / seconds if seconds else 0.0

    return {
        **{name: alike[0][name] for name in ("system", "arrivals", "rate")},
        "seeds": [point["seed"] for point in alike],
        "sent_per_s": rate("sent_requests_per_s"),
        "requests_per_s": rate("requests_per_s"),
        "output_tokens_per_s": rate("output_tokens_per_s"),
        **{name: _median([point[name] for point in alike]) for name in _SPREADS},
        "num_requests": sum(point["num_requests"] for point in alike),
        "num_unfinished": sum(point["num_unfinished"] for point in alike),
        "num_void": sum(point["void"] for point in alike),
    }


def _median(spreads: Sequence[Mapping[str, float] | None]) -> dict[str, dict[str, float]] | None:
    """Return medians of percentiles of several runs; None if no run answered anything."""
    known = [spread for spread in spreads if spread]
    if not known:
        return None
    found = {}
    for name in _PARTS:
        values = [spread[name] for spread in known]
        found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def show(rows: Sequence[Row]) -> None:
    """Print a line per row, with a dash for unknown values."""
    lines = []
    for row in rows:
        spreads = [row[name] and row[name][part] for name in _SPREADS for part in _PARTS]
        lines.append(
            [
                *(row["system"], row["arrivals"] or "Poisson", "-" if row["rate"] is None else row["rate"]),
                *(row["sent_per_s"], ",".join(map(str, row["seeds"]))),
                *(row["requests_per_s"], row["output_tokens_per_s"]),
                *("-" if spread is None else spread["median"] for spread in spreads),
                *(row["num_unfinished"], row["num_void"]),
            ]
        )
    print(table(_COLUMNS, lines))


def main() -> int:
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    paths = [Path(name) for name in FLAGS.documents]
    found = read(paths, same_memory=not FLAGS.allow_different_memory)
    rows, common = rows_of(found.points), found.common
    show(rows)
    for system, said in found.systems.items():
        if said["left_out"]:
            print(f"{system}: {len(said['left_out'])} load points skipped because of --max_run_s")
    if FLAGS.plot is not None:
        title = f"{common['model']}, {common['trace']['name']}, {common['device']}"
        draw(rows, title, Path(FLAGS.plot))
    results = common | {"documents": FLAGS.documents, "systems": found.systems, "rows": rows}
    print_document(json_line("serving_comparison", results, units=_UNITS, device="none: files read"))
    return 0


def define_flags() -> None:
    flags.DEFINE_list("documents", None, "Files of benchmark_serving.py --output_json.")
    require("documents")
    flags.DEFINE_bool(
        "allow_different_memory", False, "Compare systems with different device memory for the KV cache."
    )
    flags.DEFINE_string("plot", None, "File for a plot of latencies over loads, e.g. compared.png.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
