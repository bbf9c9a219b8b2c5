"""Anything in any field or header: an answer of our shape, never a 500, never a trace."""

from __future__ import annotations

import asyncio
import json
import random
import string

import pytest

from pensieve_jax.server.api.chat_schemas import ChatBody
from pensieve_jax.server.api.completions import CompletionBody
from pensieve_jax.server.api.routes import ROUTES
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import MODEL, FakeEngine, Harness, say

VALID = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/pensieve/push_out": {"response_id": "resp_" + "0" * 32},
    "/v1/pensieve/forget_state": {"response_id": "resp_" + "0" * 32},
}
BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody)
FIELDS = sorted(
    {name for body in BODIES for name in (*body.__struct_fields__, *body.UNSUPPORTED, *body.IGNORED)}
)
HEADERS = (
    *("content-type", "authorization", "host", "x-request-id", "origin", "accept", "content-length"),
    *("idempotency-key", "x-stainless-retry-count", "cookie", "transfer-encoding", "x-ignored-fields"),
)
SHAPES = {"message", "type", "param", "code"}


class Chooser(random.Random):
    """Values that somebody might send, by mistake or on purpose."""

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

    def name(self) -> str:
        return self.choice([*FIELDS, "", "a.b", "[0]", "é", "\r\nx-evil: 1", "x" * 300])

    def body(self, path: str):
        body = json.loads(json.dumps(VALID[path]))
        for _ in range(self.choice([0, 1, 1, 1, 2, 3])):
            body[self.name()] = self.value()
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


async def run_case(harness: Harness, chooser: Chooser) -> int:
    path = chooser.choice(list(VALID))
    method = chooser.choice(["POST"] * 100 + ["GET", "PUT", "OPTIONS", "HEAD", "DELETE"])
    body, headers = chooser.body(path), chooser.headers()
    where = path if chooser.random() < 0.97 else path + chooser.choice(["/", "?x=%00", "/%2e%2e", "é"])
    client = harness.open(method, where, body, headers)
    status, answered, raw = await asyncio.wait_for(client.whole(), 20)
    case = (method, where, body, headers, status, raw[:500])
    assert status < 500, case
    assert b"Traceback" not in raw and b".py" not in raw, case
    assert all("\n" not in value and "\r" not in value for value in answered.values()), case
    if status >= 400 and method != "HEAD":
        error = json.loads(raw)["error"]
        assert error.keys() == SHAPES and error["message"] and error["code"], case
        assert error["param"] is None or isinstance(error["param"], str), case
    return status


def run_cases(seed: int, count: int) -> dict[int, int]:
    async def scenario():
        chooser, seen = Chooser(seed), {}
        harness = Harness(ROUTES, FakeEngine(say("ok")), settings=ServerSettings(max_body_bytes=20_000))
        harness.engine.answers |= {"push_out_turn": 0, "forget_turn_state": None}
        for _ in range(count):
            harness.engine.turns.clear()
            status = await run_case(harness, chooser)
            seen[status] = seen.get(status, 0) + 1
            assert harness.services.limits.num_inside == 0
        return seen

    return asyncio.run(scenario())


def test_anything_gets_an_answer_of_our_shape(record_property):
    seed = random.SystemRandom().randrange(2**32)
    record_property("note", f"seed {seed}")
    seen = run_cases(seed, 300)
    assert seen.keys() >= {200, 400}, (seed, seen)


@pytest.mark.long
def test_anything_gets_an_answer_of_our_shape_ten_thousand_times(record_property):
    seed = random.SystemRandom().randrange(2**32)
    seen = run_cases(seed, 10_000)
    record_property("note", f"seed {seed}: {dict(sorted(seen.items()))}")
    assert seen.keys() >= {200, 400, 404, 405, 413, 415}, (seed, seen)
