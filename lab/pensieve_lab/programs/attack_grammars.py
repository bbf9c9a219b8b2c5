"""Attack on a server: hostile grammars, tools, options and messages beside one client that streams.

    python -m pensieve_lab.programs.attack_grammars

Starts `pensieve serve` and streams chats in a process of its own. After `--quiet_s` without others it
sends the requests of `pensieve_lab.hostile.requests`, one attack after the other, `--num_clients` at a
time. It prints each attack's answers and the gaps between the pieces of the stream. The last line is one
JSON document (see `--json`).

The exit status is 1 if an answer is neither valid nor a typed 400, 413, 429 or 503, or if the stream failed.
It is 1 as well if a gap exceeds the longest one without an attack by more than `--max_stall_ms`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_lab.hostile.requests import HostileRequest, hostile_requests
from pensieve_lab.hostile.watching import Gaps, StreamWatcher
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.soaking.samples import child_of, process_figures

FLAGS = flags.FLAGS
_REFUSALS: Final = (400, 413, 429, 503)
_TIMEOUT_S: Final = 120.0


class Attack:
    """One attack and what came of it."""

    def __init__(self, name: str, requests: Sequence[HostileRequest]) -> None:
        self.name = name
        self.requests = requests
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds = 0.0
        self.gaps: Gaps | None = None
        self.rss_mb = 0.0

    async def run(self, http: httpx2.AsyncClient) -> None:
        """Send the requests, `--num_clients` at a time."""
        began_s = time.monotonic()
        waiting = iter(self.requests)

        async def client() -> None:
            for request in waiting:
                await self._send(http, request)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(FLAGS.num_clients, len(self.requests))):
                group.create_task(client())
        self.seconds = time.monotonic() - began_s

    async def _send(self, http: httpx2.AsyncClient, request: HostileRequest) -> None:
        try:
            answer = await http.post(
                request.route, content=request.body, headers={"Content-Type": "application/json"}
            )
        except httpx2.HTTPError as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            return
        code = answer_code(answer.status_code, answer.text)
        self.answers[code] += 1
        status = int(code.split(" ")[0])
        is_failed_turn = code.endswith("grammar_failed")
        if status != 200 and not is_failed_turn and (status not in _REFUSALS or " " not in code):
            self.wrong.append(f"{code}: {answer.text[:200]}")


def answer_code(status: int, text: str) -> str:
    """Return the status of an answer and the code of its error, which may stand in a stream."""
    last = [line for line in text.splitlines() if line.startswith("data: {")]
    try:
        value = json.loads(last[-1].removeprefix("data: ") if last else text)
    except (ValueError, RecursionError):
        return str(status)
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return str(status)
    return f"{status} {error.get('code') or error.get('type')}"


def main() -> int:
    found = [
        Attack(name, list(requests))
        for name, requests in itertools.groupby(hostile_requests(), lambda one: one.name)
        if FLAGS.only in name
    ]
    if FLAGS.address:
        address = urlsplit(FLAGS.address)
        return attack(address.hostname or "", address.port or 80, None, found)
    with ServedProcess(shlex.split(FLAGS.server_flags)) as server:
        return attack(server.host, server.port, server.process.pid, found)


def attack(host: str, port: int, pid: int | None, attacks: Sequence[Attack]) -> int:
    """Run all attacks on a server and print the report; return the exit status."""
    with StreamWatcher(host, port) as watcher:
        time.sleep(1.0)  # the first turn of a server may be slower
        watcher.take()
        time.sleep(FLAGS.quiet_s)
        quiet = watcher.take()
        print(f"without attack: {_written(quiet)}", flush=True)
        asyncio.run(_run(f"http://{host}:{port}", watcher, attacks, pid))
        time.sleep(FLAGS.quiet_s)
        after = watcher.take()
    return _report(quiet, after, attacks)


async def _run(address: str, watcher: StreamWatcher, attacks: Sequence[Attack], pid: int | None) -> None:
    async with httpx2.AsyncClient(base_url=address, timeout=_TIMEOUT_S, trust_env=False) as http:
        for one in attacks:
            watcher.take()
            await one.run(http)
            one.gaps = watcher.take()
            if pid is not None:
                figures = {**process_figures("front", pid), **process_figures("engine", child_of(pid))}
                one.rss_mb = figures["front_rss_mb"] + figures["engine_rss_mb"]
            answers = ", ".join(f"{number} x {code}" for code, number in one.answers.most_common())
            print(
                f"{one.name:32.32} {one.seconds:6.1f} s  {_written(one.gaps)}",
                f"{one.rss_mb:.0f} MB  {answers}",
                *one.wrong[:3],
                *one.gaps.failures[:3],
                sep="\n    ",
                flush=True,
            )


def _written(gaps: Gaps) -> str:
    return f"{gaps.num:5d} gaps, p50 {gaps.p50_ms:5.1f}, p99 {gaps.p99_ms:5.1f}, max {gaps.max_ms:5.1f} ms"


def _report(quiet: Gaps, after: Gaps, attacks: Sequence[Attack]) -> int:
    rows: list[list[Any]] = [["without attack", *quiet[:4]]]
    rows += [[one.name, *one.gaps[:4]] for one in attacks if one.gaps is not None]
    rows.append(["afterwards", *after[:4]])
    print(table(["attack", "gaps", "p50 (ms)", "p99 (ms)", "max (ms)"], rows))
    wrong = {one.name: one.wrong for one in attacks if one.wrong}
    failed = {one.name: one.gaps.failures for one in attacks if one.gaps is not None and one.gaps.failures}
    allowed_ms = max(quiet.max_ms, after.max_ms) + FLAGS.max_stall_ms
    stalled = {
        one.name: one.gaps.max_ms for one in attacks if one.gaps is not None and one.gaps.max_ms > allowed_ms
    }
    for name, most in stalled.items():
        print(f"{name} made a gap of {most:.0f} ms; at most {allowed_ms:.0f} ms are allowed")
    if after.texts != 1:
        print(f"the stream had {after.texts} different replies to one prompt")
    results = {
        "without_attack": quiet._asdict(),
        "afterwards": after._asdict(),
        "attacks": {
            one.name: {
                "requests": len(one.requests),
                "answers": dict(one.answers),
                "seconds": one.seconds,
                "rss_mb": one.rss_mb,
                "gaps": None if one.gaps is None else one.gaps._asdict(),
            }
            for one in attacks
        },
        "wrong": wrong,
        "failed_streams": failed,
        "stalled": stalled,
    }
    units = {"gaps": "ms between two pieces of a stream", "rss": "MB (10^6 bytes) of both processes"}
    print_document(json_line("attack_grammars", results, units=units, device="cpu"))
    return EXIT_FAILED if wrong or failed or stalled or after.texts != 1 else 0


def define_flags() -> None:
    flags.DEFINE_string("address", None, "URL of a running server; default: one is started.")
    flags.DEFINE_string("only", "", "Runs the attacks whose names contain this.")
    flags.DEFINE_string("server_flags", "--model=chat", "Flags of `pensieve serve`.")
    flags.DEFINE_integer("num_clients", 8, "Number of requests of an attack at a time.")
    flags.DEFINE_float("quiet_s", 5.0, "Seconds of the stream before and after all attacks.")
    flags.DEFINE_float("max_stall_ms", 100.0, "Longest stall that an attack may cause, in ms.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
