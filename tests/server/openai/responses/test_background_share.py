"""Limits on the number of background responses, per key and in total."""

from __future__ import annotations

import asyncio
import hashlib

import openai
import pytest

from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.openai.responses import background
from tests.deadlines import wait_until
from tests.server.live import LiveServer


def test_no_key_can_fill_the_background_queue(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{owner}:{hashlib.sha256(owner.encode()).hexdigest()}\n" for owner in "ab"))
    settings = ServerSettings(api_keys_file=str(keys), max_in_flight_per_key=2)
    with (
        LiveServer(tmp_path / "history.sqlite", settings=settings) as server,
        server.client(api_key="a") as a,
        server.client(api_key="b") as b,
    ):
        first, _ = (a.responses.create(input="hi", background=True) for _ in range(2))
        with pytest.raises(openai.RateLimitError, match="2 background responses"):
            a.responses.create(input="hi", background=True)
        assert b.responses.create(input="hi", background=True).status == "queued"
        a.responses.cancel(first.id)
        assert a.responses.create(input="hi", background=True).status == "queued"


def test_without_keys_background_responses_have_the_whole_batch(tmp_path):
    """Once, at most as many ran as one key may have, although all clients are one owner."""
    settings = ServerSettings(max_in_flight_per_key=2)
    with LiveServer(tmp_path / "history.sqlite", settings=settings) as server, server.client() as client:
        for _ in range(4):
            client.responses.create(input="hi", background=True)
        wait_until(lambda: len(server.engine.turns) == 4)


@pytest.mark.parametrize(("most_runs", "status"), [(1000, 429), (2, 503)])
def test_simultaneous_requests_have_no_larger_share(tmp_path, monkeypatch, most_runs, status):
    """Each waits for the engine before it runs, and counts during that wait."""
    monkeypatch.setattr(background, "MAX_RUNS", most_runs)
    keys = tmp_path / "keys"
    keys.write_text(f"a:{hashlib.sha256(b'a').hexdigest()}\n")
    settings = ServerSettings(api_keys_file=str(keys), max_in_flight_per_key=2)
    headers = {"authorization": "Bearer a"}

    async def ask(server) -> list[tuple[int, str | None]]:
        body = {"input": "hi", "background": True}
        asked = [server.harness.open("POST", "/v1/responses", body, headers) for _ in range(8)]
        answers = [await one.whole() for one in asked]
        return sorted((status, headers.get("retry-after", "")) for status, headers, _ in answers)

    with LiveServer(tmp_path / "history.sqlite", settings=settings) as server:
        apply = server.engine.apply

        async def slow(change) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            await apply(change)

        server.on_loop(lambda: setattr(server.engine, "apply", slow))
        wait_s = "30" if status == 503 else "1"  # the longest Retry-After; nothing runs of this key yet
        assert server.wait_for(ask(server)) == [(200, "")] * 2 + [(status, wait_s)] * 6
        assert server.on_loop(lambda: server.responses.background.num_running) == 2
