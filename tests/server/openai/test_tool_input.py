"""Tools, calls, results, reasoning, prefills and template arguments in requests, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.text import ChatFormat, Tokenizer, byte_tokenizer
from tests.server.fakes import FakeTurn, say
from tests.server.stored_server import StoredServer
from tests.text.tool_templates import (
    QWEN3,
    TOOLS,
    WITH_TOOLS,
    call,
    rendered,
    result,
    written,
)

TOKENIZER = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=QWEN3)
THOUGHT = "<think>\nlet me see\n</think>\n\n"
CALL = THOUGHT + written("look_up", '{"word": "cat"}')
FLAT = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


class ToolServer:
    """A server whose turns are answered by the texts in `replies`, in order."""

    def __init__(self, path: Path) -> None:
        self.replies: list[str] = []
        self.stored = StoredServer(path, self._answer, tokenizer=TOKENIZER)

    def _answer(self, turn: FakeTurn) -> None:
        turn.feed(self.replies.pop(0))
        turn.feed("", [TOKENIZER.eos_id])
        turn.finish()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async def send() -> tuple[int, Any]:
            async with self.stored.harness.client() as client:
                answer = await client.post(path, json=body)
                ignored = answer.headers.get("x-ignored-fields")
                assert ignored is None, ignored
                return answer.status_code, answer.json()

        return asyncio.run(send())

    def get(self, path: str) -> Any:
        async def send() -> Any:
            async with self.stored.harness.client() as client:
                return (await client.get(path)).json()

        return asyncio.run(send())

    def answered(self, path: str, reply: str, **body: Any) -> Any:
        self.replies.append(reply)
        status, answer = self.post(path, **body)
        assert status == 200, answer
        return answer

    def refused(self, path: str, **body: Any) -> tuple[int, str, str]:
        num_before = len(self.stored.engine.turns)
        status, answer = self.post(path, **body)
        assert len(self.stored.engine.turns) == num_before
        return status, answer["error"]["code"], answer["error"]["param"]

    @property
    def context(self) -> str:
        """The context of the last turn: what it keeps of its path, and its prompt."""
        ids: list[int] = []
        spec = self.stored.engine.turns[-1].spec
        assert spec.node is not None
        if spec.node.parent_id is not None:
            path = self.stored.engine.store.load_turn(spec.node.owner, spec.node.parent_id)
            ids = path.token_ids.tolist()[: spec.keep]
            self.num_replaced = len(path.token_ids) - len(ids)
        return TOKENIZER.decode_raw([*ids, *spec.prompt_token_ids])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ToolServer]:
    made = ToolServer(tmp_path / "history.sqlite")
    with closing(made.stored):
        yield made


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def test_a_chat_with_calls_goes_on_from_its_tokens(server: ToolServer) -> None:
    """Also if the client drops reasoning, names the call otherwise and writes its arguments anew."""
    messages = [{"role": "system", "content": "Be kind."}, user("what is a cat?")]
    server.answered(CHAT, CALL, messages=messages, tools=TOOLS, store=True)
    assert server.context == rendered(QWEN3, messages, TOOLS)
    for number in range(3):
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call(f"c{number}", "look_up", '{"word":"cat"}')],
            },
            result(f"c{number}", f"found {number}"),
            {"role": "system", "content": f"Step {number}."},
        ]
        server.answered(CHAT, CALL, messages=messages, tools=TOOLS, store=True)
        model_wrote = [
            {**one, "reasoning": "let me see"} if one["role"] == "assistant" else one for one in messages
        ]
        assert server.context == rendered(QWEN3, model_wrote, TOOLS)
        assert server.num_replaced == 1, "the end of sequence, which the template does not write"


def test_reasoning_of_a_client_is_rendered(server: ToolServer) -> None:
    for key in ("reasoning", "reasoning_content"):
        messages = [
            user(key),
            {"role": "assistant", "content": "", key: "hm", "tool_calls": [call("c", "add", "{}")]},
            result("c", "3"),
        ]
        server.answered(CHAT, "ok", messages=messages, tools=TOOLS, store=True)
        assert "<think>\nhm\n</think>\n\n<tool_call>" in server.context


def test_results_may_have_parts_and_calls_no_arguments(server: ToolServer) -> None:
    messages = [
        user("hi"),
        {"role": "assistant", "tool_calls": [{**call("c", "add", ""), "index": 0}]},
        {
            **result("c", ""),
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "add",
        },
    ]
    server.answered(CHAT, "ok", messages=messages, tools=TOOLS, store=True)
    assert '"arguments": {}}' in server.context and "<tool_response>\nab\n</tool_response>" in server.context


@pytest.mark.parametrize("stored", [True, False])
def test_a_prefill_and_the_text_after_it_are_one_reply(server: ToolServer, stored: bool) -> None:
    messages = [user("hi"), {"role": "assistant", "content": "Sure, "}]
    options: dict[str, Any] = {"store": stored, "continue_final_message": True}
    answer = server.answered(CHAT, "here.", messages=messages, add_generation_prompt=False, **options)
    assert answer["choices"][0]["message"]["content"] == "here."
    first = server.stored.engine.turns[-1].spec
    assert TOKENIZER.decode_raw(first.prompt_token_ids).endswith("</think>\n\nSure, ")
    messages = [user("hi"), {"role": "assistant", "content": "Sure, here."}, user("so")]
    server.answered(CHAT, "ok", messages=messages, store=stored)
    second = server.stored.engine.turns[-1].spec
    assert first.node is not None and second.node is not None
    assert second.node.parent_id == first.node.turn_id


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [user("hi")], "reasoning_effort": "high"}, "reasoning_effort"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        (f"{RESPONSES}/input_tokens", {"input": "hi", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
@pytest.mark.parametrize("has_effort", [False, True])
def test_an_effort_is_listed_unless_the_template_reads_it(
    tmp_path: Path, path: str, body: dict[str, Any], field: str, has_effort: bool
) -> None:
    template = QWEN3 + ("{{ reasoning_effort }}" if has_effort else "")
    tokenizer = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=template)

    async def send(server: StoredServer) -> httpx2.Response:
        async with server.harness.client() as client:
            return await client.post(path, json=body)

    with closing(StoredServer(tmp_path / "history.sqlite", say("ok"), tokenizer=tokenizer)) as server:
        answer = asyncio.run(send(server))
        assert answer.status_code == 200
        assert answer.headers.get("x-ignored-fields") == (None if has_effort else field)
        for turn in server.engine.turns:
            prompt = tokenizer.decode_raw(turn.spec.prompt_token_ids)
            assert prompt.endswith("high") == has_effort


def test_template_arguments_and_efforts(server: ToolServer) -> None:
    thought = "<think>\n\n</think>\n\n"
    for body in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
    ):
        server.answered(CHAT, "ok", messages=[user("hi")], store=True, **body)
        assert server.context.endswith(thought)
    server.answered(RESPONSES, "ok", input="hi", reasoning={"effort": "none", "summary": "auto"})
    assert server.context.endswith(thought)
    server.answered(RESPONSES, "ok", input="hi", reasoning={"summary": "auto"})
    assert not server.context.endswith(thought)
    server.answered(CHAT, "ok", messages=[user("hi")], store=True, add_generation_prompt=False)
    assert server.context.endswith("hi<|im_end|>\n")


BROKEN = {"role": "assistant", "content": None, "tool_calls": [call("c", "add", '{"x": ')]}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (
            {"messages": [user("a"), user("b"), user("c"), BROKEN]},
            "invalid_value",
            "messages[3].tool_calls[0].function.arguments",
        ),
        ({"messages": [user("a"), result("c", "x")]}, "invalid_value", "messages[1].tool_call_id"),
        (
            {"messages": [user("a"), {"role": "tool", "content": "x"}]},
            "invalid_value",
            "messages[1].tool_call_id",
        ),
        ({"messages": [{**BROKEN, "role": "user"}]}, "invalid_value", "messages[0].content"),
        (
            {"messages": [{**BROKEN, "role": "user", "content": "x"}]},
            "invalid_value",
            "messages[0].tool_calls",
        ),
        *(
            ({"tools": [{"type": kind}]}, "unsupported_parameter", "tools[0].type")
            for kind in ("web_search", "mcp", "custom", "computer_use", "image_generation", "anything")
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "invalid_value", "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "invalid_value",
            "tools[0].function.name",
        ),
        ({"chat_template_kwargs": {"thinking": True}}, "invalid_value", "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "invalid_value",
            "reasoning_effort",
        ),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "invalid_value",
            "add_generation_prompt",
        ),
    ],
)
def test_what_a_chat_cannot_have_is_named(server: ToolServer, body: dict, code: str, param: str) -> None:
    given = {"messages": [user("hi")], **body}
    assert server.refused(CHAT, **given) == (400, code, param)


def test_a_result_that_overflows_the_context_is_refused(server: ToolServer) -> None:
    """Nothing is dropped: neither the result nor what comes before it."""
    messages = [user("hi"), {"role": "assistant", "tool_calls": [call("c", "add", "{}")]}]
    long = result("c", "x" * 5000)
    refusal = server.refused(CHAT, messages=[*messages, long], tools=TOOLS)
    assert refusal == (400, "context_length_exceeded", "messages")
    first = server.answered(RESPONSES, CALL, input="hi", tools=FLAT)
    output = {"type": "function_call_output", "call_id": id_of(first), "output": "x" * 5000}
    refusal = server.refused(RESPONSES, input=[output], previous_response_id=first["id"], tools=FLAT)
    assert refusal == (400, "context_length_exceeded", "input")


def test_a_template_without_tools_takes_them_with_the_flag_only(tmp_path: Path) -> None:
    """The small chat model's template reads none."""
    for settings, expected in ((ServerSettings(), 400), (ServerSettings(tools="ignore"), 200)):
        path = tmp_path / f"{settings.tools}.sqlite"
        with closing(StoredServer(path, say("ok"), settings=settings)) as stored:

            async def send(stored: StoredServer = stored) -> Any:
                async with stored.harness.client() as client:
                    return await client.post(CHAT, json={"messages": [user("hi")], "tools": TOOLS})

            answer = asyncio.run(send())
            assert answer.status_code == expected
            if expected == 400:
                assert answer.json()["error"]["param"] == "tools"
                assert "--tools=ignore" in answer.json()["error"]["message"]


