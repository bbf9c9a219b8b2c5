"""Race checker: clients of several keys change the same things at the same time, and each answer is checked.

    python -m pensieve_lab.programs.check_races --num_operations=6000 --seed=1 --json=FILE
    python -m pensieve_lab.programs.check_races --num_operations=6000 --quotas

Starts `pensieve serve` with keys of three owners. Their clients create, continue, cancel, read and delete
conversations, items and responses. Some send a request twice with one key, and some leave before the answer.
Each answer is checked against a sequential model: some order of overlapping requests must explain it
(`pensieve_lab.races.rules`). What each owner stores is looked up all the time. After each round of
`--round_operations`, the history's amounts are compared with a recount of its rows, and one owner after the
other deletes everything.

With `--quotas`, the server has small limits for each key. Each refusal must then be justified, no amount may
exceed its limit by more than the turns that ran, and each owner fills its quota exactly
(`pensieve_lab.races.quota_rules`). With `--address`, a running server is checked; it must have the keys that
`--write_keys=FILE` writes, and its owners must store nothing. Its limits are read from it. `--history` says
where its history is, for the recount; of a server that is started, the place of its history.

The exit status is 1 if there is a violation.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx2
from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.history.opening import is_postgres
from pensieve_lab.races.quota_rules import Quota
from pensieve_lab.races.rounds import OWNERS, Races
from pensieve_lab.serving.owner_keys import key_lines, key_of
from pensieve_lab.serving.served import ServedProcess

FLAGS = flags.FLAGS
QUOTAS: Final = (
    *("--max_conversations_per_key=5", "--max_responses_per_key=10"),
    "--max_stored_bytes_per_key=60000",
)
_SERVE: Final = "--model=chat --gpu_pages=256 --cpu_bytes=64MB --max_num_running=16"
_SHOWN: Final = 20
_KEPT: Final = 100
REMOTE_AGE_S: Final = 1.0
"""How old the amount may be that admits a turn, if the history is in Postgres."""


def main() -> int:
    if FLAGS.write_keys:
        Path(FLAGS.write_keys).write_text(key_lines(OWNERS), encoding="utf-8")
        return 0
    if FLAGS.address and FLAGS.quotas:
        hint = "Give the server its limits, and leave --quotas out"
        raise ConfigError("--quotas", True, "without --address", hint)
    seed = secrets.randbelow(2**31) if FLAGS.seed is None else FLAGS.seed
    print(f"seed {seed}", flush=True)
    if FLAGS.address:
        return report(asyncio.run(check(FLAGS.address, FLAGS.history, seed)), seed)
    with tempfile.TemporaryDirectory(prefix="pensieve-races-") as directory:
        keys = Path(directory, "keys")
        keys.write_text(key_lines(OWNERS), encoding="utf-8")
        history = FLAGS.history or f"{directory}/history.sqlite"
        given = (f"--api_keys_file={keys}", f"--history={history}", *(QUOTAS if FLAGS.quotas else ()))
        with ServedProcess((*shlex.split(FLAGS.server_flags), *given)) as server:
            found = asyncio.run(check(server.address, history, seed))
    return report(found, seed)


async def check(address: str, history: str | None, seed: int) -> dict[str, Any]:
    """Run all rounds against a server and return the results."""
    quota = await read_quota(address, history)
    began_s, num_left = time.monotonic(), FLAGS.num_operations
    options = {"history": history, "num_clients": FLAGS.clients_per_owner, "seed": seed, "quota": quota}
    async with Races(address, **options) as races:
        while num_left > 0:
            await races.run(min(num_left, FLAGS.round_operations))
            num_left -= FLAGS.round_operations
            done = FLAGS.num_operations - max(num_left, 0)
            print(f"{done} operations, {len(races.violations)} violations", flush=True)
    return {
        "seed": seed,
        "num_operations": FLAGS.num_operations,
        "num_clients": FLAGS.clients_per_owner * len(OWNERS),
        "round_operations": FLAGS.round_operations,
        "database": "postgres" if is_postgres(history) else "file",
        "quota": quota._asdict(),
        "seconds": round(time.monotonic() - began_s, 1),
        "outcomes": dict(sorted(races.counts.items())),
        "num_violations": len(races.violations),
        "violations": races.violations[:_KEPT],
    }


async def read_quota(address: str, history: str | None) -> Quota:
    """Return the limits of a server; limits that these clients cannot reach count as none."""
    headers = {"authorization": f"Bearer {key_of(OWNERS[0])}"}
    async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=60.0, trust_env=False) as http:
        limits = (await http.get("/v1/pensieve/stored")).raise_for_status().json()["limits"]
    small = {name: limit for name, limit in limits.items() if limit is not None and limit < 100_000}
    return Quota(**small, max_age_s=REMOTE_AGE_S if is_postgres(history) else 0.0)


def report(results: dict[str, Any], seed: int) -> int:
    """Print the outcomes and the violations; return the exit status."""
    print(table(["operation and outcome", "number"], results["outcomes"].items()))
    for sentence in results["violations"][:_SHOWN]:
        print(f"violation: {sentence}")
    number = results["num_violations"]
    print(f"{results['num_operations']} operations with seed {seed}: {number} violations")
    print_document(json_line("races", results, units={"seconds": "s"}, device=device_name()))
    return EXIT_FAILED if number else 0


def define_flags() -> None:
    flags.DEFINE_string("address", None, "Running server to check; default: start one.")
    flags.DEFINE_string("history", None, "History of the server, a file or a URL of Postgres.")
    flags.DEFINE_string("write_keys", None, "Write the key file that --address needs, and end.")
    flags.DEFINE_bool("quotas", False, "Start the server with small limits of what a key stores.")
    flags.DEFINE_integer("num_operations", 600, "Operations of all clients together.", lower_bound=1)
    flags.DEFINE_integer("round_operations", 300, "Operations of a round.", lower_bound=1)
    flags.DEFINE_integer("clients_per_owner", 4, "Clients of each of the three owners.", lower_bound=1)
    flags.DEFINE_integer("seed", None, "Seed of the clients' choices; default: a new one.")
    flags.DEFINE_string("server_flags", _SERVE, "Flags of `pensieve serve`.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
