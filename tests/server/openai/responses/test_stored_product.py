"""Every way to create a stored turn, with every end, and everything that can be done with it afterwards.

    {chat, completion, response} x {stream, whole} x {foreground, background}
        x {stop string, stop token, length, end, cancelled}
        x {GET, replay, resumed, continued, continued with instructions}

Ways that the API does not have are refused; each refusal is tested. The model samples the same tokens each
time, so what must come out is written down here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pensieve_jax.text.loading import byte_tokenizer
from tests.deadlines import wait_until
from tests.server.fakes import sampled
from tests.server.live import LiveServer

EOS = 257
SAMPLED = (*"I see, my name is \u00e9 Ada".encode(), EOS)
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "response": "/v1/responses"}
PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-", "response": "resp_"}
METADATA = {"topic": "demo"}
LOGPROBS: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True, "top_logprobs": 2},
    "completion": {"logprobs": 2},
    "response": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
}


class End(NamedTuple):
    """The end of a reply: the fields that ask for it, its text, its number of tokens, and its status."""

    fields: dict[str, Any]
    text: str
    num_tokens: int
    status: str


ENDS = {
    "stop string": End({"stop": "name"}, "I see, my ", 14, "completed"),
    "stop token": End({"stop_token_ids": [ord("n")]}, "I see, my ", 11, "completed"),
    "length": End({"max_tokens": 9}, "I see, my", 9, "incomplete"),
    "end": End({}, "I see, my name is \u00e9 Ada", len(SAMPLED), "completed"),
    "cancelled": End({}, "", 0, "cancelled"),
}


class Case(NamedTuple):
    """One way to create a turn."""

    api: str
    stream: bool
    background: bool
    end: str

    @property
    def refused_field(self) -> str | None:
        """The field that the API refuses, or None if there is such a turn."""
        if self.background and self.api != "response":
            return "background"
        refused = ENDS[self.end].fields if self.api == "response" else {}
        return next((name for name in refused if name.startswith("stop")), None)

    @property
    def body(self) -> dict[str, Any]:
        fields = dict(ENDS[self.end].fields)
        if self.api == "response":
            said: dict[str, Any] = {"input": "hi"}
            if "max_tokens" in fields:
                fields["max_output_tokens"] = fields.pop("max_tokens")
        elif self.api == "chat":
            said = {"messages": [{"role": "user", "content": "hi"}]}
        else:
            said = {"prompt": "<|user|>hi<|end|><|assistant|>", "max_tokens": 99}
        fields = said | fields | LOGPROBS[self.api] | {"store": True, "metadata": METADATA}
        ways = {"stream": self.stream, "background": self.background}
        return fields | {name: True for name, is_asked in ways.items() if is_asked}

    @property
    def continued(self) -> str:
        """The context of a response that continues this one, up to its own messages."""
        reply, asked = ENDS[self.end].text, "<bos><|user|>hi<|end|><|assistant|>"
        if self.api == "completion":
            return asked + byte_tokenizer().decode_raw(SAMPLED[: ENDS[self.end].num_tokens])
        return f"{asked}{reply}<|end|>"

    @property
    def instructed(self) -> str:
        """The same with instructions, which are the first message."""
        if self.api == "completion":
            return f"{self.continued}<|system|>Be kind.<|end|>"
        before = "<bos><|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"
        return f"{before}{ENDS[self.end].text}<|end|>"


CASES = [Case(*one) for one in itertools.product(PATHS, (False, True), (False, True), ENDS)]
REFUSED = [case for case in CASES if case.refused_field is not None]
ENDED = [case for case in CASES if case.refused_field is None and case.end != "cancelled"]
CANCELLED = [case for case in CASES if case.refused_field is None and case.end == "cancelled"]


class Client:
    """A client of a server in this process, without sockets."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and answer, which is a list of events for a stream."""

        async def answer() -> tuple[int, dict[str, str], bytes]:
            return await self.server.harness.open(method, path, body).whole()

        status, headers, raw = self.server.wait_for(answer())
        if headers["content-type"].startswith("application/json"):
            return status, json.loads(raw)
        lines = raw.decode().split("\n")
        return status, [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def get(self, path: str) -> Any:
        status, answer = self.ask("GET", path)
        assert status == 200, answer
        return answer

    def leave(self, path: str, body: Any) -> str:
        """Send a request, and leave once its turn runs; return the turn's id."""

        async def send_and_leave() -> str:
            engine = self.server.engine
            num_turns = len(engine.turns)
            opened = self.server.harness.open("POST", path, body)
            while len(engine.turns) == num_turns:
                await asyncio.sleep(0)
            opened.leave()
            await asyncio.wait([opened.task])
            return str(engine.turns[-1].turn_id)

        return self.server.wait_for(send_and_leave())

    def samples(self, token_ids: Sequence[int]) -> None:
        self.server.on_loop(lambda: setattr(self.server.engine, "script", sampled(token_ids)))

    def context(self, response: dict[str, Any]) -> tuple[str, int]:
        """Return the context of a stored response, as the engine got it, and its number of tokens."""

        def read() -> tuple[str, int]:
            record = self.server.engine.store.load_turn("", response["id"].removeprefix("resp_"))
            num_tokens = len(record.token_ids) - len(record.turns[-1].output_token_ids)
            return byte_tokenizer().decode_raw(record.token_ids[:num_tokens].tolist()), num_tokens

        return self.server.on_loop(read)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    path = tmp_path_factory.mktemp("product") / "history.sqlite"
    with LiveServer(path, sampled(SAMPLED)) as server:
        yield Client(server)


def named(case: Case) -> str:
    ways = ("stream" if case.stream else "whole", "background" if case.background else "foreground")
    return "-".join((case.api, *ways, case.end))


def continuation(previous: str, **fields: Any) -> dict[str, Any]:
    return {"input": "Who am I?", "previous_response_id": previous, **fields}


def create(client: Client, case: Case) -> tuple[str, Any]:
    """Create the turn of a case; return the path of its response, and the answer."""
    status, made = client.ask("POST", PATHS[case.api], case.body)
    assert status == 200, made
    first = made[0] if case.stream else made
    made_id = first["response"]["id"] if "response" in first else first["id"]
    assert made_id.startswith(PREFIXES[case.api])
    response_id = "resp_" + made_id.removeprefix(PREFIXES[case.api])
    return f"/v1/responses/{response_id}", made


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_ways_that_an_api_does_not_have_are_refused(client, case):
    num_turns = len(client.server.engine.turns)
    status, answer = client.ask("POST", PATHS[case.api], case.body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", case.refused_field)
    assert len(client.server.engine.turns) == num_turns


@pytest.mark.parametrize("case", ENDED, ids=named)
def test_a_stored_turn_is_the_same_wherever_it_is_seen(client, case):
    client.samples(SAMPLED)
    end = ENDS[case.end]
    path, made = create(client, case)
    if case.background and not case.stream:
        wait_until(lambda: client.get(path)["status"] not in ("queued", "in_progress"))
    stored = client.get(path)

    # what the client was told
    if case.api != "response":
        chunks = made if case.stream else [made]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        reasons = {choice["finish_reason"] for choice in choices} - {None}
        assert reasons == {"length" if end.status == "incomplete" else "stop"}
        assert "".join(shown(choice) for choice in choices) == end.text
    elif case.stream:
        assert made[-1]["response"] == stored
    elif not case.background:
        assert made == stored

    # GET
    (item,) = stored["output"]
    (part,) = item["content"]
    assert (stored["status"], part["text"]) == (end.status, end.text)
    assert item["id"] == "msg_" + stored["id"].removeprefix("resp_") and item["status"] == end.status
    assert stored["usage"]["output_tokens"] == len(part["logprobs"]) == end.num_tokens
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [2] * end.num_tokens
    assert (stored["metadata"], stored["top_logprobs"]) == (METADATA, 2)
    assert (stored["store"], stored["background"], stored["error"]) == (True, case.background, None)
    (asked,) = client.get(f"{path}/input_items")["data"]
    assert asked["content"][0]["text"] == case.body.get("prompt", "hi")

    # replay
    events = client.get(f"{path}?stream=true")
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    types = ["created", *(["queued"] if case.background else []), "in_progress", "output_item.added"]
    types += ["content_part.added", *["output_text.delta"] * len(end.text), "output_text.done"]
    types += ["content_part.done", "output_item.done", end.status]
    assert [event["type"] for event in events] == [f"response.{name}" for name in types]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in deltas) == end.text and events[-1]["response"] == stored
    logprobs = [one for event in deltas for one in event["logprobs"]]
    assert logprobs == part["logprobs"][: len(logprobs)] and len(logprobs) == len(end.text.encode())
    if case.api == "response" and case.stream:
        assert events == made

    # resumed
    for last in (0, 4, len(events) // 2, len(events) - 2, len(events) - 1, len(events) + 9):
        assert client.get(f"{path}?stream=true&starting_after={last}") == events[last + 1 :]

    # continued, without and with instructions
    asked_next = "<|user|>Who am I?<|end|><|assistant|>"
    for fields, context in (({}, case.continued), ({"instructions": "Be kind."}, case.instructed)):
        body = continuation(stored["id"], **fields)
        status, after = client.ask("POST", "/v1/responses", body)
        assert status == 200, after
        text, num_tokens = client.context(after)
        assert text == context + asked_next
        status, counted = client.ask("POST", "/v1/responses/input_tokens", body)
        assert (status, counted["input_tokens"]) == (200, num_tokens)

    status, refused = client.ask("POST", f"{path}/cancel")
    if case.background:  # it has ended
        assert (status, refused) == (200, stored)
    else:
        assert (status, refused["error"]["param"]) == (400, "response_id")


def shown(choice: dict[str, Any]) -> str:
    told = choice.get("delta", choice.get("message", choice))
    return told.get("content", told.get("text")) or ""


@pytest.mark.parametrize("case", [case for case in CANCELLED if not case.background], ids=named)
def test_a_turn_whose_client_leaves_is_not_stored(client, case):
    client.samples(SAMPLED[:9])
    turn_id = client.leave(PATHS[case.api], case.body)
    wait_until(lambda: client.server.engine.turns[-1].cancelled)
    path = f"/v1/responses/resp_{turn_id}"
    for method, place in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("GET", f"{path}?stream=true&starting_after=3"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        status, answer = client.ask(method, place)
        assert (status, answer["error"]["code"]) == (404, "not_found")
    for fields in ({}, {"instructions": "Be kind."}):
        status, answer = client.ask("POST", "/v1/responses", continuation(f"resp_{turn_id}", **fields))
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (
            404,
            "previous_response_not_found",
            "previous_response_id",
        )


@pytest.mark.parametrize("case", [case for case in CANCELLED if case.background], ids=named)
def test_a_cancelled_background_response_is_the_same_wherever_it_is_seen(client, case):
    client.samples(SAMPLED[:9])
    num_turns = len(client.server.engine.turns)
    if case.stream:
        client.leave(PATHS[case.api], case.body)  # a background response continues
    else:
        assert create(client, case)[1]["status"] == "queued"
    wait_until(lambda: len(client.server.engine.turns) > num_turns)
    response_id = f"resp_{client.server.engine.turns[-1].turn_id}"
    path = f"/v1/responses/{response_id}"
    status, cancelled = client.ask("POST", f"{path}/cancel")
    assert (status, cancelled["status"], cancelled["output"]) == (200, "cancelled", [])
    assert client.get(path) == cancelled and cancelled["metadata"] == METADATA
    events = client.get(f"{path}?stream=true")
    assert [event["sequence_number"] for event in events] == list(range(6))
    assert events[-1] == {"type": "response.incomplete", "sequence_number": 5, "response": cancelled}
    for last in (0, 4, 9, 99):
        resumed = client.get(f"{path}?stream=true&starting_after={last}")
        number = max(5, last + 1)
        assert resumed == [*events[last + 1 : -1], {**events[-1], "sequence_number": number}]
    for fields in ({}, {"instructions": "Be kind."}):
        status, answer = client.ask("POST", "/v1/responses", continuation(response_id, **fields))
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid_value", "previous_response_id")


def test_every_case_is_tested_once():
    assert len(CASES) == 60 == len(REFUSED) + len(ENDED) + len(CANCELLED)
    assert len(REFUSED) == 28 and len(CANCELLED) == 8
