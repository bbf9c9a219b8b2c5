"""Measures how long short requests wait beside long ones that fill most of the pages.

    python -m pensieve_lab.programs.measure_head_of_line --seeds=0,1,2 --held_out_seeds=10,11,12
    python -m pensieve_lab.programs.measure_head_of_line --system=served --seeds=0,1,2

Short and long requests arrive at random for `--duration_s`, and all are answered. One long request fits the
pages, and two rarely do. The first line simulates the engine on a device of `--profile`; the second sends the
requests to `pensieve serve` with a tiny model on this machine, in real time. A seed draws the same arrivals
and lengths at every commit, so two commits can be compared: run each in its own checkout. Seeds of
`--held_out_seeds` are reported apart from those that were used during development. Prints a table and one
JSON document (see `--json`) as the last line, with the times of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from absl import flags
from tqdm import tqdm

from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_lab.experiments.machines import find_profile, profile_help
from pensieve_lab.head_of_line.load import (
    KINDS,
    LONG,
    SHORT,
    UNITS,
    Kind,
    Sent,
    Served,
    as_table,
    draw,
    summary,
)
from pensieve_lab.head_of_line.serve import serve_http, serve_simulated
from pensieve_lab.serving.request_table import packed
from pensieve_lab.serving.served import ServedProcess

FLAGS = flags.FLAGS
SIMULATED, SERVED = "simulated", "served"
_MODEL = "random:llama-tiny"
_DEFAULTS = {
    SIMULATED: {
        "kinds": {SHORT: Kind(2.0, 200, 150), LONG: Kind(0.12, 24_000, 300)},
        "duration_s": 400.0,
        "gpu_pages": 1250,
        "max_num_running": 256,
        "max_num_batched_tokens": 2048,
    },
    SERVED: {
        "kinds": {SHORT: Kind(2.0, 20, 6), LONG: Kind(0.25, 1200, 300)},
        "duration_s": 60.0,
        "gpu_pages": 64,
        "max_num_running": 32,
        "max_num_batched_tokens": 256,
    },
}
"""Loads that keep one long request running most of the time, and sizes of the engines."""
_GROUPS = ("seeds", "held_out_seeds")

type Serve = Callable[[Sequence[Sent], int], list[Served]]


def settings() -> dict[str, Any]:
    """Return the settings of `--system`, with the flags that are given; raises ConfigError."""
    chosen: dict[str, Any] = dict(_DEFAULTS[FLAGS.system])
    for name in ("duration_s", "gpu_pages"):
        if FLAGS[name].value is not None:
            chosen[name] = FLAGS[name].value
    if not 0 < chosen["duration_s"] < 1e6:
        raise ConfigError("--duration_s", chosen["duration_s"], "a number of seconds above 0")
    longest = max(kind.max_tokens for kind in chosen["kinds"].values())
    least = -(-longest // CacheConfig.chunk_tokens)
    if chosen["gpu_pages"] < least:
        raise ConfigError("--gpu_pages", chosen["gpu_pages"], f"at least {least}, for the longest request")
    return chosen


def config_of(chosen: dict[str, Any]) -> EngineConfig:
    """Return the simulated engine's configuration."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=chosen["gpu_pages"], cpu_pages=chosen["gpu_pages"]),
        scheduler=SchedulerConfig(
            max_num_running=chosen["max_num_running"],
            max_num_batched_tokens=chosen["max_num_batched_tokens"],
        ),
    )


def seeds_of(group: str) -> list[int]:
    """Return the seeds of a flag; raises ConfigError."""
    texts: list[str] = FLAGS[group].value or []
    try:
        seeds = [int(text) for text in texts]
    except ValueError as error:
        limit = "whole numbers from 0 on, separated by commas"
        raise ConfigError(f"--{group}", ",".join(texts), limit) from error
    if any(seed < 0 for seed in seeds):
        raise ConfigError(f"--{group}", ",".join(texts), "whole numbers from 0 on")
    return seeds


