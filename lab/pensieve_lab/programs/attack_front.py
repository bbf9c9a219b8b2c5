"""Attacks on a server's front end, and how long another client waits meanwhile.

    python -m pensieve_lab.programs.attack_front --json=FILE
    python -m pensieve_lab.programs.attack_front --address=http://127.0.0.1:8000 --pid=PID --json=FILE

Starts `pensieve serve` with the chat model and keys of three owners. One of them asks small things, one after
the other, in a process of its own: the models, tokens of a word, and a turn of four tokens. The others attack
for `--attack_s` each (see `pensieve_lab.hostile.front_requests`). With `--address` a running server is
attacked; it must have the keys that `--write_keys=FILE` writes. So an older version can be compared.

For each attack the report has the slowest of the small requests before and during it, and the statuses that
the attackers got. It has the largest resident memory of the front end and of the engine, too. `back` is the
time after which the front end has at most 32 MB more than before; `--rest_s` limits the wait for it.
The last line is one JSON document (see `--json`). The exit status is 1 if the server died.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx2
from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.hostile.front_requests import MODEL, FrontAttack, front_attacks
from pensieve_lab.serving.owner_keys import key_lines, key_of
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.soaking.samples import child_of, process_figures

FLAGS = flags.FLAGS
_TIMEOUT_S: Final = 120.0
_BACK_MB: Final = 32.0  # memory counts as given back within this distance
_OWNERS: Final = ("alice", "bob", "carol")
_SERVE: Final = (
    *(f"--model={MODEL}", "--gpu_pages=256", "--cpu_bytes=64MB", "--max_num_running=16"),
    "--log_format=json",
)
_SMALL: Final = (
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"prompt": "word"}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
)


class Waits(NamedTuple):
    """How long the small requests of one client took.

    Attributes:
      num: their number.
      p50_ms, max_ms: median and maximum.
      failed: requests that got another status than 200, by status.
    """

    num: int
    p50_ms: float
    max_ms: float
    failed: dict[str, int]


class Memory(NamedTuple):
    """Resident memory of a server's processes, in MB; 0 where a process is not known or gone.

    Attributes:
      front_mb: the front end's.
      engine_mb: the engine's.
    """

    front_mb: float = 0.0
    engine_mb: float = 0.0

    @classmethod
    def of(cls, pid: int | None) -> Memory:
        """Return that of the server whose front end is this process."""
        if pid is None:
            return cls()
        with contextlib.suppress(OSError, ValueError):  # the engine is gone, or being started again
            return cls(_resident_mb(pid), _resident_mb(child_of(pid)))
        with contextlib.suppress(OSError):
            return cls(_resident_mb(pid))
        return cls()

    def most(self, other: Memory) -> Memory:
        """Return the larger value of each."""
        return Memory(max(self.front_mb, other.front_mb), max(self.engine_mb, other.engine_mb))


def _resident_mb(pid: int) -> float:
    return process_figures("any", pid)["any_rss_mb"]


def main() -> int:
    if FLAGS.write_keys:
        Path(FLAGS.write_keys).write_text(key_lines(_OWNERS), encoding="utf-8")
        return 0
    if FLAGS.address:
        return asyncio.run(attack(FLAGS.address, FLAGS.pid))
    with tempfile.TemporaryDirectory(prefix="pensieve-attack-") as directory:
        keys = Path(directory, "keys")
        keys.write_text(key_lines(_OWNERS), encoding="utf-8")
        given = (f"--api_keys_file={keys}", f"--history={directory}/history.sqlite")
        with ServedProcess((*_SERVE, *given)) as server:
            return asyncio.run(attack(server.address, server.process.pid))


async def attack(address: str, pid: int | None) -> int:
    """Run all attacks on a server and print the report; return the exit status.

    Args:
      address: the server's base URL.
      pid: its front end's process; None if its memory is not known.
    """
    rows: list[dict[str, Any]] = []
    with Neighbour(address) as neighbour:
        await asyncio.sleep(FLAGS.quiet_s)
        for name, one in front_attacks().items():
            if FLAGS.only not in name:
                continue
            neighbour.take()
            await asyncio.sleep(FLAGS.quiet_s)
            before, memory = neighbour.take(), Memory.of(pid)
            attackers = Attackers(address, one, pid)
            await attackers.run(FLAGS.attack_s)
            during = neighbour.take()
            back_s, after = await _rest(pid, memory.front_mb)
            rows.append(
                {
                    "attack": name,
                    "before": before._asdict(),
                    "during": during._asdict(),
                    "statuses": dict(sorted(attackers.statuses.items())),
                    "memory_before": memory._asdict(),
                    "memory_most": attackers.most._asdict(),
                    "memory_after": after._asdict(),
                    "back_s": back_s,
                }
            )
            print(_in_words(rows[-1]), flush=True)
        has_died = await _has_died(address)
    titles = [
        *("attack", "slowest before, ms", "during, ms"),
        *("front, MB", "at most", "after", "back, s", "engine, MB", "at most"),
    ]
    print(table(titles, [_cells(row) for row in rows]))
    units = {"p50_ms": "ms", "max_ms": "ms", "front_mb": "MB", "engine_mb": "MB", "back_s": "s"}
    results = {"attacks": rows, "has_died": has_died, "server_revision": FLAGS.server_revision}
    print_document(json_line("front_attacks", results, units=units, device=device_name()))
    return EXIT_FAILED if has_died else 0


def _cells(row: dict[str, Any]) -> list[Any]:
    slowest = [f"{row[when]['max_ms']:.0f}" for when in ("before", "during")]
    front = [f"{row[f'memory_{when}']['front_mb']:.0f}" for when in ("before", "most", "after")]
    engine = [f"{row[f'memory_{when}']['engine_mb']:.0f}" for when in ("before", "most")]
    back = "-" if row["back_s"] is None else f"{row['back_s']:.1f}"
    return [row["attack"], *slowest, *front, back, *engine]


def _in_words(row: dict[str, Any]) -> str:
    cells = _cells(row)
    failed = f", failed {row['during']['failed']}" if row["during"]["failed"] else ""
    memory = f"{cells[3]} to {cells[4]} MB, back after {cells[6]} s"
    return f"{cells[0]}: {cells[1]} to {cells[2]} ms{failed}; {memory}; {row['statuses']}"


async def _rest(pid: int | None, before_mb: float) -> tuple[float | None, Memory]:
    """Wait until the front end's memory is back; return the seconds, None if it is not, and the memory."""
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < FLAGS.rest_s:
        if (memory := Memory.of(pid)).front_mb <= before_mb + _BACK_MB:
            return round(passed_s, 1), memory
        await asyncio.sleep(0.1)
    return None, Memory.of(pid)


