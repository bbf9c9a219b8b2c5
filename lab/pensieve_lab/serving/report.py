"""Reports of load points: tables, JSON lines, and the curves of several systems.

Owns: columns, the contents of a file of points, reading it back, and which points may be drawn together.
Does not know: how points are measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_jax import ConfigError
from pensieve_jax.commands.report import table
from pensieve_lab.common.crossing import crossing_at
from pensieve_lab.serving.latency_plot import LATENCIES, Latency, Point, View, plot_latency

BENCHMARK = "serving_benchmark"
COMMON = ("model", "dtype", "trace", "loop", "settings")  # must be equal in all compared systems
_OWN = (*COMMON, "system", "config", "options")  # must be equal in all points of one curve
# What may differ: the windows of a point, and where another server was given the model's files.
_WINDOW = ("warm_up_s", "window_s", "drain_s")
_MAY_DIFFER = {"settings": _WINDOW, "options": ("model",)}
_OF_RUNS = ("system", "points", "left_out", "start_up_s")  # fields of the document, not of its system
_SERVED = {
    "sent/s": "sent_requests_per_s",
    "requests/s": "requests_per_s",
    "tokens/s": "output_tokens_per_s",
    "seconds": "seconds",
}
_SPREADS = {
    "ms/token": ("normalized_latency_s", ("mean", "p50", "p90", "p99")),
    "ttft ms": ("first_token_s", ("mean", "p90", "p99")),
    "tpot ms": ("output_token_s", ("mean", "p99")),
    "lag ms": ("client_lag_s", ("p99",)),
}
_FOUND = {
    "gpu hits": ("gpu_hit_rate", 1.0),
    "cpu hits": ("cpu_hit_rate", 1.0),
    "recomputed": ("recomputed_tokens", 1),
    "wasted": ("wasted_tokens", 1),
    "suspended": ("num_suspensions", 1),
    "GB out": ("swapped_out_bytes", 1e-9),
    "GB in": ("swapped_in_bytes", 1e-9),
    "stalled s": ("transfer_stall_s", 1.0),
    "steps": ("num_steps", 1),
    "tokens/step": ("tokens_per_step", 1.0),
    "host ms/step": ("host_step_s", 1e3),
    "compiled": ("num_compilations", 1),
    "unfinished": ("num_unfinished", 1),
}
_STEP_COLUMNS = ("system", "rate", "bucket", "steps", "ms/step", "tokens/step", "% of time")


def tables(system: str, points: Sequence[Mapping[str, Any]]) -> str:
    """Format tables of the load and latencies, of cache hits and costs, and of the time by step bucket.

    A dash stands for an unknown figure.
    """
    spreads = [f"{name} {part}" for name, (_, parts) in _SPREADS.items() for part in parts]
    served = table(["system", "rate", *_SERVED, *spreads], [_served_row(system, point) for point in points])
    found = table(["system", "rate", *_FOUND], [_found_row(system, point) for point in points])
    steps = [row for point in points for row in _step_rows(system, point)]
    return "\n\n".join([served, found, *([table(_STEP_COLUMNS, steps)] if steps else [])])


def _served_row(system: str, point: Mapping[str, Any]) -> list[object]:
    cells = [system, _rate(point), *(_cell(point[key], 1.0) for key in _SERVED.values())]
    for key, parts in _SPREADS.values():
        cells += [_cell(point[key] and point[key][part], 1e3) for part in parts]
    return cells


def _found_row(system: str, point: Mapping[str, Any]) -> list[object]:
    return [system, _rate(point), *(_cell(point[key], factor) for key, factor in _FOUND.values())]


def _step_rows(system: str, point: Mapping[str, Any]) -> list[list[object]]:
    """Return a row per step bucket, and one for the rest: no work, or only the host was busy."""
    rows: list[list[object]] = []
    left_s = seconds = point["seconds"]
    for bucket, steps in point["steps"].items():
        in_steps_s = steps["num_steps"] * steps["mean_s"]
        left_s -= in_steps_s
        cells = [steps["num_steps"], f"{1e3 * steps['mean_s']:.2f}", f"{steps['mean_tokens']:.1f}"]
        rows.append([system, _rate(point), bucket, *cells, _share(in_steps_s, seconds)])
    if rows:
        rows.append([system, _rate(point), "none", "-", "-", "-", _share(max(left_s, 0.0), seconds)])
    return rows


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _rate(point: Mapping[str, Any]) -> str:
    return "-" if point["rate"] is None else f"{point['rate']:g}"


def _cell(value: float | None, factor: float) -> object:
    return "-" if value is None else value * factor


def append_line(path: Path, line: str) -> None:
    """Append a document to a file; raises ConfigError if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        limit = "a file that can be written"
        raise ConfigError("--output_json", str(path), limit, error.strerror or str(error)) from error


