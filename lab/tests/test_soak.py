"""The soak test for a few seconds, on the fake runner: all kinds of clients, samples, and leftovers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pensieve_lab.soaking.clients import SoakClient
from pensieve_lab.soaking.samples import Samples, child_of, process_figures, table_figures
from tests.deadlines import TIMEOUT_S
from tests.seeds import new_seed
from tests.server.faults.served import FaultyServer
from tests.server.test_vanishing import IN_FLIGHT, at_rest, settled

SECONDS = 5.0
NUM_CLIENTS = 12
KINDS = ("responses", "chat", "streams", "vanished", "left streams")


@pytest.mark.long
def test_busy_clients_leave_nothing_behind(tmp_path):
    seed = new_seed()
    counts: Counter[str] = Counter()

    async def ask_all(url: str) -> None:
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                client = SoakClient(url, seed + number, pause_s=0.02, counts=counts)
                group.create_task(client.run(ending))
            await asyncio.sleep(SECONDS)
            async with asyncio.timeout(TIMEOUT_S):  # on a busy machine, few requests fit into the seconds
                while not all(counts[kind] for kind in KINDS):
                    await asyncio.sleep(0.1)
            ending.set()

    with FaultyServer(tmp_path) as server:
        assert server.process is not None
        for _ in range(3):
            assert server.ask("POST", "/v1/responses", {"input": "hi"}).status_code == 200
        before = at_rest(server)
        asyncio.run(ask_all(server.url))
        settled(server, before)
        stats = server.ask("GET", "/v1/pensieve/stats").json()
        figures = {
            **process_figures("front", server.process.pid),
            **process_figures("engine", child_of(server.process.pid)),
            **table_figures(stats),
        }
        assert server.close() == 0 and "Traceback" not in server.log, server.log[-3000:]
    print(counts)
    assert figures["front_rss_mb"] > 10 and figures["engine_threads"] >= 1
    assert all(figures[f"front_{name}"] == 0 for name in IN_FLIGHT)


def test_growth_is_reported_and_fluctuation_is_not():
    samples = Samples()
    for minute in range(30):
        samples.add(
            minute,
            {
                "front_rss_mb": 70.0 + min(minute, 8),
                "engine_rss_mb": 700.0 + 3 * minute,
                "front_descriptors": 30.0 + minute % 5,
                "front_threads": 4.0 + 20 * (minute // 10),
                "engine_known_turns": 400.0 + 30 * (-1) ** minute,
                # fewer in a slower period
                "engine_live_conversations": 100.0 if 10 <= minute < 20 else 300.0,
                "front_turns_remembered": 10.0 * minute,
            },
        )
    assert set(samples.growing()) == {"front_threads", "front_turns_remembered"}
    for minute in range(30, 60):
        samples.add(minute, {**dict.fromkeys(samples.series, 4.0), "engine_rss_mb": 700.0 + 5 * minute})
    assert set(samples.growing()) == {"engine_rss_mb"}