async def _has_died(address: str) -> bool:
    async with httpx2.AsyncClient(base_url=address, timeout=_TIMEOUT_S, trust_env=False) as http:
        with contextlib.suppress(httpx2.TransportError):
            return (await http.get("/ready")).status_code != 200
    return True


class Attackers:
    """The attackers of one attack.

    Attributes:
      statuses: the statuses that they got, with the error's code.
      most: the largest memory that was seen.
    """

    def __init__(self, address: str, one: FrontAttack, pid: int | None) -> None:
        self.statuses: Counter[str] = Counter()
        self.most = Memory()
        self._address, self._attack, self._pid = address, one, pid

    async def run(self, seconds: float) -> None:
        """Attack for a number of seconds, and wait for the last answers."""
        until_s = time.monotonic() + seconds
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for owner in _OWNERS[1 : 1 + self._attack.num_owners]:
                    group.create_task(self._attack_as(owner, until_s))
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            self.most = self.most.most(Memory.of(self._pid))
            await asyncio.sleep(0.05)

    async def _attack_as(self, owner: str, until_s: float) -> None:
        limits = httpx2.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key_of(owner)}", "content-type": "application/json"}
        options: dict[str, Any] = {"timeout": _TIMEOUT_S, "trust_env": False, "limits": limits}
        async with httpx2.AsyncClient(base_url=self._address, headers=headers, **options) as http:
            path, body = await self._request(http)
            if not self._attack.is_read:
                await self._leave_unread(owner, path, until_s)
                return
            async with asyncio.TaskGroup() as group:
                for _ in range(self._attack.num_requests):
                    group.create_task(self._ask(http, path, body, until_s))

    async def _request(self, http: httpx2.AsyncClient) -> tuple[str, bytes | None]:
        """Return the attack's path and body, with the id of the conversation that it needs."""
        path, body = self._attack.path, self._attack.body
        if self._attack.conversation is None:
            return path, body
        made = (await http.post("/v1/conversations", content=self._attack.conversation)).json()
        return path.replace("ID", made["id"]), None if body is None else body.replace(
            b"ID", made["id"].encode()
        )

    async def _ask(self, http: httpx2.AsyncClient, path: str, body: bytes | None, until_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                answer = await http.request("GET" if body is None else "POST", path, content=body)
            except httpx2.TransportError as error:
                self.statuses[type(error).__name__] += 1
                continue
            code = answer.json()["error"]["code"] if answer.status_code >= 400 else ""
            self.statuses[f"{answer.status_code} {code}".strip()] += 1

    async def _leave_unread(self, owner: str, path: str, until_s: float) -> None:
        """Ask on many connections, and read nothing but the first bytes of the answers."""
        address = urlsplit(self._address)
        head = (
            f"GET {path} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key_of(owner)}\r\n\r\n"
        )
        writers: list[asyncio.StreamWriter] = []
        for _ in range(self._attack.num_requests):
            reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=64)
            writer.write(head.encode())
            writers.append(writer)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                self.statuses[(await reader.readexactly(12)).decode()[-3:]] += 1
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        for writer in writers:
            writer.transport.abort()