class Curves(NamedTuple):
    """Curves to draw: their title, and the points of every curve by rate."""

    title: str
    by_name: dict[str, list[Point]]


class Named(NamedTuple):
    """Files of one curve and its name; None names each point after its system."""

    flag: str
    name: str | None
    paths: tuple[Path, ...]


def named_curve(text: str) -> Named:
    """Parse `--curve` as "NAME=FILE,FILE"; raises ConfigError."""
    name, _, files = text.rpartition("=")
    if not name or not files:
        raise ConfigError("--curve", text, "a name, an equals sign, and files with commas between them")
    return Named("--curve", name, tuple(map(Path, files.split(","))))


def read_curves(curves: Sequence[Named], latency: Latency = LATENCIES["token"]) -> Curves:
    """Read a latency from files of `append_line`; void points are left out, and windows may differ in length.

    Raises ConfigError for other files, if no point counts, and for points that differ in model, trace, users,
    seeds or arrivals or, within a curve, in system or configuration.
    """
    found: dict[str, list[tuple[float, Point]]] = {}
    first: dict[str, tuple[str, Mapping[str, Any]]] = {}
    loads: dict[Any, tuple[str, Any]] = {}
    for flag, name, paths in curves:
        for where, results in read_results(flag, paths):
            curve_name = name or str(results["system"])
            for key, parts in (("all", COMMON), (f"of {curve_name}", _OWN)):
                _check_alike(flag, (where, results), first.setdefault(key, (where, results)), parts)
            points = _drawn(flag, where, results, latency)
            _check_loads(flag, where, results, loads)
            if points:
                found.setdefault(curve_name, []).extend(points)
    if not found:
        given = ",".join(str(path) for one in curves for path in one.paths)
        raise ConfigError(curves[0].flag, given, "files with a point that is not void")
    where, results = first["all"]
    try:
        title = f"{results['model']}, {results['trace']['name']}"
    except (KeyError, TypeError) as error:
        raise no_document(curves[0].flag, where, error) from error
    return Curves(title, {name: [point for _, point in sorted(points)] for name, points in found.items()})


def at_level(curves: Mapping[str, Sequence[Point]], level_s: float) -> dict[str, float | None]:
    """Return the requests/s at which each curve's mean, interpolated linearly, first exceeds the level.

    A curve that does not cross it has None: all of its points are below, or all are above.
    """
    return {
        name: crossing_at(level_s, [(point.requests_per_s, point.mean_s) for point in points])
        for name, points in curves.items()
    }


