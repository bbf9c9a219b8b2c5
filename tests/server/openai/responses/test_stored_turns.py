"""Stored turns of Chat Completions, Completions and Responses: what they hold, and what continues them."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text.loading import byte_tokenizer
from tests.deadlines import TIMEOUT_S
from tests.server.fakes import sampled
from tests.server.live import LiveServer

EOS, END = 257, 261
REPLY = (*"I see. Your name is \u00e9\U0001f600 Ada".encode(), 0xC3, EOS)
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "<|user|>hi<|end|><|assistant|>"}
ROUTES = {"chat/completions": MESSAGES, "completions": PROMPT}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "history.sqlite"
    with LiveServer(path, sampled(REPLY)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        yield client


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def as_response(made: dict[str, Any]) -> str:
    return f"/responses/resp_{made['id'].split('-')[-1].removeprefix('resp_')}"


ENDS: dict[str, dict[str, Any]] = {
    "eos": {},
    "length": {"max_tokens": 9},
    "length within a character": {"max_tokens": 22},
    "stop string": {"stop": "name"},
    "stop string at the start": {"stop": "I"},
    "stop id": {"stop_token_ids": [*b"n"]},
    "stop id within a character": {"stop_token_ids": [0xA9]},
    "hidden stop id": {"stop_token_ids": [EOS], "ignore_eos": True},
    "no end of sequence": {"ignore_eos": True},
}


def test_a_stored_prompt_without_a_reply_is_a_response_with_empty_text(http):
    asked = {**PROMPT, "store": True, "max_tokens": 0, "echo": True, "logprobs": 0}
    made = http.post("completions", json=asked).json()
    assert made["choices"][0]["text"] == PROMPT["prompt"] and made["usage"]["completion_tokens"] == 0
    stored = http.get(as_response(made)).json()
    assert stored["status"] == "incomplete" and stored["usage"]["output_tokens"] == 0
    assert text_of(events_of(http.get(f"{as_response(made)}?stream=true"))) == ""
    more = {**PROMPT, "previous_response_id": made["id"]}
    assert http.post("completions", json=more).status_code == 200


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("route", ROUTES)
def test_replayed_events_show_the_stored_reply(http, route, end):
    made = http.post(
        route, json={"store": True, "max_tokens": len(REPLY), **ROUTES[route], **ENDS[end]}
    ).json()
    (choice,) = made["choices"]
    shown = choice["text"] if "text" in choice else choice["message"]["content"]
    stored = http.get(as_response(made)).json()
    events = events_of(http.get(f"{as_response(made)}?stream=true"))
    assert text_of(events) == shown == stored["output"][0]["content"][0]["text"]
    assert events[-1] == {
        "type": f"response.{stored['status']}",
        "sequence_number": len(events) - 1,
        "response": stored,
    }


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("more", [{}, LOGPROBS], ids=["text", "logprobs"])
def test_a_foreground_stream_has_the_numbers_of_its_replay(http, more):
    """The server's loop is late here: the engine's deltas of the whole reply arrive as one."""
    body = {"input": "hi", "stream": True, **more}
    live = events_of(http.post("/responses", json=body))
    assert [event["sequence_number"] for event in live] == list(range(len(live)))
    deltas = [event["delta"] for event in live if event["type"] == "response.output_text.delta"]
    assert len(deltas) == len("I see. Your name is \u00e9\U0001f600 Ada\ufffd")
    one = as_response(live[0]["response"])
    for last in range(4, len(live)):
        again = events_of(http.get(f"{one}?stream=true&starting_after={last}"))
        assert [(event["sequence_number"], event["type"]) for event in live[last + 1 :]] == [
            (event["sequence_number"], event["type"]) for event in again
        ]
        assert text_of(live[: last + 1]) + text_of(again) == text_of(live)


@pytest.mark.parametrize("background", [False, True])
def test_log_probabilities_are_in_the_stream_in_the_response_and_in_the_replay(http, background):
    body = {"input": "hi", "stream": True, "background": background, **LOGPROBS}
    live = events_of(http.post("/responses", json=body))
    stored = http.get(as_response(live[-1]["response"])).json()
    assert stored == live[-1]["response"]
    logprobs = stored["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == len(REPLY) and all(len(one["top_logprobs"]) == 2 for one in logprobs)
    told = [
        one for event in live if event["type"] == "response.output_text.delta" for one in event["logprobs"]
    ]
    assert told == logprobs[: len(told)] and len(told) >= len(REPLY) - 1
    assert events_of(http.get(f"{as_response(stored)}?stream=true")) == live


@pytest.mark.parametrize("route", ROUTES)
def test_a_stored_chat_or_completion_has_its_log_probabilities(http, route):
    wanted = {"logprobs": 2} if route == "completions" else {"logprobs": True, "top_logprobs": 2}
    made = http.post(route, json={"store": True, **ROUTES[route], **wanted, "stop": "name"}).json()
    stored = http.get(as_response(made)).json()
    assert stored["top_logprobs"] == 2
    found = made["choices"][0]["logprobs"]
    values = (
        found["token_logprobs"] if route == "completions" else [one["logprob"] for one in found["content"]]
    )
    logprobs = stored["output"][0]["content"][0]["logprobs"]
    assert [one["logprob"] for one in logprobs] == values and len(values) == len("I see. Your name")


BODIES = {
    "chat/completions": {**MESSAGES, "store": True},
    "completions": {**PROMPT, "store": True},
    "responses": {"input": "hi"},
}
BAD_METADATA = {
    "too many pairs": ({str(i): "" for i in range(17)}, "metadata"),
    "a long key": ({"k" * 65: "b"}, "metadata"),
    "a long value": ({"a": "b" * 513}, "metadata.a"),
    "a number": ({"a": 1}, "metadata.a"),
    "no object": (5, "metadata"),
}


@pytest.mark.parametrize("route", BODIES)
def test_a_stored_turn_has_its_metadata(http, route):
    made = http.post(route, json=BODIES[route] | {"metadata": {"topic": "demo"}})
    assert "x-ignored-fields" not in made.headers
    assert http.get(as_response(made.json())).json()["metadata"] == {"topic": "demo"}
    assert http.post(route, json=BODIES[route] | {"metadata": None}).status_code == 200


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("bad", BAD_METADATA)
@pytest.mark.parametrize("route", BODIES)
def test_metadata_beyond_the_limits_is_refused(http, route, bad, store):
    value, param = BAD_METADATA[bad]
    answer = http.post(route, json=BODIES[route] | {"metadata": value, "store": store})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == param


def context_of(server: LiveServer, response: dict[str, Any]) -> str:
    """Return the whole context of a stored response, as the engine got it."""
    turn_id = response["id"].removeprefix("resp_")

    def read() -> str:
        record = server.engine.store.load_turn("", turn_id)
        num_reply_tokens = len(record.turns[-1].output_token_ids)
        return byte_tokenizer().decode_raw(record.token_ids.tolist()[:-num_reply_tokens])

    return server.on_loop(read)


RAW = "<bos><|user|>Call me Ada.<|end|><|assistant|>"
STOPPED = {"": "I see. Your name is é😀 Ada\ufffd<eos>", "name": "I see. Your name"}
ASKED = "<|user|>Who am I?<|end|><|assistant|>"
KIND = "<|system|>Be kind.<|end|>"
TERSE = "<|system|>Be terse.<|end|>"
REPLIED = "I see. Your name is é😀 Ada\ufffd"


def complete(http, **fields: Any) -> str:
    """Create a stored completion, and return its id as a response."""
    prompt = RAW.removeprefix("<bos>")
    made = http.post("completions", json={"prompt": prompt, "store": True, "max_tokens": 99, **fields}).json()
    return made["id"].replace("cmpl-", "resp_")


def answer(http, previous: str, **fields: Any) -> dict[str, Any]:
    made = http.post("responses", json={"input": "Who am I?", "previous_response_id": previous, **fields})
    assert made.status_code == 200, made.text
    return made.json()


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("instructions", [None, "Be kind."])
@pytest.mark.parametrize("stop", STOPPED)
def test_the_prompt_of_a_completion_is_in_what_continues_it(server, http, stop, instructions, store):
    """The tokens of the completion come first as they were sampled, those of the stop string included."""
    previous = complete(http, **({"stop": stop} if stop else {}))
    made = answer(http, previous, instructions=instructions, store=store)
    whole = RAW + STOPPED[stop] + (KIND if instructions else "") + ASKED
    if store:
        assert context_of(server, made) == whole
    turn = server.on_loop(lambda: server.engine.turns[-1])
    assert turn.spec.node.parent_id == previous.removeprefix("resp_")
    whole_ids = byte_tokenizer().encode(whole.removeprefix("<bos>").replace("\ufffd", "?"), add_bos=True)
    counted = http.post(
        "responses/input_tokens",
        json={"input": "Who am I?", "previous_response_id": previous, "instructions": instructions},
    ).json()
    assert counted["input_tokens"] == len(whole_ids)


@pytest.mark.parametrize("stop", STOPPED)
def test_a_completion_earlier_on_the_path_stays_when_instructions_change(server, http, stop):
    text = RAW + STOPPED[stop]
    first = answer(http, complete(http, **({"stop": stop} if stop else {})), instructions="Be kind.")
    reply = REPLIED + "<|end|>"
    assert context_of(server, first) == text + KIND + ASKED
    same = answer(http, first["id"], instructions="Be kind.")
    assert context_of(server, same).startswith(text + KIND + ASKED)
    other = answer(http, same["id"], instructions="Be terse.")
    assert context_of(server, other) == text + TERSE + (ASKED + reply) * 2 + ASKED
    none = answer(http, other["id"])
    assert context_of(server, none) == text + (ASKED + reply) * 3 + ASKED


def test_a_completion_after_a_response_keeps_both(server, http):
    first = http.post("responses", json={"input": "hi", "instructions": "Be kind."}).json()
    middle = complete(http, previous_response_id=first["id"], stop="name")
    last = answer(http, middle, instructions="Be terse.")
    raw = f"<bos>{KIND}<|user|>hi<|end|><|assistant|>I see. Your name is é😀 Ada\ufffd<eos>"
    raw += RAW.removeprefix("<bos>") + "I see. Your name"
    assert context_of(server, last) == raw + TERSE + ASKED


def test_ids_of_one_api_are_not_taken_by_another(server, http):
    """A stored turn has the id that its API gave it, and its response's id."""
    chat = http.post("chat/completions", json={**MESSAGES, "store": True}).json()["id"]
    completion = http.post("completions", json={**PROMPT, "store": True}).json()["id"]
    response = http.post("responses", json={"input": "hi"}).json()["id"]
    turn_ids = [made.split("-")[-1].removeprefix("resp_") for made in (chat, completion, response)]
    accepted = {completion, *(f"resp_{turn_id}" for turn_id in turn_ids)}
    for _ in range(2):
        for turn_id in turn_ids:
            for prefix in ("", "resp_", "cmpl-", "chatcmpl-", "resp_cmpl-", "msg_", "conv_"):
                named = prefix + turn_id
                again = http.post("completions", json={"prompt": "x", "previous_response_id": named})
                assert again.status_code == (200 if named in accepted else 404), named
                after = http.post("responses", json={"input": "x", "previous_response_id": named})
                assert after.status_code == (200 if prefix == "resp_" else 404), named
                assert http.get(f"responses/{named}").status_code == after.status_code
                if after.status_code == 404:
                    assert after.json()["error"]["param"] == "previous_response_id"
        server.on_loop(lambda: [forget(server, turn_id) for turn_id in turn_ids])