def measure(serve: Serve, chosen: dict[str, Any]) -> dict[str, Any]:
    """Serve the load of every seed; return requests and spreads by seed, and spreads of each group."""
    groups: dict[str, Any] = {}
    work = [(group, seed) for group in _GROUPS for seed in seeds_of(group)]
    tables: dict[str, list[dict[str, Any]]] = {group: [] for group, _ in work}
    by_seed: dict[str, list[dict[str, Any]]] = {group: [] for group, _ in work}
    for group, seed in tqdm(work, unit=" seeds", disable=not shows_progress()):
        found = as_table(serve(draw(chosen["kinds"], seed, chosen["duration_s"]), seed))
        tables[group].append(found)
        by_seed[group].append({"seed": seed, **summary([found]), "requests": packed(found)})
    for group, found_tables in tables.items():
        groups[group] = {**summary(found_tables), "by_seed": by_seed[group]}
    return groups


def rows(groups: dict[str, Any]) -> list[list[object]]:
    """Return the lines of the table: groups first, then their seeds."""
    found: list[list[object]] = []
    for group, figures in groups.items():
        pairs = [(group, figures), *((f"seed {one['seed']}", one) for one in figures["by_seed"])]
        for name, one in pairs:
            for kind in KINDS:
                first, whole = one[kind]["first_token_s"], one[kind]["latency_s"]
                times = [spread[part] if spread else "-" for spread in (first, whole) for part in _SHOWN]
                found.append([name, kind, one[kind]["num_requests"], *times])
    return found


_SHOWN = ("p50", "p99", "max")


def main() -> int:
    chosen = settings()
    document: dict[str, Any] = {"system": FLAGS.system}
    if not any(seeds_of(group) for group in _GROUPS):
        raise ConfigError("--seeds", "", "at least one seed")
    with ExitStack() as stack:
        if FLAGS.system == SIMULATED:
            profile = find_profile(FLAGS.profile)
            device = f"simulated: {profile.device}, {profile.model}, profile {profile.source}"
            document["profile"] = {"name": FLAGS.profile, "source": profile.source}
            longest = max(kind.max_tokens for kind in chosen["kinds"].values())
            config = config_of(chosen)
            groups = measure(lambda sent, _: serve_simulated(sent, config, profile, longest), chosen)
        else:
            device = "cpu: pensieve serve"
            document["model"] = _MODEL
            server = stack.enter_context(ServedProcess(server_flags(chosen)))
            groups = measure(lambda sent, seed: serve_http(sent, server, _MODEL, seed), chosen)
    columns = [
        "seeds",
        "kind",
        "requests",
        *(f"{of} {part}, s" for of in ("first", "last") for part in _SHOWN),
    ]
    print(table(columns, rows(groups)))
    kinds = {name: kind._asdict() for name, kind in chosen.pop("kinds").items()}
    document |= {"settings": {**chosen, "kinds": kinds}, "groups": groups}
    print_document(json_line("head_of_line", document, units=UNITS, device=device))
    return 0


def server_flags(chosen: dict[str, Any]) -> list[str]:
    """Return the flags of the server."""
    names = ("gpu_pages", "max_num_running", "max_num_batched_tokens")
    return [
        f"--model={_MODEL}",
        f"--cpu_pages={chosen['gpu_pages']}",
        *(f"--{name}={chosen[name]}" for name in names),
    ]


def define_flags() -> None:
    flags.DEFINE_enum("system", SIMULATED, [SIMULATED, SERVED], "Who serves.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of arrivals and lengths.")
    flags.DEFINE_list("held_out_seeds", [], "Further seeds, reported apart.")
    flags.DEFINE_float("duration_s", None, "Seconds in which requests arrive; default: 400, served 60.")
    flags.DEFINE_integer("gpu_pages", None, "Pages of device memory; default: 1250, served 64.")
    flags.DEFINE_string("profile", "h200_llama2-13b-gqa10", profile_help())
    flags.DEFINE_bool("progress", None, "Show a progress bar; default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
