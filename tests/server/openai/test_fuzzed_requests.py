"""Any body gets an answer in the API's format, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tests.seeds import new_seed
from tests.server.fakes import say
from tests.server.stored_server import StoredServer

NUM_REQUESTS = 1500
GOOD: dict[str, Any] = {
    "model": "fake",
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and"}]},
    ],
    "instructions": "be kind",
    "conversation": None,
    "previous_response_id": None,
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "max_output_tokens": 5,
    "store": True,
    "stream": False,
    "background": False,
    "text": {"format": {"type": "text"}},
    "seed": 3,
    "user": "me",
}
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**200, 1e308, -0.5, "", "x", "\x00", "\U0001f600" * 9),
    *([], [[]], [None], [1], ["x"], {}, {"": ""}, {"type": "message"}, {"id": "msg_x"}, {"id": 5}),
    *({"role": "user"}, {"role": "user", "content": {}}, {"type": "input_text", "text": 5}, [{"a": [{}]}]),
    *("resp_" + "0" * 32, "conv_" + "0" * 32, {"id": "conv_" + "0" * 32}, "x" * 5000, {"format": []}),
)
PATHS = (
    *("/v1/responses", "/v1/responses", "/v1/responses", "/v1/responses/input_tokens", "/v1/conversations"),
    *("/v1/conversations/{conversation}", "/v1/conversations/{conversation}/items"),
)
HEADERS = (
    *("content-type", "authorization", "host", "x-request-id", "origin", "accept", "cookie"),
    *("idempotency-key", "x-stainless-retry-count", "x-ignored-fields", "openai-beta"),
)
HEADER_VALUES = ("", "a", "Bearer", "application/json", "text/plain", "-1", "9" * 30, "x" * 5000, "a: b")
QUERIES = (
    "",
    "?limit=5",
    "?limit=%00",
    "?after=x",
    "?order=x",
    "?stream=true",
    "?stream=true&starting_after=3",
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON value."""
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        found += places(inner, (*at, name))
    return found


def changed(value: Any, draw: random.Random) -> Any:
    """Return a copy with something else in one or several places."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        path = draw.choice(places(value)[1:] or [()])
        junk = json.loads(json.dumps(draw.choice(JUNK)))
        if not path:
            return junk
        inner = value
        for name in path[:-1]:
            inner = inner[name]
        if draw.random() < 0.2 and isinstance(inner, dict):
            inner[draw.choice(("tools", "colour", "n", "stop", "prompt", "\x00"))] = junk
        elif draw.random() < 0.2:
            del inner[path[-1]]
        else:
            inner[path[-1]] = junk
    return value


async def fuzz(path: Any, seed: int) -> dict[int, int]:
    """Return how often each status came."""
    draw, statuses = random.Random(seed), {}
    server = StoredServer(path, say("hello there"))
    engine, harness, responses = server.engine, server.harness, server.responses
    known = {"conversation": "conv_x", "response": "resp_x"}
    async with harness.client() as client:
        for _ in range(NUM_REQUESTS):
            body = changed(GOOD if draw.random() < 0.9 else {"items": GOOD["input"], "metadata": {}}, draw)
            if isinstance(body, dict) and draw.random() < 0.3:
                body["previous_response_id" if draw.random() < 0.5 else "conversation"] = known[
                    "response" if draw.random() < 0.5 else "conversation"
                ]
            target = draw.choice(PATHS).format(**known)
            method = draw.choice(("POST", "POST", "POST", "GET", "DELETE"))
            if method != "POST":
                part = draw.choice(("", "/items", "/input_items", "/items/msg_x"))
                kind = draw.choice(("conversation", "response"))
                target = f"/v1/{kind}s/{known[kind]}{part}{draw.choice(QUERIES)}"
            headers = {"content-type": "application/json"}
            if draw.random() < 0.1:
                headers["Idempotency-Key"] = draw.choice(("k", "x" * 300, "\t"))
            if draw.random() < 0.1:
                headers["x-stainless-retry-count"] = draw.choice(("1", "-1", "x", ""))
            if draw.random() < 0.1:
                headers[draw.choice(HEADERS)] = draw.choice(HEADER_VALUES)
            content = b"" if method != "POST" else json.dumps(body).encode()
            if draw.random() < 0.02:
                content = content[: draw.randrange(len(content) + 1)]
            answer = await client.request(method, target, content=content, headers=headers)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            sent = f"{method} {target} {headers} {content[:3000]!r} -> {answer.text[:500]}"
            assert answer.status_code in (200, 400, 403, 404, 405, 409, 415, 422), sent
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, sent
            elif "application/json" in answer.headers["content-type"]:
                said = answer.json()
                if said.get("object") in known:
                    known[said["object"]] = said["id"]
    while responses.background._runs:
        await asyncio.sleep(0)
    assert harness.services.limits.num_in_engine == 0 and responses.locks == set()
    assert all(turn.output is not None for turn in engine.turns if turn._error is None)
    server.close()
    return statuses


@pytest.mark.parametrize("_run", range(2))
def test_no_body_causes_an_internal_error(tmp_path, _run):
    statuses = asyncio.run(fuzz(tmp_path / "history.sqlite", new_seed()))
    print(statuses)
    assert statuses[200] > NUM_REQUESTS // 20 and statuses[400] > NUM_REQUESTS // 20