def id_of(response: dict[str, Any]) -> str:
    """Return the id of the only call in the reply of a response."""
    (found,) = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    return found


def output_of(response: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_of(response), "output": text}


def test_a_call_its_result_and_a_third_question_by_id(server: ToolServer) -> None:
    first = server.answered(RESPONSES, CALL, input="what is a cat?", tools=FLAT)
    assert first["tools"] == [{"description": None, **tool, "strict": True} for tool in FLAT]
    second = server.answered(
        RESPONSES,
        THOUGHT + "A pet.",
        input=[output_of(first, "an animal")],
        previous_response_id=first["id"],
        tools=FLAT,
    )
    assert "an animal" in server.context and server.num_replaced == 1
    server.answered(RESPONSES, "ok", input="and a dog?", previous_response_id=second["id"], tools=FLAT)
    expected = [
        user("what is a cat?"),
        {"role": "assistant", "content": None, "tool_calls": [call("c", "look_up", '{"word": "cat"}')]},
        result("c", "an animal"),
        {"role": "assistant", "content": "A pet."},
        user("and a dog?"),
    ]
    assert server.context == rendered(QWEN3, expected, TOOLS)


def test_items_of_a_reply_are_one_message(server: ToolServer) -> None:
    """A client that keeps its history itself finds its state; reasoning may be left out."""
    first = server.answered(
        RESPONSES, "<think>\nhm\n</think>\n\nI look.\n" + written("add", '{"x": 1}'), input="hi", tools=FLAT
    )
    items = [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c",
            "name": "add",
            "arguments": '{"x":1}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]},
    ]
    for left_out in (0, 1):
        sent = [user("hi"), *items[left_out:]]
        second = server.answered(RESPONSES, "ok", input=sent, tools=FLAT)
        spec = server.stored.engine.turns[-1].spec
        assert spec.node is not None and f"resp_{spec.node.parent_id}" == first["id"]
        assert "<think>\nhm\n</think>\n\nI look.\n<tool_call>" in server.context
        listed = server.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")["data"]
        assert [item.get("type") for item in listed] == [
            "message",
            *(item["type"] for item in items[left_out:]),
        ]
        assert listed[-1]["output"] == "2" and listed[-2]["arguments"] == '{"x":1}'


