"""Random values in any field or header: an answer in the API's format, never a 500, never a trace.

Covers all routes except those of responses and conversations, which `test_fuzzed_requests` covers.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from pensieve_jax.server.anthropic.schemas import CountTokensBody, MessagesBody
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.openai.completions import CompletionBody
from pensieve_jax.server.openai.schemas import ChatBody
from tests.deadlines import TIMEOUT_S
from tests.seeds import new_seed
from tests.server.fakes import MODEL, say
from tests.server.stored_server import StoredServer

VALID = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/pensieve/push_out": {"response_id": "resp_" + "0" * 32},
    "/v1/pensieve/forget_state": {"response_id": "resp_" + "0" * 32},
}
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
}
FIELDS = {
    path: sorted({*body.__struct_fields__, *body.UNSUPPORTED, *body.IGNORED}) for path, body in BODIES.items()
}
NAMES = sorted({name for fields in FIELDS.values() for name in fields})
# Valid values of these fields, so that many requests run a turn.
MEANT = {
    "stream_options": [{"include_usage": True}],
    "n": [2, 3],
    "logprobs": [True, 0, 3],
    "top_logprobs": [2],
    "max_tokens": [1, 5],
    "max_completion_tokens": [1, 5],
    "stop": ["o", ["k", "o"]],
    "stop_sequences": [["k", "o"]],
    "system": ["Be brief.", [{"type": "text", "text": "Be brief."}]],
    "thinking": [{"type": "adaptive"}],
    "seed": [-1, 5],
    "temperature": [0, 1.5],
    "top_p": [0.5],
    "top_k": [3],
    "store": [True, False],
    "return_token_ids": [True],
    "prompt": [[1, 2], ["a", "b"], [[1], [2]], [1, 2**64], [[1], [-(2**63) - 1]], [-1]],
    "tools": [[]],
    "user": ["me"],
}
PATHS = tuple((route.method, route.path) for route in ROUTES)
PARTS = (MODEL, MODEL, "page.js", "marked.esm.js", "a/b", "%00", "0" * 16)  # of paths; half of them exist
HEADERS = (
    *("content-type", "authorization", "host", "x-request-id", "origin", "accept", "content-length"),
    *("idempotency-key", "x-stainless-retry-count", "cookie", "transfer-encoding", "x-ignored-fields"),
    *("x-api-key", "anthropic-version", "anthropic-beta"),
)
SHAPES = {"message", "type", "param", "code"}
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")


class Chooser(random.Random):
    """Random values that a client might send, by mistake or on purpose."""

    def value(self, depth: int = 0):
        makers = [
            lambda: None,
            lambda: self.choice([True, False]),
            lambda: self.choice([0, 1, -1, 2, 8, 9, 2**31, 2**63, 2**64, 10**30, -(2**63) - 1]),
            lambda: self.choice([0.0, 0.5, 1.5, -0.0, 1e308, -1e308, 5e-324]),
            lambda: self.choice(
                ["", "a", "user", "assistant", "\x00", "é" * 50, "<|end|>", "{{x}}", "\u2028"]
            ),
            lambda: "".join(self.choices(string.printable, k=self.randint(0, 40))),
            lambda: "x" * self.choice([100, 5000]),
        ]
        if depth < 4:
            makers += [
                lambda: [self.value(depth + 1) for _ in range(self.randint(0, 3))],
                lambda: {self.name(): self.value(depth + 1) for _ in range(self.randint(0, 3))},
                lambda: {"role": self.value(4), "content": self.value(depth + 1)},
                lambda: {"type": self.choice(["text", "image_url", self.value(4)]), "text": self.value(4)},
            ]
        return self.choice(makers)()

    def name(self, path: str = "") -> str:
        if path in FIELDS and self.random() < 0.9:
            return self.choice(FIELDS[path])
        return self.choice([*NAMES, "", "a.b", "[0]", "é", "\r\nx-evil: 1", "x" * 300])

    def body(self, path: str):
        body = json.loads(json.dumps(VALID[path]))
        meant = sorted(MEANT.keys() & set(FIELDS.get(path, ())))
        for name in self.sample(meant, self.randint(0, min(3, len(meant)))):
            body[name] = self.choice(MEANT[name])
        if path in BODIES and self.random() < 0.3:
            body["stream"] = True
        for _ in range(self.choice([0, 0, 1, 1, 1, 2])):
            body[self.name(path)] = self.value()
        if self.random() < 0.2 and "messages" in VALID[path]:
            body["messages"] = [*VALID[path]["messages"], self.value(1)]
        raw = json.dumps(body).encode()
        action = self.random()
        if action < 0.05:
            raw = raw[: self.randrange(len(raw))]
        elif action < 0.1:
            place = self.randrange(len(raw))
            raw = raw[:place] + bytes([self.randrange(256)]) + raw[place + 1 :]
        return raw

    def headers(self) -> dict[str, str]:
        count = self.choice([0, 0, 0, 1, 2])
        texts = ("", "a", "\x7f", "é", "Bearer", "application/json", "text/plain", "-1", "9" * 30, "x" * 5000)
        return {self.choice(HEADERS): self.choice(texts) for _ in range(count)}


class Seen:
    """Outcome of many requests.

    Attributes:
        statuses: counts by status.
        answered: routes that answered with 200.
        num_turns, num_streams: turns that ran and streams that began.
    """

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.answered: set[tuple[str, str]] = set()
        self.num_turns = self.num_streams = 0

    def __str__(self) -> str:
        statuses = dict(sorted(self.statuses.items()))
        return f"{statuses}, {self.num_turns} turns, {self.num_streams} streams"


async def run_case(server: StoredServer, chooser: Chooser, seen: Seen) -> None:
    route = (
        chooser.choice(PATHS)
        if chooser.random() < 0.2
        else ("POST", chooser.choice([*VALID, *BODIES, *BODIES]))
    )
    method, path = route
    if chooser.random() < 0.05:
        method = chooser.choice(["GET", "PUT", "OPTIONS", "HEAD", "DELETE"])
    body, headers = b"", chooser.headers()
    if path in VALID:
        body = chooser.body(path)
    where = re.sub(r"{\w+(:path)?}", lambda _: chooser.choice(PARTS), path)
    where += "" if chooser.random() < 0.97 else chooser.choice(["/", "?x=%00", "/%2e%2e", "é"])
    client = server.harness.open(method, where, body, headers)
    status, answered, raw = await asyncio.wait_for(client.whole(), TIMEOUT_S)
    case = (method, where, body, headers, status, raw[:500])
    assert status < 500 or (status == 501 and "transfer-encoding" in headers), case
    assert b"Traceback" not in raw and b".py" not in raw, case
    assert all("\n" not in value and "\r" not in value for value in answered.values()), case
    if status >= 400 and method != "HEAD":
        error = json.loads(raw)["error"]
        if where.partition("?")[0] in ANTHROPIC:
            assert error.keys() == {"type", "message", "details"} and error["details"]["error_code"], case
            param = error["details"]["param"]
        else:
            assert error.keys() == SHAPES and error["code"], case
            param = error["param"]
        assert error["message"] and (param is None or isinstance(param, str)), case
    if status == 200:
        seen.answered.add((method, path))
    seen.statuses[status] += 1
    seen.num_streams += raw.startswith((b"data:", b"event:"))


def run_cases(path: Path, count: int) -> Seen:
    async def scenario() -> Seen:
        chooser, seen = Chooser(new_seed()), Seen()
        settings = ServerSettings(max_body_bytes=20_000)
        with closing(StoredServer(path, say("ok"), settings=settings)) as server:
            server.engine.answers["chunk_map"] = {"branches": []}
            for _ in range(count):
                server.engine.memory.add(("", "0" * 32))  # of a response that bodies name
                await run_case(server, chooser, seen)
                assert server.harness.services.limits.num_in_engine == 0
            seen.num_turns = len(server.engine.turns)
        return seen

    return asyncio.run(scenario())


def test_any_request_gets_an_answer_in_the_apis_format(tmp_path):
    seen = run_cases(tmp_path / "history.sqlite", 300)
    assert seen.statuses.keys() >= {200, 400}, str(seen)


@pytest.mark.long
def test_any_request_gets_an_answer_in_the_apis_format_ten_thousand_times(tmp_path, record_property):
    seen = run_cases(tmp_path / "history.sqlite", 10_000)
    record_property("note", str(seen))
    assert seen.statuses.keys() >= {200, 400, 403, 404, 405, 413, 415}, str(seen)
    assert seen.num_turns > 500 and seen.num_streams > 100, str(seen)  # about half of the usual number
    # No response is stored here, and no query names one.
    never = {(method, "/v1/pensieve/trees/{root}") for method in ("GET", "POST")}
    never.add(("GET", "/v1/pensieve/explain"))
    assert seen.answered >= set(PATHS) - never, set(PATHS) - seen.answered


REFUSED = ("refused", 123, -0.75, {"refused": 1}, ["refused"], True, False)
"""Values for fields that have no effect here. Of each type, so that a field may accept some."""


@pytest.mark.parametrize("path", BODIES)
def test_every_field_without_an_effect_is_refused_by_its_name(path, tmp_path):
    """With a value of each type, unless the value has no effect anyway; that one is accepted."""
    assert not BODIES[path].UNSUPPORTED.keys() & set(BODIES[path].__struct_fields__)

    async def answer(server, field, value):
        raw = json.dumps({**VALID[path], field: value}).encode()
        client = server.harness.open("POST", path, raw, {})
        status, _, answered = await asyncio.wait_for(client.whole(), TIMEOUT_S)
        error = json.loads(answered).get("error", {})
        return status, error.get("details", error).get("param")

    async def scenario():
        with closing(StoredServer(tmp_path / "history.sqlite", say("ok"))) as server:
            for field, accepted in BODIES[path].UNSUPPORTED.items():
                refused = [value for value in REFUSED if value not in accepted]
                assert len(refused) >= len(REFUSED) - 2
                for value in refused:
                    assert await answer(server, field, value) == (400, field), (field, value)
                for value in (None, *accepted):
                    assert await answer(server, field, value) == (200, None), (field, value)

    asyncio.run(scenario())
