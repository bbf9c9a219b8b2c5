r"""Systems side by side on the same loads: how long answers took, from files of the serving benchmark.

    for system in rebatching stateless transformers; do
      python scripts/benchmark_serving.py --system=$system --rates=2,5 --seeds=0,1 --output_json=$system.jsonl
    done
    python scripts/compare_serving.py --documents=rebatching.jsonl,stateless.jsonl,transformers.jsonl \
        --plot=compared.png

Points of one load are put side by side: what arrives is the same for all, or the document is refused. Seeds
of a load become one row: medians of their percentiles, and sums of what was answered. Where not all requests
were answered when a run ended, its latencies are those of all requests, with what was not answered as long as
it had been there: at least so long. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from serving.compared import draw
from serving.report import read_documents
from steps.cost_plot import check_can_plot

from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.core.errors import ConfigError

FLAGS = flags.FLAGS
Row = dict[str, Any]
_SAME = ("model", "dtype", "trace", "loop")  # of all documents
_COLUMNS = (
    *("system", "arrivals", "rate", "seeds", "sent/s", "requests/s", "tokens/s", "p50, s", "p99, s"),
    *("first p50, s", "first p99, s", "unfinished", "void"),
)
_UNITS = {
    "sent_per_s, requests_per_s, output_tokens_per_s": "requests that came, and requests and tokens of "
    "answers that ended, in a second of the windows of all seeds",
    "latency_s": "seconds from arrival to the last token; of what was not answered, until the run ended",
    "first_token_s": "seconds from arrival to the first token, of what was answered",
    "p50, p99": "of a load point; of several seeds their median, with lowest and highest",
}


def read(paths: Sequence[Path]) -> tuple[list[Row], Row]:
    """Every load point with what it is of, and what all have in common; raises ConfigError."""
    points: list[Row] = []
    common: Row = {}
    for where, document in read_documents("--documents", paths):
        results = document["results"]
        settings = dict(results["settings"])
        seed = settings.pop("seed")
        found = {name: results[name] for name in _SAME} | {"settings": settings}
        found["device"] = document["hardware"]["device"].partition(": ")[2]
        for name, value in found.items():
            if common.setdefault(name, value) != value:
                limit = f"of the same {name} as the first, {json.dumps(common[name])}"
                raise ConfigError("--documents", where, limit, f"found {json.dumps(value)}")
        for point in results["points"]:
            arrivals = point.get("arrivals")
            what = {"system": results["system"], "arrivals": arrivals and Path(arrivals).name}
            points.append({"seed": seed, **point, **what})
    if not points:
        raise ConfigError("--documents", ",".join(map(str, paths)), "files with a load point")
    return points, common


def rows_of(points: Sequence[Row]) -> list[Row]:
    """A row for each system and load, loads in the order of their rates, systems as they were given."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for point in points:
        groups.setdefault((point["arrivals"] or "", point["rate"] or 0.0, point["system"]), []).append(point)
    systems = list(dict.fromkeys(point["system"] for point in points))
    order = sorted(groups, key=lambda key: (*key[:2], systems.index(key[2])))
    return [_row(groups[key]) for key in order]


def _row(alike: Sequence[Row]) -> Row:
    """Of one system and load."""
    seconds = sum(point["seconds"] for point in alike)

    def rate(name: str) -> float:
        return sum((point[name] or 0.0) * point["seconds"] for point in alike) / seconds if seconds else 0.0

    return {
        **{name: alike[0][name] for name in ("system", "arrivals", "rate")},
        "seeds": [point["seed"] for point in alike],
        "sent_per_s": rate("sent_requests_per_s"),
        "requests_per_s": rate("requests_per_s"),
        "output_tokens_per_s": rate("output_tokens_per_s"),
        "latency_s": _median([point["latency_at_least_s"] for point in alike]),
        "first_token_s": _median([point["first_token_s"] for point in alike]),
        "num_requests": sum(point["num_requests"] for point in alike),
        "num_unfinished": sum(point["num_unfinished"] for point in alike),
        "num_void": sum(point["void"] for point in alike),
    }


def _median(spreads: Sequence[Mapping[str, float] | None]) -> dict[str, dict[str, float]] | None:
    """Of percentiles of several runs; None where nothing was answered in any."""
    known = [spread for spread in spreads if spread]
    if not known:
        return None
    found = {}
    for name in ("p50", "p99"):
        values = [spread[name] for spread in known]
        found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def show(rows: Sequence[Row]) -> None:
    """A line for each; a dash for what is not known."""
    lines = []
    for row in rows:
        spreads = [row[name] and row[name][part] for name in _SPREADS for part in ("p50", "p99")]
        lines.append(
            [
                *(row["system"], row["arrivals"] or "Poisson", row["rate"], len(row["seeds"])),
                *(row["sent_per_s"], row["requests_per_s"], row["output_tokens_per_s"]),
                *("-" if spread is None else spread["median"] for spread in spreads),
                *(row["num_unfinished"], row["num_void"]),
            ]
        )
    print(table(_COLUMNS, lines))


_SPREADS = ("latency_s", "first_token_s")


def main() -> int:
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    points, common = read([Path(name) for name in FLAGS.documents])
    rows = rows_of(points)
    show(rows)
    if FLAGS.plot is not None:
        title = f"{common['model']}, {common['trace']['name']}, {common['device']}"
        draw(rows, title, Path(FLAGS.plot))
    results = common | {"documents": FLAGS.documents, "rows": rows}
    print_document(json_line("serving_comparison", results, units=_UNITS, device=common["device"]))
    return 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_list("documents", None, "Files that --output_json of benchmark_serving.py wrote.")
    require("documents")
    flags.DEFINE_string("plot", None, "Where latencies over loads are drawn, e.g. compared.png.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
