"""Models, tokens, and the server's health."""

from __future__ import annotations

import asyncio
import json

import pytest

import pensieve_jax
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import MODEL, FakeEngine, Harness, ask

HI = [{"role": "user", "content": "Hi"}]


def test_models_have_vllms_format():
    harness = Harness(ROUTES, settings=ServerSettings(served_model_name="org/mine"))
    _, body = ask(harness, "GET", "/v1/models")
    card = body["data"][0]
    assert card == {
        "id": "org/mine",
        "object": "model",
        "created": 1_000_000,
        "owned_by": "pensieve",
        "root": "org/mine",
        "parent": None,
        "max_model_len": 4096,
    }
    assert ask(harness, "GET", "/v1/models/org/mine") == (200, card)
    status, body = ask(harness, "GET", "/v1/models/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_models_have_the_form_of_the_clients_api():
    async def get(path):
        headers = {"anthropic-version": "2026-10-21"}
        _, _, raw = await Harness(ROUTES).open("GET", path, None, headers).whole()
        return json.loads(raw)

    page = asyncio.run(get("/v1/models"))
    model = {
        "type": "model",
        "id": MODEL,
        "display_name": MODEL,
        "created_at": "1970-01-12T13:46:40+00:00",
        "lifecycle": "active",
        "max_input_tokens": 4096,
        "max_tokens": 4096,
    }
    assert page == {"data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    assert asyncio.run(get(f"/v1/models/{MODEL}")) == model


def test_text_is_tokenized_and_detokenized():
    harness = Harness(ROUTES)
    _, body = ask(harness, "POST", "/tokenize", {"prompt": "é", "return_token_strs": True})
    assert body == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [256, 0xC3, 0xA9],
        "token_strs": ["<bos>", "\ufffd", "\ufffd"],
    }
    _, body = ask(harness, "POST", "/tokenize", {"prompt": "a", "add_special_tokens": False})
    assert body["tokens"] == [97] and body["token_strs"] is None
    messages = [{"role": "user", "content": "Hi"}]
    _, body = ask(harness, "POST", "/tokenize", {"messages": messages})
    _, text = ask(harness, "POST", "/detokenize", {"tokens": body["tokens"]})
    assert text == {"prompt": "<bos><|user|>Hi<|end|><|assistant|>"}
    assert ask(harness, "POST", "/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    for path, bad in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": "a"}),
    ):
        assert ask(harness, "POST", path, bad)[0] == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("add_special_tokens", True), ("enable_thinking", False), ("reasoning_effort", "low")],
)
def test_a_setting_that_would_change_the_tokens_of_messages_is_refused(name, value):
    harness = Harness(ROUTES)
    status, body = ask(harness, "POST", "/tokenize", {"messages": HI, name: value})
    assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
    assert body["error"]["param"] == name
    assert ask(harness, "POST", "/tokenize", {"messages": HI, "add_special_tokens": False})[0] == 200


def test_messages_have_the_same_tokens_as_in_a_chat():
    """This includes a developer message whose role the template does not know."""
    messages = [{"role": "developer", "content": "Be kind."}, *HI]
    harness = Harness(ROUTES)
    status, body = ask(harness, "POST", "/tokenize", {"messages": messages})
    assert status == 200
    ask(harness, "POST", "/v1/chat/completions", {"messages": messages})
    assert list(harness.engine.turns[0].spec.prompt_token_ids) == body["tokens"]


def test_health_and_readiness():
    engine = FakeEngine()
    harness = Harness(ROUTES, engine)

    def both():
        return ask(harness, "GET", "/health")[0], ask(harness, "GET", "/ready")[0]

    assert both() == (200, 200)
    engine.last_heard_s = 11.0
    assert both() == (503, 503)
    engine.state = "starting"
    assert both() == (200, 503)
    engine.last_heard_s, engine.state = 0.0, "draining"
    assert both() == (200, 503)
    engine.state = "dead"
    assert both() == (503, 503)
    assert ask(harness, "GET", "/version") == (200, {"version": pensieve_jax.__version__})


def test_health_checks_may_use_the_address_as_host_name():
    """Kubernetes and HTTP/1.0 clients do so, also if the server was given its host names."""
    harness = Harness(ROUTES, settings=ServerSettings(allowed_hosts=("chat.example",)))

    async def statuses(host):
        paths = ("/health", "/ready", "/version")
        return [(await harness.open("GET", path, headers={"host": host}).whole())[0] for path in paths]

    for host in ("10.1.2.3:8000", ""):
        assert asyncio.run(statuses(host)) == [200, 200, 403]


@pytest.mark.parametrize(
    ("path", "body", "expected_s"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 10}, 11),
        ("/v1/completions", {"prompt": [1]}, 17),
        ("/v1/chat/completions", {"messages": HI}, 20),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 10}, 10),
    ],
)
def test_a_full_server_stays_ready_and_sends_retry_after(path, body, expected_s):
    """A balancer that removed it would overload other servers, which lack its clients' KV cache."""

    async def scenario():
        harness = Harness(ROUTES, FakeEngine(lambda turn: None, max_num_running=1))
        limits = harness.services.limits
        harness.clock.advance(10.0)
        (await limits.enter("")).leave(110, [20])  # replies have 20 tokens, and 11 tokens take a second
        clients = [harness.open("POST", path, {"model": MODEL, **body}) for _ in range(11)]
        while limits.num_waiting < 2:
            await asyncio.sleep(0)
        status, headers, _ = await harness.open("POST", path, {"model": MODEL, **body}).whole()
        assert (status, headers["retry-after"]) == (503, str(expected_s))
        assert [(await harness.open("GET", route).whole())[0] for route in ("/ready", "/health")] == [
            200,
            200,
        ]
        for client in clients:
            client.leave()
            await client.task

    asyncio.run(scenario())


def test_which_routes_need_a_key(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice:" + "0" * 64 + "\n")
    open_to_all = {"/", "/page/{name}", "/page/vendor/{name}", "/health", "/ready"}
    for host in ("127.0.0.1", "0.0.0.0"):  # behind nginx on this machine, every client has this address
        harness = Harness(ROUTES, settings=ServerSettings(host=host, api_keys_file=str(path)))
        found = set()
        for route in ROUTES:
            where = route.path.replace("{model:path}", MODEL)
            body = {} if route.method == "POST" else None
            if ask(harness, route.method, where, body)[0] != 401:
                found.add(route.path)
        assert found == open_to_all
