"""Anthropic's Messages: whole and streamed, contexts sent again, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random

import pytest

from pensieve_jax.core.errors import EngineClosedError, StepFailedError
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from tests.seeds import new_seed
from tests.server.anthropic.streams import blocks_of, events_of
from tests.server.fakes import MODEL, FakeEngine, Harness, sampled, say

HELLO = [{"role": "user", "content": "Hello"}]
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


def body_of(messages=HELLO, **fields):
    return {"model": MODEL, "max_tokens": 64, "messages": messages, **fields}


async def post(harness: Harness, body, path=PATH, headers=None):
    return await harness.open("POST", path, body, headers).whole()


def ask(harness: Harness, body, path=PATH, headers=None):
    status, _, raw = asyncio.run(post(harness, body, path, headers))
    return status, json.loads(raw)


def streamed(harness: Harness, body):
    """Return the message that the events of a stream add up to, as the anthropic client adds them."""
    status, headers, raw = asyncio.run(post(harness, body | {"stream": True}))
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    first, *middle, delta, last = events_of(raw)
    assert (first["type"], delta["type"], last) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    usage = message["usage"] | delta["usage"]
    return message | delta["delta"] | {"content": blocks_of(middle), "usage": usage}


def test_a_message_and_its_usage():
    harness = Harness(ROUTES, FakeEngine(say("hello there", reused_gpu_tokens=5, swapped_in_tokens=2)))
    status, body = ask(harness, body_of())
    turn = harness.engine.turns[0]
    num_prompt = len(turn.spec.prompt_token_ids)
    assert status == 200
    usage = body.pop("usage")
    assert body == {
        "id": f"msg_{turn.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["input_tokens"] == num_prompt and usage["cache_read_input_tokens"] == 7
    assert usage["cache_creation_input_tokens"] == 0 and usage["output_tokens"] == 12
    assert usage["pensieve"]["gpu_tokens"] == 5 and usage["pensieve"]["new_tokens"] == num_prompt
    params = turn.spec.params
    assert params.temperature == 1.0 and params.max_tokens == 64
    assert not turn.spec.node.durable and turn.spec.node.parent_id is None


@pytest.mark.parametrize("text", ["hello there", "", "é中\n"])
def test_a_stream_adds_up_to_the_whole_message(text):
    _, whole = ask(Harness(ROUTES, FakeEngine(say(text, reused_gpu_tokens=5))), body_of())
    message = streamed(Harness(ROUTES, FakeEngine(say(text, reused_gpu_tokens=5))), body_of())
    assert {**message, "id": ""} == {**whole, "id": ""}
    assert message["content"] == ([{"type": "text", "text": text}] if text else [])


def test_the_first_event_has_the_tokens_that_are_expected_in_the_cache():
    harness = Harness(ROUTES)
    ask(harness, body_of())
    reply = {"role": "assistant", "content": "hello there"}
    _, _, raw = asyncio.run(post(harness, body_of([*HELLO, reply, *HELLO], stream=True)))
    spec = harness.engine.turns[1].spec
    usage = events_of(raw)[0]["message"]["usage"]
    assert usage["cache_read_input_tokens"] == spec.keep > 0
    assert usage["input_tokens"] == len(spec.prompt_token_ids)


def test_a_client_that_resends_everything_continues_its_turn():
    harness = Harness(ROUTES)
    _, first = ask(harness, body_of(system="Be brief."))
    history = [*HELLO, {"role": first["role"], "content": first["content"]}]
    ask(harness, body_of([*history, {"role": "user", "content": "More"}], system="Be brief."))
    one, two = harness.engine.turns
    assert one.spec.messages[0] == {"role": "system", "content": "Be brief."}
    assert two.spec.node.parent_id == one.turn_id
    assert two.spec.messages == ({"role": "user", "content": "More"},)
    ask(harness, body_of([*history, {"role": "user", "content": "More"}], system="Be verbose."))
    assert harness.engine.turns[2].spec.node.parent_id is None
    metrics = harness.services.metrics.render().decode()
    assert 'pensieve:context_match_total{kind="message",model_name="fake"} 1.0' in metrics


@pytest.mark.parametrize("number", range(8))
def test_a_conversation_in_any_form_has_the_tokens_of_the_chat_route(number):
    """Blocks or text, streamed or not, resent or answered by the chat route in between."""
    rng = random.Random(new_seed() + number)
    harness = Harness(ROUTES, FakeEngine(lambda turn: say(rng.choice(["yes", "no, thanks", "é " * 9]))(turn)))
    system = rng.choice([None, "Be brief."])
    history: list[dict[str, str]] = []
    for number in range(6):
        history.append({"role": "user", "content": f"question {number} " * rng.randrange(1, 4)})
        if rng.random() < 0.3:
            head = [] if system is None else [{"role": "system", "content": system}]
            sent = {"model": MODEL, "messages": [*head, *history], "max_tokens": 64}
            _, reply = ask(harness, sent, "/v1/chat/completions")
            text = reply["choices"][0]["message"]["content"]
        else:
            sent = body_of([as_blocks(rng, message) for message in history])
            if system is not None:
                sent["system"] = rng.choice([system, [{"type": "text", "text": system}]])
            num_tokens = ask(harness, {key: sent[key] for key in sent if key != "max_tokens"}, COUNT)[1]
            message = streamed(harness, sent) if rng.random() < 0.5 else ask(harness, sent)[1]
            text = message["content"][0]["text"]
            usage = message["usage"]
            spec = harness.engine.turns[-1].spec
            assert num_tokens == {"input_tokens": spec.keep + len(spec.prompt_token_ids)}
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] >= len(spec.prompt_token_ids)
        history.append({"role": "assistant", "content": text})
        turns = harness.engine.turns
        parent = turns[-2].turn_id if number else None
        assert turns[-1].spec.node.parent_id == parent
    head = [] if system is None else [{"role": "system", "content": system}]
    other = Harness(ROUTES)
    ask(other, {"model": MODEL, "messages": [*head, *history[:-1]]}, "/v1/chat/completions")
    path: list[int] = []
    for turn in harness.engine.turns:
        path[turn.spec.keep :] = turn.spec.prompt_token_ids
        prompt = list(path)
        path += turn.output.token_ids
    assert other.services.tokenizer.decode_raw(prompt) == other.services.tokenizer.decode_raw(
        other.engine.turns[0].spec.prompt_token_ids
    )


def as_blocks(rng, message):
    """Return a message with its text in one or more blocks."""
    text = message["content"]
    if rng.random() < 0.4:
        return message
    if message["role"] == "assistant":
        cut = rng.randrange(len(text) + 1)
        parts = [text[:cut], text[cut:]]
    else:
        parts = [text]
    blocks = [{"type": "text", "text": part} for part in parts]
    blocks[-1]["cache_control"] = {"type": "ephemeral"}
    return {"role": message["role"], "content": blocks}


def test_texts_of_a_user_are_lines_and_consecutive_messages_are_one():
    harness = Harness(ROUTES)
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    sent = [{"role": "user", "content": blocks}, {"role": "user", "content": "three"}]
    ask(harness, body_of(sent, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert harness.engine.turns[0].spec.messages == (
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "one\ntwo\nthree"},
    )


def test_a_system_message_keeps_its_place():
    harness = Harness(ROUTES)
    sent = [*HELLO, {"role": "system", "content": "Now in French."}, *HELLO]
    ask(harness, body_of(sent, system=""))
    assert [message["role"] for message in harness.engine.turns[0].spec.messages] == [
        "user",
        "system",
        "user",
    ]


CLAUDE_CODE = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;"},
        {"type": "text", "text": "You are a helper.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "metadata": {"user_id": "user_" + "0" * 600},
    "max_tokens": 32000,
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
    "tools": [],
}


def test_what_claude_code_sends_is_accepted_and_its_state_is_found():
    """Its line for billing differs in every request; its limit of a reply exceeds the context."""
    harness = Harness(ROUTES)
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,unknown-2030-01-01",
    }
    status, out, raw = asyncio.run(post(harness, body_of(**CLAUDE_CODE), f"{PATH}?beta=true", headers))
    assert status == 200
    assert out["x-ignored-fields"] == (
        "thinking.budget_tokens,system.x-anthropic-billing-header,output_config.effort"
    )
    history = [*HELLO, {"role": "assistant", "content": json.loads(raw)["content"]}, *HELLO]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=00001;"},
        *CLAUDE_CODE["system"][1:],
    ]
    status, _ = ask(harness, body_of(history, **CLAUDE_CODE | {"system": system}), f"{PATH}?beta=true")
    first, second = harness.engine.turns
    assert status == 200 and second.spec.node.parent_id == first.turn_id
    assert first.spec.messages[0]["content"] == "You are a helper.\nAnswer briefly."
    assert first.spec.params.max_tokens == 32000


def test_a_line_for_billing_before_a_system_text_is_left_out():
    harness = Harness(ROUTES)
    ask(harness, body_of(system="x-anthropic-billing-header: cch=1;\nBe brief."))
    ask(harness, body_of(system="x-anthropic-billing-header: cch=2;"))
    assert harness.engine.turns[0].spec.messages[0] == {"role": "system", "content": "Be brief."}
    assert harness.engine.turns[1].spec.messages == tuple(HELLO)


def test_sampling_parameters_reach_the_engine():
    harness = Harness(ROUTES, defaults={"temperature": 0.25, "top_p": 0.5})
    ask(harness, body_of(temperature=0, top_k=4, stop_sequences=["x", "yy"], seed=-1, max_tokens=3))
    params = harness.engine.turns[0].spec.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 0.5, 4, 3)
    assert params.stop == ("x", "yy") and params.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "token_ids", "ending"),
    [
        ({}, [*b"ab", 257], ("ab", "end_turn", None)),
        ({"max_tokens": 2}, [*b"abc", 257], ("ab", "max_tokens", None)),
        ({"stop_sequences": ["z", "bc"]}, [*b"abcd", 257], ("a", "stop_sequence", "bc")),
        ({"stop_sequences": ["z", "<|user|>"]}, [*b"ab", 258, 257], ("ab", "stop_sequence", "<|user|>")),
        ({"stop_sequences": ["z"], "max_tokens": 1}, [*b"ab", 257], ("a", "max_tokens", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_why_it_ended(fields, token_ids, ending, stream):
    harness = Harness(ROUTES, FakeEngine(sampled(token_ids)))
    body = body_of(**fields)
    message = streamed(harness, body) if stream else ask(harness, body)[1]
    text = "".join(block["text"] for block in message["content"])
    assert (text, message["stop_reason"], message["stop_sequence"]) == ending


def test_a_reply_that_the_context_ends_says_so():
    def script(turn):
        turn.feed("ab")
        turn.finish("length")

    _, body = ask(Harness(ROUTES, FakeEngine(script)), body_of())
    assert body["stop_reason"] == "model_context_window_exceeded"


def test_a_turn_is_stored_if_the_server_says_so():
    harness = Harness(ROUTES, settings=ServerSettings(chat_history="durable"))
    ask(harness, body_of())
    node = harness.engine.turns[0].spec.node
    assert node.durable and node.attachment.response_id == f"resp_{node.turn_id}"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "code", "param"),
    [
        ({"model": "other"}, 404, "not_found_error", "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_request_error", "invalid_value", "messages"),
        ({"messages": None}, 400, "invalid_request_error", "invalid_value", "messages"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "invalid_value", "max_tokens"),
        ({"temperature": -1}, 400, "invalid_request_error", "invalid_value", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "invalid_value", "stop_sequences"),
        ({"system": [IMAGE]}, 400, "invalid_request_error", "unsupported_parameter", "system[0].type"),
        ({"stop": ["x"]}, 400, "invalid_request_error", "unsupported_parameter", "stop"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "unsupported_parameter", "mcp_servers"),
        ({"min_tokens": 3}, 400, "invalid_request_error", "unsupported_parameter", "min_tokens"),
        (
            {"thread": {"type": "create"}},
            400,
            "invalid_request_error",
            "thread_unsupported_request",
            "thread",
        ),
        ({"speed": "fast"}, 400, "invalid_request_error", "unsupported_parameter", "speed"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            400,
            "invalid_request_error",
            "unsupported_parameter",
            "context_management.edits[0].type",
        ),
        ({"thinking": {"type": "deep"}}, 400, "invalid_request_error", "invalid_value", "thinking.type"),
    ],
)
def test_refusals_name_the_field(fields, status, kind, code, param):
    found, body = ask(Harness(ROUTES), body_of() | fields)
    assert found == status and body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["error"]["details"] == {"error_code": code, "param": param}
    assert param in body["error"]["message"]


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"content": "a"}, "missing_required_parameter", "messages[1].role"),
        ({"role": "user"}, "missing_required_parameter", "messages[1].content"),
        ({"role": "tool", "content": "a"}, "invalid_value", "messages[1].role"),
        ({"role": "user", "content": []}, "invalid_value", "messages[1].content"),
        ({"role": "user", "content": [{"text": "a"}]}, "invalid_value", "messages[1].content[0]"),
        ({"role": "user", "content": ["a"]}, "invalid_value", "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "missing_required_parameter",
            "messages[1].content[0].text",
        ),
        ({"role": "user", "content": [IMAGE]}, "unsupported_parameter", "messages[1].content[0].type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "document"}]},
            "unsupported_parameter",
            "messages[1].content[1].type",
        ),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_refusals_name_the_block(message, code, param, path):
    sent = body_of([*HELLO, message], system="Be brief.")
    status, body = ask(Harness(ROUTES), sent, path)
    assert status == 400 and body["error"]["details"] == {"error_code": code, "param": param}


def test_other_versions_are_refused():
    status, body = ask(Harness(ROUTES), body_of(), headers={"anthropic-version": "2023-01-01"})
    assert status == 400 and body["error"]["details"]["param"] == "anthropic-version"
    for version in ("2023-06-01", "2026-10-21"):
        status, _ = ask(Harness(ROUTES), body_of(temperature=0.5), headers={"anthropic-version": version})
        assert status == 200


def test_missing_fields_are_named():
    status, body = ask(Harness(ROUTES), {"messages": HELLO})
    assert status == 400 and body["error"]["details"]["param"] == "max_tokens"


def test_tools_are_ignored_if_the_server_says_so():
    harness = Harness(ROUTES, settings=ServerSettings(tools="ignore"))
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    status, headers, _ = asyncio.run(post(harness, body_of(tools=tools, tool_choice={"type": "auto"})))
    assert status == 200 and headers["x-ignored-fields"] == "tools"
    assert not harness.engine.turns[0].spec.template_input.tools


def test_a_full_context_is_refused_in_the_words_that_clients_search_for():
    harness = Harness(ROUTES)
    sent = body_of([{"role": "user", "content": "a" * 5000}])
    status, body = ask(harness, sent)
    assert status == 400 and body["error"]["details"]["error_code"] == "context_length_exceeded"
    assert body["error"]["message"].startswith("prompt is too long: ")
    status, body = ask(harness, sent, COUNT)
    assert status == 200 and body["input_tokens"] > 5000


@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [("starting", 529, "overloaded_error"), ("draining", 529, "overloaded_error")],
)
def test_a_server_that_accepts_no_turns_is_overloaded(state, status, kind):
    harness = Harness(ROUTES)
    harness.engine.state = state
    found, headers, raw = asyncio.run(post(harness, body_of()))
    body = json.loads(raw)
    assert (found, body["error"]["type"]) == (status, kind) and headers["retry-after"]
    assert body["request_id"] == headers["request-id"]


def test_a_key_that_uses_its_share_is_limited(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"ann:{hashlib.sha256(b'key').hexdigest()}\n")
    settings = ServerSettings(api_keys_file=str(path), max_in_flight_per_key=1)

    async def scenario():
        harness = Harness(ROUTES, FakeEngine(lambda turn: None), settings=settings)
        first = harness.open("POST", PATH, body_of(), {"x-api-key": "key"})
        await harness.engine.submitted.wait()
        answer = await post(harness, body_of(), headers={"x-api-key": "key"})
        first.leave()
        await first.task
        return answer

    status, headers, raw = asyncio.run(scenario())
    assert (status, json.loads(raw)["error"]["type"]) == (429, "rate_limit_error") and headers["retry-after"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (StepFailedError("A step failed."), 500, "api_error"),
        (EngineClosedError("The engine is closed."), 529, "overloaded_error"),
    ],
)
def test_a_turn_that_fails(error, status, kind):
    def script(turn):
        turn.feed("hel")
        turn.fail(error)

    found, body = ask(Harness(ROUTES, FakeEngine(script)), body_of())
    assert (found, body["error"]["type"]) == (status, kind)
    _, headers, raw = asyncio.run(post(Harness(ROUTES, FakeEngine(script)), body_of(stream=True)))
    *events, last = events_of(raw)
    assert last["type"] == "error" and last["error"]["type"] == kind
    assert last["request_id"] == headers["request-id"]
    assert [event["type"] for event in events][:1] == ["message_start"]


def test_errors_of_requests_that_reach_no_handler(tmp_path):
    async def send(harness, method):
        return await harness.open(method, PATH, body_of()).whole()

    path = tmp_path / "keys"
    path.write_text(f"ann:{'0' * 64}\n")
    harness = Harness(ROUTES, keys=ApiKeys(path))
    for method, status, kind in [
        ("POST", 401, "authentication_error"),
        ("GET", 405, "invalid_request_error"),
    ]:
        found, headers, raw = asyncio.run(send(harness, method))
        body = json.loads(raw)
        assert (found, body["error"]["type"]) == (status, kind)
        assert body["request_id"] == headers["request-id"] == headers["x-request-id"]


def test_a_client_that_leaves_ends_its_turn():
    async def scenario(stream):
        harness = Harness(ROUTES, FakeEngine(lambda turn: turn.feed("hel")))
        client = harness.open("POST", PATH, body_of(stream=stream))
        await harness.engine.submitted.wait()
        if stream:
            assert (await client.next())["type"] == "http.response.start"
        client.leave()
        await client.task
        assert harness.engine.turns[0].cancelled and harness.services.limits.num_waiting == 0

    asyncio.run(scenario(False))
    asyncio.run(scenario(True))


def test_a_silent_stream_sends_pings():
    async def scenario():
        settings = ServerSettings(heartbeat_s=0.5)  # the first event comes before, however busy the machine
        harness = Harness(ROUTES, FakeEngine(lambda turn: None), settings=settings)
        client = harness.open("POST", PATH, body_of(stream=True))
        bodies = [(await client.next()).get("body", b"") for _ in range(4)]
        assert bodies[1].startswith(b"event: message_start\n")
        assert bodies[2:] == [b'event: ping\ndata: {"type":"ping"}\n\n'] * 2
        client.leave()
        await client.task

    asyncio.run(scenario())
