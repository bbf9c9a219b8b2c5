"""Clients that disconnect at any moment of a request leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.history.read_connections import MAX_IDLE
from pensieve_jax.server.workers import NUM_THREADS
from tests.deadlines import TIMEOUT_S, wait_until
from tests.seeds import enough, new_seed
from tests.server.faults.served import FaultyServer

MOMENTS = ("in the headers", "in the body", "before the answer", "in the answer", "behind a chunk")
FRONT_THREADS = "front's threads"
FRONT_READS = "files of the front's readers"
IN_FLIGHT = (
    *("turns_in_engine", "turns_in_queue", "owners_in_flight"),
    *("locked_conversations", "background_responses", "requests_with_keys"),
)


def bodies(draw: random.Random, conversations: list[str]) -> tuple[str, dict[str, Any]]:
    """Return a path and a body that runs turns for a while."""
    text = "word " * draw.randint(1, 30)
    path = draw.choice(("/v1/responses", "/v1/responses", "/v1/chat/completions", "/v1/completions"))
    body: dict[str, Any] = {"stream": draw.random() < 0.6, "temperature": draw.choice((0, 1))}
    if path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": 400}
        if draw.random() < 0.4:
            body["conversation"] = draw.choice(conversations)
    elif path == "/v1/chat/completions":
        n = draw.choice((1, 2, 4))
        body |= {
            "messages": [{"role": "user", "content": text}],
            "n": n,
            "max_tokens": 400,
            "min_tokens": 200,
        }
    else:
        body |= {"prompt": [text, text + "x"], "max_tokens": 400, "min_tokens": 200}
    return path, body


async def vanish(server: FaultyServer, draw: random.Random, conversations: list[str], moment: str) -> None:
    """Run one client, which disconnects at this moment."""
    path, body = bodies(draw, conversations)
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    try:
        if moment == "in the headers":
            writer.write(head[: draw.randrange(1, len(head) - 2)])
        elif moment == "in the body":
            writer.write(head + raw[: draw.randrange(len(raw))])
        else:
            writer.write(head + raw)
        await writer.drain()
        async with asyncio.timeout(TIMEOUT_S):
            if moment == "in the answer":
                await reader.read(draw.randint(1, 3000))
            elif moment == "behind a chunk" and body["stream"]:
                for _ in range(draw.randint(1, 6)):
                    if not await reader.readline():
                        break
            elif moment != "behind a chunk":
                await asyncio.sleep(draw.random() * 0.05)
    finally:
        if draw.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


def held(server: FaultyServer) -> dict[str, Any]:
    """Return what must not leak: rows, turns, pages that are set aside, threads and descriptors."""
    assert server.process is not None
    said = server.ask("GET", "/v1/pensieve/stats").json()
    front, engine = Path(f"/proc/{server.process.pid}"), Path(f"/proc/{server.engine_pid}")
    num_tasks = {p: len(os.listdir(p / "task")) for p in (front, engine)}
    return {
        **{name: said["tables"][name] for name in (*IN_FLIGHT, "tasks")},
        **{name: said[name] for name in ("num_running", "num_waiting", "reserved", "copying in", "leaving")},
        "front's fd": sum("history.sqlite" not in name for name in descriptors(front)),
        FRONT_READS: sum("history.sqlite" in name for name in descriptors(front)),
        "engine's fd": len(os.listdir(engine / "fd")),
        "engine's threads": num_tasks[engine],
        FRONT_THREADS: num_tasks[front],
    }


def descriptors(process: Path) -> list[str]:
    """Return the targets of the open descriptors; those that are closed meanwhile are skipped."""
    found = []
    for one in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return found


def same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Compare, but allow what the front end starts on demand and keeps: worker threads, and readers."""
    most = {FRONT_THREADS: NUM_THREADS, FRONT_READS: 3 * MAX_IDLE}  # a reader has up to three files open
    kept = all(0 <= now[name] - before[name] <= number for name, number in most.items())
    return kept and {**now, **dict.fromkeys(most, 0)} == {**before, **dict.fromkeys(most, 0)}


def at_rest(server: FaultyServer) -> dict[str, Any]:
    """Return `held` once nothing is in flight and two looks agree: the last request may not have ended."""
    looks = [held(server)]

    def is_at_rest() -> bool:
        looks.append(held(server))
        return looks[-1] == looks[-2] and not any(looks[-1][name] for name in IN_FLIGHT)

    wait_until(is_at_rest, every_s=0.1)
    return looks[-1]


def settled(server: FaultyServer, before: dict[str, Any]) -> None:
    """Wait until all values are as before."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not same(now := held(server), before):
        assert time.monotonic() < deadline_s, {name: now[name] for name in now if now[name] != before[name]}
        time.sleep(0.05)


@pytest.mark.long
def test_disconnected_clients_leave_nothing_behind(tmp_path):
    draw, num_clients = random.Random(new_seed()), enough(80, 300)

    async def all_of_them() -> None:
        limit = asyncio.Semaphore(20)

        async def one(place: int) -> None:
            async with limit:
                await vanish(server, draw, conversations, MOMENTS[place % len(MOMENTS)])

        await asyncio.gather(*map(one, range(num_clients)))

    with FaultyServer(tmp_path) as server:
        conversations = [server.ask("POST", "/v1/conversations", {}).json()["id"] for _ in range(3)]
        assert server.ask("POST", "/v1/responses", {"input": "hello"}).status_code == 200
        before = at_rest(server)
        asyncio.run(all_of_them())
        settled(server, before)
        print(before)
        # No page leaked: a conversation that needs nearly all of them is served.
        body = {"prompt": [5] * 800, "max_tokens": 20, "min_tokens": 20}
        assert server.ask("POST", "/v1/completions", body).json()["usage"]["completion_tokens"] == 20
        for conversation in conversations:
            answer = server.ask("POST", "/v1/responses", {"input": "hi", "conversation": conversation})
            assert answer.status_code == 200
            items = server.ask("GET", f"/v1/conversations/{conversation}/items?limit=100&order=asc").json()
            roles = [item["role"] for item in items["data"]]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert server.close() == 0
        assert "Traceback" not in server.log and '"level":"error"' not in server.log, server.log[-3000:]