class Neighbour:
    """A client with small requests, in a process of its own; a context manager."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_ask_small, args=(address, there), daemon=True)
        self._process.start()

    def take(self) -> Waits:
        """Return the waits since the last call, with that for the request that is open now."""
        self._here.send(True)
        found: Waits = self._here.recv()
        return found

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _ask_small(address: str, pipe: Connection) -> None:
    """Ask small things, and answer each message with the waits since the last one."""
    waits_s: list[float] = []
    failed: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {key_of(_OWNERS[0])}"}
    with httpx2.Client(base_url=address, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
        while True:
            for method, path, body in _SMALL:
                began_s = time.monotonic()
                try:
                    status = http.request(method, path, json=body).status_code
                    outcome = str(status)
                except httpx2.TransportError as error:
                    outcome = type(error).__name__
                waits_s.append(time.monotonic() - began_s)
                if outcome != "200":
                    failed[outcome] += 1
                if pipe.poll():
                    pipe.recv()
                    ordered = sorted(waits_s)
                    middle = 1e3 * ordered[len(ordered) // 2]
                    pipe.send(Waits(len(ordered), middle, 1e3 * ordered[-1], dict(failed)))
                    waits_s, failed = [], Counter()
                time.sleep(0.02)


def define_flags() -> None:
    flags.DEFINE_string("address", None, "Running server to attack; default: start one.")
    flags.DEFINE_integer("pid", None, "Process of the server at --address, for its memory.")
    flags.DEFINE_string("server_revision", None, "Commit of the server at --address.")
    flags.DEFINE_string("write_keys", None, "Write the key file that --address needs, and end.")
    flags.DEFINE_string("only", "", "Attacks whose name has this text.")
    flags.DEFINE_float("attack_s", 6.0, "Seconds of an attack.", lower_bound=0.1)
    flags.DEFINE_float("quiet_s", 3.0, "Seconds without attack before each one.", lower_bound=0.1)
    flags.DEFINE_float(
        "rest_s",
        30.0,
        "Longest wait after an attack for the memory to be given back, in seconds.",
        lower_bound=0.0,
    )
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