def forget(server: LiveServer, turn_id: str) -> None:
    """Forget a turn in the front end's memory; the history still has it."""
    server.harness.services.resolver.index.forget("", turn_id)


def test_a_stored_completion_after_one_in_memory_names_the_field_to_change(server, http):
    """The engine calls the field `durable`."""
    first = http.post("completions", json=PROMPT).json()["id"]
    limit = "False after the turn x, which is kept in memory only"
    server.on_loop(lambda: server.engine.refuse.append(InvalidRequestError("durable", True, limit)))
    body = {"prompt": "x", "store": True, "previous_response_id": first}
    refused = http.post("completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
    assert "durable" not in refused.json()["error"]["message"]


def test_events_of_a_completion_of_a_model_without_a_tokenizer(server, http, monkeypatch):
    monkeypatch.setattr(server.harness.services, "tokenizer", None)
    made = http.post("completions", json={"prompt": [104, 105], "store": True, "max_tokens": 3}).json()
    events = events_of(http.get(f"{as_response(made)}?stream=true"))
    assert events[-1]["type"] == "response.incomplete"
    assert text_of(events) == made["choices"][0]["text"]


def test_a_reply_that_is_referred_to_does_not_bring_its_log_probabilities(http):
    made = http.post("responses", json={"input": "hi", **LOGPROBS}).json()
    (reply,) = made["output"]
    assert reply["content"][0]["logprobs"]
    items = [{"type": "item_reference", "id": reply["id"]}, {"role": "user", "content": "so"}]
    after = http.post("responses", json={"input": items}).json()
    first, _ = http.get(f"{as_response(after)}/input_items?order=asc").json()["data"]
    assert first["content"] == [{**reply["content"][0], "logprobs": []}]
