r"""Systems side by side on the same loads: how long answers took, from files of the serving benchmark.

    for system in rebatching stateless transformers; do
      python -m pensieve_lab.programs.benchmark_serving --system=$system --rates=2,5 --seeds=0,1 \
        --output_json=$system.jsonl
    done
    python -m pensieve_lab.programs.compare_serving \
        --documents=rebatching.jsonl,stateless.jsonl,transformers.jsonl \
        --plot=compared.png

Points of one load are put side by side. Refused are documents whose points of one load met other arrivals
(`sessions_digest`), or that are of another model, trace, device or window; of one system, two configurations
and a load that was measured twice; and systems that were given other memory for KV state on the device
(`kv_bytes`), unless `--allow_different_memory` says so or a system does not know its own.

Seeds of a load become one row: medians of their percentiles, and sums of what was answered. Which seeds those
are is in the row: systems may have served others. Where not all requests were answered when a run ended, its
latencies are those of all requests, with what was not answered as long as it had been there: at least so
long. The last line is one JSON document (see `--json`), with what every system and its own documents say of
configuration, versions, commands and hardware.
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
_ABOUT = ("versions", "revision", "command", "hardware")  # how a document came about
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
    "rate": "conversations that begin in a second",
    "sent_per_s": "requests that came in a second of the windows of all seeds",
    "requests_per_s, output_tokens_per_s": "requests, and tokens, of answers that ended in a second of the "
    "windows of all seeds, whenever their requests came",
    "latency_s": "seconds from arrival to the last token, of requests that came in a window; of what was not "
    "answered, until the run ended",
    "first_token_s": "seconds from arrival to the first token, of those of them that were answered",
    "p50, p99": "of a load point; of several seeds their median, with lowest and highest",
    "kv_bytes": "of KV state in device memory, as the system was given; null where only it knows",
    "left_out": "load points that --max_run_s left no time for",
}


class Documents:
    """What files say, each document refused that cannot stand beside those before it.

    Attributes:
      points: every load point, with its system.
      common: what all documents have in common, their device among it.
      systems: by name, what each says of itself, of how its documents came about, and of what they lack.
    """

    def __init__(self, *, same_memory: bool) -> None:
        """None yet; `same_memory`: systems have as many bytes of KV state as others, where both know."""
        self._same_memory = same_memory
        self.points: list[Row] = []
        self.common: Row = {}
        self.systems: dict[str, Row] = {}
        self._first: dict[Any, tuple[str, Row]] = {}  # of what must agree: where it was said first

    def add(self, where: str, document: Mapping[str, Any]) -> None:
        """One more; raises ConfigError."""
        try:
            results = document["results"]
            system = str(results["system"])
            common = {name: results[name] for name in COMMON}
            # Seeds are told by points; a made trace, which has the settings', by its digest.
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
            self._agree(where, "memory", memory, "--allow_different_memory compares them all the same")
        for point in points:
            self._add_point(where, point)
        self.common = self.common or common
        said = {name: results[name] for name in {field.partition(".")[0]: None for field in own}}
        entry = self.systems.setdefault(system, said | {"documents": [], "left_out": []})
        entry["left_out"] += left_out
        about |= {"environment": document.get("environment"), "file": where.rpartition(", line ")[0]}
        if about not in entry["documents"]:  # every load point has a line of its own
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
        """Raise ConfigError unless the first that spoke of `key` said the same."""
        first_where, first = self._first.setdefault(key, (where, said))
        for name in dict.fromkeys([*first, *said]):
            before, found = (json.dumps(one.get(name)) for one in (first, said))
            if before != found:
                limit = f"of the same {name} as {first_where}, {before}"
                raise ConfigError(_FLAG, where, limit, f"found {found}{hint and f'; {hint}'}")


def _point(system: str, point: Mapping[str, Any]) -> Row:
    """What is compared of a load point; raises KeyError or TypeError for one that lacks any of it."""
    arrivals = point["arrivals"]
    found = {name: point[name] for name in _FIGURES}
    for name, figure in _SPREADS.items():
        spread = point[figure]
        found[name] = spread and {part: spread[part] for part in _PARTS}
    return {"system": system, "arrivals": arrivals and Path(arrivals).name, **found}


def read(paths: Sequence[Path], *, same_memory: bool) -> Documents:
    """What files hold; raises ConfigError."""
    documents = Documents(same_memory=same_memory)
    for where, document in read_documents(_FLAG, paths):
        documents.add(where, document)
    if not documents.points:
        raise ConfigError(_FLAG, ",".join(map(str, paths)), "files with a load point")
    return documents


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
        **{name: _median([point[name] for point in alike]) for name in _SPREADS},
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
    for name in _PARTS:
        values = [spread[name] for spread in known]
        found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def show(rows: Sequence[Row]) -> None:
    """A line for each; a dash for what is not known."""
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
            print(f"{system}: {len(said['left_out'])} load points left out, after --max_run_s")
    if FLAGS.plot is not None:
        title = f"{common['model']}, {common['trace']['name']}, {common['device']}"
        draw(rows, title, Path(FLAGS.plot))
    results = common | {"documents": FLAGS.documents, "systems": found.systems, "rows": rows}
    print_document(json_line("serving_comparison", results, units=_UNITS, device="none: files read"))
    return 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_list("documents", None, "Files that --output_json of benchmark_serving.py wrote.")
    require("documents")
    flags.DEFINE_bool(
        "allow_different_memory", False, "Compare systems of different bytes of KV state on the device."
    )
    flags.DEFINE_string("plot", None, "Where latencies over loads are drawn, e.g. compared.png.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
