"""Quotas of what a key stores, over HTTP: the answers, what is refused, and what frees room."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from pensieve_jax.core.errors import ConfigError, StorageQuotaError
from pensieve_jax.history.server_tables.changes import StorageQuota
from pensieve_jax.history.stored_amounts import StoredAmounts
from pensieve_jax.server.http.settings import DEFAULT_QUOTA, ServerSettings
from pensieve_jax.server.http.storage import StorageCheck
from tests.server.fakes import say
from tests.server.stored_server import StoredServer

KEYS = {"ada": "a" * 20, "bob": "b" * 20}


@pytest.fixture
def served(tmp_path):
    """Return a function that makes a server with these limits and two keys, bob's an operator's."""
    servers = []

    def make(has_keys: bool = True, **limits: int) -> StoredServer:
        keys = tmp_path / "keys"
        keys.write_text(
            "".join(
                f"{name}:{hashlib.sha256(key.encode()).hexdigest()}{':operator' if name == 'bob' else ''}\n"
                for name, key in KEYS.items()
            )
        )
        settings = ServerSettings(api_keys_file=str(keys) if has_keys else None, **limits)
        servers.append(
            StoredServer(tmp_path / f"history{len(servers)}.sqlite", say("hello"), settings=settings)
        )
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def ask(server, method, path, body=None, key="ada"):
    """Return status, decoded body and headers of an answer."""

    async def work():
        headers = {"authorization": f"Bearer {KEYS[key]}"} if key else {}
        async with server.harness.client(headers=headers) as client:
            answer = await client.request(method, path, json=body)
            return answer.status_code, answer.json(), answer.headers

    return asyncio.run(work())


STORED = {
    "a response": ("/v1/responses", {"model": "fake", "input": "hi"}),
    "a background response": ("/v1/responses", {"model": "fake", "input": "hi", "background": True}),
    "a chat": (
        "/v1/chat/completions",
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "store": True},
    ),
    "a completion": ("/v1/completions", {"model": "fake", "prompt": "hi", "store": True}),
}


def check_refused(answer, amount: str) -> None:
    status, body, headers = answer
    error = body["error"]
    assert (status, error["code"]) == (429, "insufficient_quota")
    assert amount in error["message"] and "Delete " in error["message"]
    assert headers["x-should-retry"] == "false" and "retry-after" not in headers


@pytest.mark.parametrize("what", STORED)
def test_a_turn_beyond_the_quota_is_refused_before_it_runs(served, what):
    server = served(max_responses_per_key=1)
    path, body = STORED[what]
    first = ask(server, "POST", *STORED["a response"])[1]
    num_turns = len(server.engine.turns)
    check_refused(ask(server, "POST", path, body), "1 responses of at most 1")
    assert len(server.engine.turns) == num_turns, "nothing was computed"
    assert ask(server, "POST", path, body, key="bob")[0] == 200
    assert ask(server, "POST", path, {**body, "store": False, "background": False})[0] == 200
    assert ask(server, "DELETE", f"/v1/responses/{first['id']}")[0] == 200
    assert ask(server, "POST", path, body)[0] == 200


def test_conversations_and_bytes_have_quotas(served):
    server = served(max_conversations_per_key=1, max_stored_bytes_per_key=3000)
    made = ask(server, "POST", "/v1/conversations", {})[1]["id"]
    check_refused(ask(server, "POST", "/v1/conversations", {}), "1 conversations of at most 1")
    items = {"items": [{"role": "user", "content": "x" * 4000}]}
    check_refused(ask(server, "POST", f"/v1/conversations/{made}/items", items), "bytes of at most 3,000")
    check_refused(
        ask(server, "POST", f"/v1/conversations/{made}", {"metadata": {str(i): "x" * 500 for i in range(8)}}),
        "bytes of at most 3,000",
    )
    few = {"items": [{"role": "user", "content": "hi"}]}
    assert ask(server, "POST", f"/v1/conversations/{made}/items", few)[0] == 200
    assert ask(server, "DELETE", f"/v1/conversations/{made}")[0] == 200
    assert ask(server, "POST", "/v1/conversations", {})[0] == 200


def test_a_key_sees_what_it_stores_and_its_limits(served):
    server = served(max_responses_per_key=2)
    made = ask(server, "POST", "/v1/conversations", {})[1]["id"]
    response = ask(server, "POST", *STORED["a response"])[1]["id"]
    found = ask(server, "GET", "/v1/pensieve/stored?limit=1")[1]
    assert [row["id"] for row in found["conversations"]] == [made]
    assert [(row["id"], row["status"]) for row in found["responses"]] == [(response, "completed")]
    assert (found["num_conversations"], found["num_responses"]) == (1, 1) and found["num_bytes"] > 500
    assert found["limits"] == {"num_conversations": 100_000, "num_responses": 2, "num_bytes": 10 * 2**30}
    nothing = ask(server, "GET", "/v1/pensieve/stored", key="bob")[1]
    assert (nothing["num_bytes"], nothing["conversations"], nothing["responses"]) == (0, [], [])


def test_metrics_show_what_all_keys_store(served):
    server = served()
    for key in KEYS:
        ask(server, "POST", *STORED["a response"], key=key)

    async def work():
        async with server.harness.client(headers={"authorization": f"Bearer {KEYS['bob']}"}) as client:
            return (await client.get("/metrics")).text

    text = asyncio.run(work())
    assert 'pensieve:stored_responses{model_name="fake"} 2.0' in text
    total = server.reader.stored_by_all().num_bytes
    assert f'pensieve:stored_bytes{{model_name="fake"}} {float(total)}' in text


def test_defaults_apply_with_keys_only(tmp_path):
    keys = str(tmp_path / "keys")
    assert ServerSettings().storage_quota == StorageQuota()
    assert ServerSettings(max_responses_per_key=5).storage_quota == StorageQuota(responses=5)
    assert ServerSettings(api_keys_file=keys).storage_quota == DEFAULT_QUOTA
    limited = ServerSettings(api_keys_file=keys, max_stored_bytes_per_key=0, max_conversations_per_key=7)
    assert limited.storage_quota == StorageQuota(conversations=7, responses=DEFAULT_QUOTA.responses)
    for name in ("max_stored_bytes_per_key", "max_conversations_per_key", "max_responses_per_key"):
        with pytest.raises(ConfigError, match=rf"{name} is -1, but must be at least 1, or 0 for no limit"):
            ServerSettings(**{name: -1})
    with pytest.raises(ConfigError, match="idle_conversation_days is 0, but must be at least 1"):
        ServerSettings(idle_conversation_days=0)


def test_a_limit_without_keys_is_that_of_all_clients(served):
    server = served(has_keys=False, max_responses_per_key=1)
    assert ask(server, "POST", *STORED["a response"], key=None)[0] == 200
    check_refused(ask(server, "POST", *STORED["a response"], key=None), "1 responses")


class FarHistory:
    """A history on another machine that counts how often it is asked."""

    is_remote = True

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_responses = 0

    def stored_by(self, owner: str) -> StoredAmounts:
        self.num_asked += 1
        return StoredAmounts(0, self.num_responses, 0)


def test_a_far_history_is_asked_once_a_second_and_before_a_refusal(monkeypatch):
    from pensieve_jax.server.http import storage

    history, now_s = FarHistory(), [100.0]
    monkeypatch.setattr(storage.time, "monotonic", lambda: now_s[0])

    async def read(owner, work, *args):
        return work(*args)

    async def work() -> None:
        check = StorageCheck(history, StorageQuota(responses=3), read)
        for _ in range(5):
            await check.check("ada")
        assert history.num_asked == 1
        history.num_responses = 3
        await check.check("ada")
        now_s[0] += 1.5
        with pytest.raises(StorageQuotaError):
            await check.check("ada")
        assert history.num_asked == 2
        history.num_responses = 2  # one was deleted in the same second
        await check.check("ada")
        assert history.num_asked == 3
        await StorageCheck(history, StorageQuota(conversations=1), read).check("ada")
        assert history.num_asked == 3, "only conversations are limited, which turns do not create"

    asyncio.run(work())


def test_an_amount_is_as_old_as_its_look_up_and_a_slow_one_replaces_no_later_one(monkeypatch):
    from pensieve_jax.server.http import storage

    history, now_s = FarHistory(), [100.0]
    monkeypatch.setattr(storage.time, "monotonic", lambda: now_s[0])
    answers: list[asyncio.Future[StoredAmounts]] = []

    async def read(owner, work, *args):
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    async def begun(check: StorageCheck) -> asyncio.Task[None]:
        asked = asyncio.create_task(check.check("ada"))
        await asyncio.sleep(0)
        return asked

    async def work() -> None:
        check = StorageCheck(history, StorageQuota(responses=3), read)
        slow = await begun(check)
        now_s[0] += 0.8
        answers[0].set_result(StoredAmounts(0, 1, 0))
        await slow
        now_s[0] += 0.5  # the look-up began 1.3 s ago
        slow = await begun(check)
        assert len(answers) == 2
        now_s[0] += 0.6
        later = await begun(check)
        answers[2].set_result(StoredAmounts(0, 2, 0))
        await later
        answers[1].set_result(StoredAmounts(0, 1, 0))
        await slow
        now_s[0] += 0.7  # the slow look-up began 1.3 s ago, and the later one 0.7 s ago
        await check.check("ada")
        assert len(answers) == 3

    asyncio.run(work())