def read_results(flag: str, paths: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where a document stands and its results; see `read_documents`."""
    for where, document in read_documents(flag, paths):
        yield where, document["results"]


def read_documents(flag: str, paths: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each document of files of `append_line` stands, and the document.

    Raises ConfigError, which names `flag`, for other files.
    """
    for path in paths:
        for number, text in enumerate(_lines(flag, path), start=1):
            where = f"{path}, line {number}"
            try:
                document: Mapping[str, Any] = json.loads(text)
                if document["benchmark"] != BENCHMARK:
                    raise ValueError(f"a document of {document['benchmark']}")
                if not {"system", "points"} <= document["results"].keys():
                    raise ValueError("a document without load points")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise no_document(flag, where, error) from error
            yield where, document


def draw(curves: Mapping[str, Sequence[Point]], title: str, path: Path, view: View | None = None) -> None:
    """Draw the paper's throughput-latency curves; raises ConfigError if the file cannot be written."""
    try:
        plot_latency(curves, title, path, view or View())
    except OSError as error:
        limit = "a file that can be written"
        raise ConfigError("--plot", str(path), limit, error.strerror or str(error)) from error


def curve(points: Sequence[Mapping[str, Any]], latency: Latency = LATENCIES["token"]) -> list[Point]:
    """Return the points to draw of measured or simulated load points: answered and not void."""
    return [
        Point(point["requests_per_s"], *(point[latency.field][part] for part in ("mean", "p90")))
        for point in points
        if point[latency.field] and not point.get("void")
    ]


def _lines(flag: str, path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(flag, str(path), "files that can be read", str(error)) from error


def _drawn(flag: str, where: str, results: Mapping[str, Any], latency: Latency) -> list[tuple[float, Point]]:
    """Return the points of a document that are drawn, with their rates."""
    try:
        return [
            (point["rate"] or 0.0, drawn) for point in results["points"] for drawn in curve([point], latency)
        ]
    except (KeyError, TypeError) as error:
        raise no_document(flag, where, error) from error


def no_document(flag: str, where: str, error: Exception) -> ConfigError:
    """Make the error for a file of another kind, or one written before a field existed."""
    found = f"it has no {error}" if isinstance(error, KeyError) else f"found {error}"
    return ConfigError(flag, where, "files that --output_json wrote", found)


def own_fields(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document's fields of its system by dotted names, without those that may differ."""
    return leaves({name: _compared(results, name) for name in results if name not in (*COMMON, *_OF_RUNS)})


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested mappings into dotted names that begin with `name`."""
    if not isinstance(value, Mapping):
        return {name: value}
    parts = [leaves(part, f"{name}.{key}" if name else key) for key, part in value.items()]
    return {path: leaf for part in parts for path, leaf in part.items()}


def _check_loads(
    flag: str, where: str, results: Mapping[str, Any], loads: dict[Any, tuple[str, Any]]
) -> None:
    """Refuse points of other seeds or arrivals than earlier ones in `loads`; void points are ignored."""
    settings = results.get("settings")
    if not isinstance(settings, dict):
        settings = {}
    for point in results["points"]:
        if point.get("void"):
            continue
        # Documents written before several seeds were possible have one among the other settings.
        seed, arrivals = point.get("seed", settings.get("seed")), point.get("arrivals")
        said: dict[Any, str] = {"of": f"seed {seed}, arrivals {arrivals or 'poisson'}"}
        window = tuple(settings.get(name) for name in _WINDOW)
        if digest := point.get("sessions_digest"):
            said[(point["rate"], window)] = f"sessions_digest {digest} at the rate {point['rate']}"
        for key, what in said.items():
            first_where, first = loads.setdefault(key, (where, what))
            if what != first:
                limit = f"of one load, {first} as {first_where}: one of --seeds, one of --arrivals"
                hint = f"found {what}; compare_serving.py draws several"
                raise ConfigError(flag, where, limit, hint)


def _check_alike(
    flag: str,
    this: tuple[str, Mapping[str, Any]],
    first: tuple[str, Mapping[str, Any]],
    names: Sequence[str],
) -> None:
    different = [name for name in names if _compared(this[1], name) != _compared(first[1], name)]
    if different:
        limit = f"measured as {first[0]}, to be drawn with it"
        raise ConfigError(flag, this[0], limit, f"of another {', '.join(different)}")


def _compared(results: Mapping[str, Any], name: str) -> Any:
    """Return the part of a document that must equal the others'."""
    part = _that_matters(results.get(name))
    if name in _MAY_DIFFER and isinstance(part, dict):
        return {key: value for key, value in part.items() if key not in _MAY_DIFFER[name]}
    return part


def _that_matters(part: Any) -> Any:
    """Drop the compilation cache's path, and the all-reduce of a single device."""
    if not isinstance(part, dict):
        return part
    dropped = {"compilation_cache_dir", *(["all_reduce"] if part.get("tensor_parallel_size") == 1 else [])}
    return {key: _that_matters(value) for key, value in part.items() if key not in dropped}