def test_a_conversation_keeps_calls_and_results(server: ToolServer) -> None:
    status, conversation = server.post(
        "/v1/conversations",
        items=[
            {"type": "message", **user("hi")},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"x": 1}'},
        ],
    )
    assert status == 200
    output = {"type": "function_call_output", "call_id": "c", "output": "2"}
    server.answered(RESPONSES, "Two.", input=[output], conversation=conversation["id"], tools=FLAT)
    server.answered(RESPONSES, "ok", input="so", conversation=conversation["id"], tools=FLAT)
    expected = [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call("c", "add", '{"x": 1}')]},
        result("c", "2"),
        {"role": "assistant", "content": "Two."},
        user("so"),
    ]
    assert server.context == rendered(QWEN3, expected, TOOLS)
    assert server.stored.engine.turns[-1].spec.keep


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "invalid_value",
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "invalid_value",
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
            "missing_required_parameter",
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "unsupported_parameter",
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input[0].type"),
        *(
            ({"tools": [{"type": kind}]}, "unsupported_parameter", "tools[0].type")
            for kind in ("web_search", "file_search", "code_interpreter", "custom", "mcp")
        ),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
        ({"reasoning": {"summary": "long"}}, "invalid_value", "reasoning.summary"),
        ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, "invalid_value", "chat_template_kwargs.x"),
    ],
)
def test_what_a_response_cannot_have_is_named(server: ToolServer, body: dict, code: str, param: str) -> None:
    assert server.refused(RESPONSES, **{"input": "hi", **body}) == (400, code, param)


