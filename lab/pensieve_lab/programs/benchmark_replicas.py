r"""Cost of a front end with replicas, and their throughput, compared with a single server on the same
machine.

    python -m pensieve_lab.programs.benchmark_replicas \
        --history=postgresql://me@host/database [--replicas=1,2]
        [--serve='--model=random:llama-tiny --dtype=float32 --max_num_running=32']

The systems alternate, `--num_rounds` times: `pensieve serve` alone, and behind Ray Serve with each number of
replicas. `--num_clients` stream completions one after another, each of `--prompt_tokens` random ids and
`--reply_tokens` of reply, for `--seconds` after `--warm_s`. With 1 replica the difference is the front end's
cost: one more hop per turn, and messages of at most 20 ms of tokens. With as many replicas as GPUs, and
`--clients_per_replica`, each replica has the load of the single server, so that times per token can be equal.

Clients, front end and engines share the processors, so with few processors the clients and engines also pay
for the front end. Prints a table, and one JSON document (see `--json`) as the last line.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import (
    define_document_flag,
    device_name,
    json_line,
    print_document,
    table,
)
from pensieve_lab.serving.http_client import HttpClient
from pensieve_lab.serving.served import ServedProcess

FLAGS = flags.FLAGS
_SETTINGS = (
    *("serve", "num_clients", "clients_per_replica", "prompt_tokens", "reply_tokens"),
    *("seconds", "warm_s", "num_rounds"),
)
_UNITS = {
    "tokens_per_s": "reply tokens per second; a reply that lies partly within the time counts in part",
    "turns_per_s": "turns per second, counted likewise from their requests on",
    "num_turns": "turns that ended within the time, whose latencies are reported",
    "first_token_ms": "milliseconds from a request to its first event with a token: quantiles",
    "per_token_ms": "milliseconds from the first token to the last, per token after the first: median",
}
_SINGLE = "single"


class Turn(NamedTuple):
    """Times of one turn, as readings of `time.perf_counter`."""

    sent_s: float
    first_s: float
    end_s: float


async def load(host: str, port: int, num_clients: int) -> dict[str, Any]:
    """Run the clients; return their figures of the measured time."""
    client = HttpClient(host, port)
    draw = np.random.default_rng(0)
    turns: list[Turn] = []
    begin_s = time.perf_counter() + FLAGS.warm_s
    end_s = begin_s + FLAGS.seconds

    async def one(number: int) -> None:
        # Clients that start together would stay in phase, and all or none would end within the time.
        await asyncio.sleep(number / num_clients * FLAGS.warm_s / 2)
        while time.perf_counter() < end_s:
            body = {
                "prompt": draw.integers(3, 250, FLAGS.prompt_tokens).tolist(),
                "max_tokens": FLAGS.reply_tokens,
                "min_tokens": FLAGS.reply_tokens,
                "temperature": 0,
                "stream": True,
                "return_token_ids": True,  # a model without a tokenizer has no text to send
            }
            sent_s = time.perf_counter()
            timing = await client.post("/v1/completions", body)
            turns.append(Turn(sent_s, timing.first_s, timing.end_s))

    await asyncio.gather(*map(one, range(num_clients)))
    await client.close()
    return figures(turns, begin_s, end_s)


def figures(all_turns: Sequence[Turn], begin_s: float, end_s: float) -> dict[str, Any]:
    """Return latencies of the turns that ended within the time, and rates; raises ConfigError if none did."""
    turns = [turn for turn in all_turns if begin_s <= turn.end_s <= end_s]
    if not turns:
        raise ConfigError("--seconds", FLAGS.seconds, "long enough for a turn")

    def within(turn_begin_s: float, turn_end_s: float) -> float:
        """Return the share of a turn that lies within the measured time; for an empty turn 0 or 1."""
        if turn_begin_s == turn_end_s:
            return float(begin_s <= turn_end_s <= end_s)
        return max(0.0, min(turn_end_s, end_s) - max(turn_begin_s, begin_s)) / (turn_end_s - turn_begin_s)

    num_turns = sum(within(turn.sent_s, turn.end_s) for turn in all_turns)
    num_replies = sum(within(turn.first_s, turn.end_s) for turn in all_turns)
    seconds = end_s - begin_s
    first_ms = [1e3 * (turn.first_s - turn.sent_s) for turn in turns]
    behind = max(1, FLAGS.reply_tokens - 1)
    per_token_ms = [1e3 * (turn.end_s - turn.first_s) / behind for turn in turns]
    return {
        "num_turns": len(turns),
        "turns_per_s": num_turns / seconds,
        "tokens_per_s": num_replies * FLAGS.reply_tokens / seconds,
        "first_token_ms": {f"p{share}": float(np.percentile(first_ms, share)) for share in (50, 90, 99)},
        "per_token_ms": statistics.median(per_token_ms),
    }


def measured(replicas: int | None) -> dict[str, Any]:
    """Measure one system from its start to its end."""
    many = [] if replicas is None else [f"--replicas={replicas}"]
    num_clients = FLAGS.num_clients * (replicas or 1) if FLAGS.clients_per_replica else FLAGS.num_clients
    with ServedProcess([f"--history={FLAGS.history}", *shlex.split(FLAGS.serve), *many]) as served:
        found = asyncio.run(load(served.host, served.port, num_clients))
    return {"num_clients": num_clients, **found}


def main() -> int:
    systems: dict[str, int | None] = {_SINGLE: None}
    systems |= {f"{count} behind Ray": count for count in map(int, FLAGS.replicas)}
    rounds: list[dict[str, dict[str, Any]]] = [{} for _ in range(FLAGS.num_rounds)]
    for found in rounds:
        for name, count in systems.items():
            found[name] = measured(count)  # takes minutes, so it is printed before the table
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr)
    rows = [
        [
            name,
            one["tokens_per_s"],
            one["first_token_ms"]["p50"],
            one["first_token_ms"]["p99"],
            one["per_token_ms"],
        ]
        for found in rounds
        for name, one in found.items()
    ]
    print(table(["system", "tokens/s", "first p50 ms", "first p99 ms", "per token ms"], rows))
    document = {
        "settings": {name: FLAGS[name].value for name in _SETTINGS},
        "ray": version("ray"),
        "rounds": rounds,
    }
    print_document(json_line("replicas", document, units=_UNITS, device=device_name()))
    return 0


def define_flags() -> None:
    flags.DEFINE_string("history", None, "History of all systems, postgresql://...")
    require("history")
    flags.DEFINE_list("replicas", ["1"], "Numbers of replicas to measure.")
    sizes = "--model=random:llama-tiny --dtype=float32 --max_num_running=32 --gpu_pages=1024 --cpu_pages=64"
    flags.DEFINE_string("serve", sizes, "Flags of `pensieve serve`, for all systems.")
    flags.DEFINE_integer("num_clients", 16, "Clients, each with one turn at a time.", lower_bound=1)
    flags.DEFINE_bool("clients_per_replica", False, "Use --num_clients clients per replica.")
    flags.DEFINE_integer("prompt_tokens", 32, "Prompt tokens of each turn.", lower_bound=1)
    flags.DEFINE_integer("reply_tokens", 32, "Reply tokens of each turn.", lower_bound=1)
    flags.DEFINE_float("seconds", 20.0, "Measured seconds of each system.")
    flags.DEFINE_float("warm_s", 5.0, "Before that.")
    flags.DEFINE_integer("num_rounds", 1, "Number of rounds over all systems.", lower_bound=1)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
