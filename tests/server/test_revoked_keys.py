"""What a key may see of others, and what ends when it is revoked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx2
import openai
import pytest

from pensieve_jax.server.http.keys import ApiKeys
from tests.deadlines import TIMEOUT_S
from tests.server.live import LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]


def write_keys(path: Path, **owners: str) -> None:
    lines = [f"{owner}:{sha256(key.encode()).hexdigest()}" for key, owner in owners.items()]
    path.write_text("\n".join(lines))


def with_operator(path: Path) -> None:
    write_keys(path, ann="ann", ann_too="ann", bob="bob")
    path.write_text(f"{path.read_text()}\nops:{sha256(b'ops').hexdigest()}:operator\n")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    with_operator(path)
    return path


@pytest.fixture
def server(tmp_path: Path, keys: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path / "history.sqlite", keys=ApiKeys(keys)) as running:
        running.engine.answers["chunk_map"] = {"free_gpu_pages": 3, "free_cpu_pages": 4, "branches": []}
        running.engine.answers["stats"] = {"num_turns_finished": 99}
        running.engine.answers |= {"census": {}, "distributions": {}}
        yield running


def revoke(server: LiveServer, keys: Path, **owners: str) -> None:
    write_keys(keys, **owners)
    server.on_loop(server.harness.services.keys.reload)


def ask(server: LiveServer, key: str, path: str) -> httpx2.Response:
    root = server.url.removesuffix("/v1")
    return httpx2.get(f"{root}{path}", headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)


def until(server: LiveServer, condition) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0)

    server.wait_for(wait())


def test_numbers_about_all_owners_need_an_operators_key(server: LiveServer) -> None:
    def finish() -> None:
        for turn in server.engine.turns:
            if turn.output is None:
                turn.feed("hello")
                turn.finish()

    with server.client(api_key="bob") as bob:
        reply = threading.Thread(target=lambda: bob.responses.create(model="fake", input="hi"))
        reply.start()
        until(server, lambda: bool(server.engine.turns))
        server.on_loop(finish)
        reply.join(TIMEOUT_S)
    of_ann, of_bob = (ask(server, key, "/v1/pensieve/stats").json() for key in ("ann", "bob"))
    assert (of_ann["num_turns_finished"], of_bob["num_turns_finished"]) == (0, 1)
    assert of_ann["output_tokens"] == of_ann["prompt_tokens"] == 0 < of_bob["output_tokens"]
    assert set(of_ann["tables"]) == {"turns_in_flight"}
    assert {"chunk_tokens", "chunk_bytes", "slot_bytes"} <= set(of_ann)
    of_all = ask(server, "ops", "/v1/pensieve/stats").json()
    assert of_all["num_turns_finished"] == 99 and "owners_in_flight" in of_all["tables"]
    assert ask(server, "ops", "/v1/pensieve/chunks").json()["free_gpu_pages"] == 3
    assert set(ask(server, "ann", "/v1/pensieve/chunks").json()) == {"branches"}
    refused = ask(server, "ann", "/metrics")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
    assert ask(server, "ops", "/metrics").status_code == 200


@pytest.mark.parametrize("path", ["/v1/pensieve/chunks?stream=true", "/v1/chat/completions"])
def test_streams_of_a_revoked_key_end_and_others_go_on(server: LiveServer, keys: Path, path: str) -> None:
    async def work() -> None:
        root = server.url.removesuffix("/v1")
        async with httpx2.AsyncClient(base_url=root, timeout=TIMEOUT_S) as client:
            lines = {}
            async with asyncio.TaskGroup() as group:

                async def follow(key: str) -> None:
                    body = {"model": "fake", "messages": MESSAGES, "stream": True}
                    method = "GET" if "chunks" in path else "POST"
                    asked = {"json": body} if method == "POST" else {}
                    headers = {"authorization": f"Bearer {key}"}
                    async with client.stream(method, path, headers=headers, **asked) as response:
                        assert response.status_code == 200
                        lines[key] = response
                        with pytest.raises(httpx2.RemoteProtocolError):
                            async for _ in response.aiter_lines():
                                pass
                    ended[key].set()

                ended = {key: asyncio.Event() for key in ("ann", "ann_too")}
                for key in ended:
                    group.create_task(follow(key))
                while len(lines) < 2:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(revoke, server, keys, ann_too="ann", bob="bob")
                await ended["ann"].wait()
                assert not ended["ann_too"].is_set()
                await asyncio.to_thread(revoke, server, keys, bob="bob")
                await ended["ann_too"].wait()

    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
    until(server, lambda: all(turn.cancelled for turn in server.engine.turns))
    until(server, lambda: server.harness.services.ledger.held("maps") == 0)


@pytest.mark.parametrize("more", [{}, {"extra_headers": {"Idempotency-Key": "k"}}], ids=["plain", "key"])
def test_a_request_that_waits_is_answered_and_its_turn_cancelled(
    server: LiveServer, keys: Path, more: dict
) -> None:
    with server.client(api_key="ann") as ann:
        failures: list[BaseException] = []

        def create() -> None:
            try:
                ann.responses.create(model="fake", input="hi", **more)
            except openai.AuthenticationError as error:
                failures.append(error)

        asking = threading.Thread(target=create)
        asking.start()
        until(server, lambda: bool(server.engine.turns))
        revoke(server, keys, bob="bob")
        asking.join(TIMEOUT_S)
    assert len(failures) == 1
    until(server, lambda: server.engine.turns[0].cancelled)


def test_background_responses_of_an_owner_without_keys_are_cancelled(server: LiveServer, keys: Path) -> None:
    found = {}
    for owner in ("ann", "bob"):
        with server.client(api_key=owner) as client:
            found[owner] = client.responses.create(model="fake", input="hi", background=True).id
    until(server, lambda: len(server.engine.turns) == 2)
    revoke(server, keys, ann_too="ann", bob="bob")  # ann still has a key
    assert server.on_loop(lambda: server.responses.background.num_running) == 2
    revoke(server, keys, bob="bob")
    until(server, lambda: server.responses.background.num_running == 1)
    record = server.on_loop(lambda: server.harness.services.history.response("ann", found["ann"]))
    assert record.status == "cancelled"
    with server.client(api_key="bob") as bob:
        assert bob.responses.retrieve(found["bob"]).status in ("queued", "in_progress")


def test_what_an_owner_without_keys_left_behind_is_cancelled_at_the_next_start(
    tmp_path: Path, keys: Path
) -> None:
    path = tmp_path / "history.sqlite"
    with LiveServer(path, keys=ApiKeys(keys)) as server, server.client(api_key="ann") as ann:
        left = ann.responses.create(model="fake", input="hi", background=True).id
    write_keys(keys, bob="bob")
    with LiveServer(path, keys=ApiKeys(keys)) as server:
        history = server.harness.services.history
        until(server, lambda: history.response("ann", left).status == "cancelled")
        assert server.engine.turns == []