def test_a_result_of_another_call_is_refused_after_a_response(server: ToolServer) -> None:
    first = server.answered(RESPONSES, CALL, input="hi", tools=FLAT)
    item = {"type": "function_call_output", "call_id": "other", "output": "x"}
    refusal = server.refused(
        RESPONSES, input=[user("so"), item], previous_response_id=first["id"], tools=FLAT
    )
    assert refusal == (400, "invalid_value", "input[1].call_id")


def test_tokens_are_counted_with_tools(server: ToolServer) -> None:
    messages = [user("hi")]
    whole = ChatFormat(TOKENIZER).token_ids(messages, template_input=WITH_TOOLS)
    status, answer = server.post("/tokenize", messages=messages, tools=TOOLS)
    assert (status, answer["tokens"]) == (200, whole)
    status, answer = server.post(f"{RESPONSES}/input_tokens", input="hi", tools=FLAT)
    assert (status, answer["input_tokens"]) == (200, len(whole))
    quiet = {"enable_thinking": False}
    _, answer = server.post("/tokenize", messages=messages, chat_template_kwargs=quiet)
    assert TOKENIZER.decode_raw(answer["tokens"]) == rendered(QWEN3, messages, **quiet)
    prefilled = [*messages, {"role": "assistant", "content": "Sure"}]
    _, answer = server.post("/tokenize", messages=prefilled, continue_final_message=True)
    assert TOKENIZER.decode_raw(answer["tokens"]).endswith("Sure")
    assert json.dumps(server.refused("/tokenize", messages=[user("a"), result("c", "x")]))


def test_a_conversation_goes_on_after_a_call_of_the_model(server: ToolServer) -> None:
    _, conversation = server.post("/v1/conversations", items=[{"type": "message", **user("what is a cat?")}])
    first = server.answered(RESPONSES, CALL, input="Look it up.", conversation=conversation["id"], tools=FLAT)
    server.answered(
        RESPONSES, "A pet.", input=[output_of(first, "found")], conversation=conversation["id"], tools=FLAT
    )
    assert "found" in server.context and server.num_replaced == 1
    server.answered(RESPONSES, "ok", input="so", conversation=conversation["id"], tools=FLAT)
    expected = [
        user("what is a cat?"),
        user("Look it up."),
        {"role": "assistant", "content": None, "tool_calls": [call("c", "look_up", '{"word": "cat"}')]},
        result("c", "found"),
        {"role": "assistant", "content": "A pet."},
        user("so"),
    ]
    assert server.context == rendered(QWEN3, expected, TOOLS)
