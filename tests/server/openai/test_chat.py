"""Chat Completions: whole and streamed, several choices, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest

from pensieve_jax.core.errors import EngineDiedError, LogitsError, StepFailedError
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import MODEL, FakeEngine, Harness, say

HELLO = [{"role": "user", "content": "Hello"}]


def chat(messages=HELLO, **fields):
    return {"model": MODEL, "messages": messages, **fields}


async def post(harness: Harness, body, path="/v1/chat/completions"):
    status, headers, raw = await harness.open("POST", path, body).whole()
    return status, headers, raw


def ask(harness: Harness, body):
    status, _, raw = asyncio.run(post(harness, body))
    return status, json.loads(raw)


def events_of(raw: bytes) -> list:
    parts = raw.decode().split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_of(events, index=0):
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_reply_and_its_usage():
    harness = Harness(ROUTES, FakeEngine(say("hello there", reused_gpu_tokens=5, swapped_in_tokens=2)))
    status, body = ask(harness, chat())
    turn = harness.engine.turns[0]
    num_prompt = len(turn.spec.prompt_token_ids)
    assert status == 200 and body["object"] == "chat.completion"
    assert body["id"] == f"chatcmpl-{turn.turn_id}" and body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = body["usage"]
    assert usage["prompt_tokens"] == num_prompt + 7 and usage["completion_tokens"] == 12
    assert usage["total_tokens"] == num_prompt + 19
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
    assert usage["pensieve"]["gpu_tokens"] == 5 and usage["pensieve"]["new_tokens"] == num_prompt
    params = turn.spec.params
    assert params.temperature == 1.0 and params.max_tokens == 4096 - num_prompt
    assert not turn.spec.node.durable and turn.spec.node.parent_id is None


def test_a_client_that_resends_everything_continues_its_turn():
    harness = Harness(ROUTES)
    ask(harness, chat())
    messages = [*HELLO, {"role": "assistant", "content": "hello there"}, {"role": "user", "content": "More"}]
    ask(harness, chat(messages))
    first, second = harness.engine.turns
    assert second.spec.node.parent_id == first.turn_id
    assert second.spec.messages == ({"role": "user", "content": "More"},)
    messages[1]["content"] = "something else"
    ask(harness, chat(messages))
    assert harness.engine.turns[2].spec.node.parent_id is None
    metrics = harness.services.metrics.render().decode()
    assert 'pensieve:context_match_total{kind="message",model_name="fake"} 1.0' in metrics
    assert 'pensieve:context_match_total{kind="none",model_name="fake"} 2.0' in metrics


def test_a_stream_equals_the_whole_answer():
    body = chat(stream=True, stream_options={"include_usage": True})
    status, headers, raw = asyncio.run(post(Harness(ROUTES), body))
    events = events_of(raw)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "hello there"
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["stop"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in events[:-1])
    _, _, raw = asyncio.run(post(Harness(ROUTES), chat(stream=True)))
    assert all("usage" not in event for event in events_of(raw))


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_siblings_with_different_seeds(stream):
    scripts = iter([say("one"), say("two"), say("three")])
    harness = Harness(ROUTES, FakeEngine(lambda turn: next(scripts)(turn)))
    body = chat(n=3, seed=5, stream=stream, stream_options={"include_usage": True})
    _, _, raw = asyncio.run(post(harness, body))
    turns = harness.engine.turns
    assert [turn.spec.params.seed for turn in turns] == [5, 6, 7]
    assert len({turn.turn_id for turn in turns}) == 3
    if stream:
        events = events_of(raw)
        texts = [text_of(events, index) for index in range(3)]
        ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]
        usage = events[-1]["usage"]
    else:
        texts = [choice["message"]["content"] for choice in json.loads(raw)["choices"]]
        usage = json.loads(raw)["usage"]
    assert texts == ["one", "two", "three"]
    num_prompt = len(turns[0].spec.prompt_token_ids)
    assert usage["prompt_tokens"] == num_prompt and usage["completion_tokens"] == 3 + 3 + 5 + 3
    assert usage["pensieve"]["prefilled_tokens"] == 3 * num_prompt


def test_logprobs_are_the_same_whole_and_streamed():
    body = chat(logprobs=True, top_logprobs=2)
    _, whole = ask(Harness(ROUTES), body)
    _, _, raw = asyncio.run(post(Harness(ROUTES), body | {"stream": True}))
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [*"hello there", "<eos>"]
    assert entries[0]["bytes"] == [104] and len(entries[0]["top_logprobs"]) == 2
    assert entries[0]["top_logprobs"][0] == {"token": "h", "logprob": -0.5, "bytes": [104]}
    chunks = [e["choices"][0]["logprobs"] for e in events_of(raw)]
    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == entries
    _, whole = ask(Harness(ROUTES), chat(logprobs=True))
    assert whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_sampling_parameters_reach_the_engine():
    harness = Harness(ROUTES, defaults={"temperature": 0.25, "top_p": 0.5})
    ask(harness, chat(temperature=0, top_k=4, stop="x", max_completion_tokens=3, max_tokens=9, seed=-1))
    params = harness.engine.turns[0].spec.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 0.5, 4, 3)
    assert params.stop == ("x",) and params.seed == 2**63 - 1
    _, body = ask(harness, chat(max_tokens=2))
    assert body["choices"][0]["finish_reason"] == "length"


def test_content_may_be_text_parts():
    harness = Harness(ROUTES)
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    ask(harness, chat([{"role": "user", "content": parts}]))
    assert harness.engine.turns[0].spec.messages == ({"role": "user", "content": "Hello"},)


@pytest.mark.parametrize("store", [None, False, True])
@pytest.mark.parametrize("history", ["memory", "durable"])
def test_a_turn_is_stored_if_the_request_or_the_server_says_so(store, history):
    harness = Harness(ROUTES, settings=ServerSettings(chat_history=history))
    ask(harness, chat(store=store))
    assert harness.engine.turns[0].spec.node.durable is (history == "durable" if store is None else store)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "tool_calls": None, "refusal": None}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "Yes.", "refusal": None, "reasoning_content": ""}, "Yes."),
    ],
)
def test_an_assistants_message_may_have_no_content(message, text):
    harness = Harness(ROUTES)
    user = {"role": "user", "content": "a"}
    status, _ = ask(harness, chat([user, {"role": "assistant", **message}, user]))
    assert status == 200
    assert harness.engine.turns[0].spec.messages[1] == {"role": "assistant", "content": text}


def test_names_of_speakers_are_given_to_the_template():
    message = {"role": "user", "content": "a", "name": "ada"}
    harness = Harness(ROUTES)
    status, headers, _ = asyncio.run(post(harness, chat([message])))
    assert status == 200 and "x-ignored-fields" not in headers
    assert harness.engine.turns[0].spec.messages == (message,)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PART = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": None}, 400, "invalid_value", "messages"),
        ({"messages": [{"content": "a"}]}, 400, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "bad", "content": "a"}]}, 400, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "invalid_value", "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [PART]}]},
            400,
            "unsupported_parameter",
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            400,
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "invalid_value",
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            400,
            "missing_required_parameter",
            "messages[0].tool_calls[0].id",
        ),
        ({"messages": [{"role": "user", "content": None}]}, 400, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
            400,
            "invalid_value",
            "messages[0].reasoning",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]},
            400,
            "unsupported_parameter",
            "messages[0].refusal",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
            400,
            "unsupported_parameter",
            "messages[0].prefix",
        ),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            400,
            "unsupported_parameter",
            "stream_options.continuous_usage_stats",
        ),
        ({"messages": [{"role": "user", "content": "a" * 4096}]}, 400, "context_length_exceeded", "messages"),
        ({"n": 9}, 400, "invalid_value", "n"),
        ({"n": 0}, 400, "invalid_value", "n"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"top_p": -0.5}, 400, "invalid_value", "top_p"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 2**31}, 400, "invalid_value", "max_tokens"),
        ({"seed": 1.5}, 400, "invalid_value", "seed"),
        ({"seed": 2**63}, 400, "invalid_value", "seed"),
        ({"seed": -(2**63) - 1}, 400, "invalid_value", "seed"),
        ({"stop": [""]}, 400, "invalid_value", "stop"),
        ({"stop": 3}, 400, "invalid_value", "stop"),
        ({"stop": "x" * 1025}, 400, "invalid_value", "stop"),
        ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
        ({"stop_token_ids": [1] * 1025}, 400, "invalid_value", "stop_token_ids"),
        ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
        ({"stop_token_ids": [999]}, 400, "invalid_value", "stop_token_ids[0]"),
        ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, 400, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, 400, "unsupported_parameter", "tools[0].type"),
        ({"tools": TOOLS}, 400, "unsupported_parameter", "tools"),
        ({"tools": "all"}, 400, "invalid_value", "tools"),
        ({"frequency_penalty": 2.5}, 400, "invalid_value", "frequency_penalty"),
        ({"presence_penalty": "1"}, 400, "invalid_value", "presence_penalty"),
        ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
        ({"min_p": 1.5}, 400, "invalid_value", "min_p"),
        ({"logit_bias": {"x": 2}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1": 2, "01": 3}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1": 101}}, 400, "invalid_value", "logit_bias[1]"),
        ({"logit_bias": {"999": 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, 400, "invalid_value", "logit_bias"),
        ({"allowed_token_ids": []}, 400, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [5, 999]}, 400, "invalid_value", "allowed_token_ids[1]"),
        ({"bad_words": [""]}, 400, "invalid_value", "bad_words"),
        ({"bad_words": ["x"] * 65}, 400, "invalid_value", "bad_words"),
        ({"service_tier": "flex"}, 400, "unsupported_parameter", "service_tier"),
        ({"stream_options": {"include_usage": 1}}, 400, "invalid_value", "stream_options.include_usage"),
        ({"previous_response_id": "resp_x"}, 400, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_x"}, 400, "unsupported_parameter", "conversation"),
        ({"max_output_tokens": 5}, 400, "unsupported_parameter", "max_output_tokens"),
        ({"instructions": "Be kind."}, 400, "unsupported_parameter", "instructions"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_requests_are_refused_with_their_field_before_anything_runs(
    fields, status, code, param, stream
):
    harness = Harness(ROUTES)
    answered, body = ask(harness, chat(stream=stream) | fields)
    assert (answered, body["error"]["code"], body["error"]["param"]) == (status, code, param)
    assert harness.services.limits.num_in_engine == 0
    assert harness.services.limits.in_flight("") == 0


def test_fields_without_effect_are_accepted():
    neutral = {
        "tools": None,
        "frequency_penalty": 0,
        "logit_bias": None,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "user": "u",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "n": None,
        "made_up": 1,
    }
    status, headers, _ = asyncio.run(post(Harness(ROUTES), chat(**neutral)))
    assert status == 200 and headers["x-ignored-fields"] == "made_up"


def test_a_refused_tool_names_the_flag_that_accepts_it():
    status, body = ask(Harness(ROUTES), chat(tools=TOOLS))
    assert status == 400 and "--tools=ignore" in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "listed"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto", "made_up": 1}, "tools,made_up"),
        ({"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": True}, "tools"),
        ({"functions": [{"name": "weather"}], "function_call": "auto"}, "functions"),
        ({"tools": []}, None),
        ({"tools": None}, None),
    ],
)
def test_tools_may_be_ignored(fields, listed):
    harness = Harness(ROUTES, settings=ServerSettings(tools="ignore"))
    status, headers, _ = asyncio.run(post(harness, chat(**fields)))
    assert status == 200 and headers.get("x-ignored-fields") == listed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            "tool_choice",
        ),
        ({"functions": [{"name": "f"}], "function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_a_required_call_is_refused_even_if_tools_are_ignored(fields, param):
    harness = Harness(ROUTES, settings=ServerSettings(tools="ignore"))
    status, body = ask(harness, chat(**fields))
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StepFailedError("x"), "step_failed"),
        (EngineDiedError("x"), "step_failed"),
        (LogitsError(1), "logits_not_finite"),
    ],
)
def test_a_failed_turn_is_an_error_in_the_answer_or_the_stream(error, code):
    def script(turn):
        turn.feed("hel")
        turn.fail(error)

    status, body = ask(Harness(ROUTES, FakeEngine(script)), chat())
    assert (status, body["error"]["code"]) == (500, code)
    harness = Harness(ROUTES, FakeEngine(script))
    status, _, raw = asyncio.run(post(harness, chat(stream=True)))
    events = events_of(raw)
    assert status == 200 and events[-1]["error"]["code"] == code
    assert harness.services.limits.num_in_engine == 0


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_turns(stream, num_choices):
    async def scenario():
        harness = Harness(ROUTES, FakeEngine(lambda turn: turn.feed("hel")))
        client = harness.open("POST", "/v1/chat/completions", chat(stream=stream, n=num_choices))
        if stream:
            while b"hel" not in (await client.next()).get("body", b""):
                pass
        else:
            await harness.engine.submitted.wait()
        client.leave()
        await client.task
        assert all(turn.cancelled for turn in harness.engine.turns)
        assert len(harness.engine.turns) == num_choices
        assert harness.services.limits.num_in_engine == 0

    asyncio.run(scenario())


def test_a_slow_client_gets_merged_deltas():
    async def scenario():
        harness = Harness(ROUTES, FakeEngine(lambda turn: turn.feed("a")))
        client = harness.open("POST", "/v1/chat/completions", chat(stream=True))
        while b'"a"' not in (await client.next()).get("body", b""):
            pass
        client.takes.clear()
        turn = harness.engine.turns[0]
        turn.feed("b")
        for _ in range(10):
            await asyncio.sleep(0)
        for letter in "cdef":
            turn.feed(letter)
            await asyncio.sleep(0)
        turn.finish()
        client.takes.set()
        await client.task
        chunks = []
        while not client._outgoing.empty():
            chunks.append(client._outgoing.get_nowait().get("body", b""))
        contents = [json.loads(chunk[6:])["choices"][0]["delta"].get("content") for chunk in chunks[:-2]]
        assert contents == ["b", "cdef", None]

    asyncio.run(scenario())


def test_the_error_of_a_turn_that_the_server_ends_can_be_retried():
    def script(turn):
        turn.feed("hel")
        turn.finish("cancelled")

    status, body = ask(Harness(ROUTES, FakeEngine(script)), chat())
    assert (status, body["error"]["code"]) == (503, "overloaded")


def test_a_client_that_leaves_while_it_waits_for_admission_leaves_the_queue():
    async def scenario():
        harness = Harness(ROUTES, FakeEngine(lambda turn: None, max_num_running=1))
        limits = harness.services.limits
        clients = [harness.open("POST", "/v1/chat/completions", chat()) for _ in range(10)]
        while limits.num_waiting < 1:
            await asyncio.sleep(0)
        assert limits.num_in_engine == 9
        clients[-1].leave()
        await clients[-1].task
        assert limits.num_waiting == 0 and len(harness.engine.turns) == 9
        for client in clients[:-1]:
            client.leave()
            await client.task
        assert limits.in_flight("") == 0

    asyncio.run(scenario())
