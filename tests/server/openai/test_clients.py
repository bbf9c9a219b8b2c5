"""The openai client, in strict mode, against a real server; answers are checked against OpenAI's schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pensieve_lab.clients import completion_cases, response_cases  # noqa: F401 - imported for their cases
from pensieve_lab.clients.cases import CASES, Case, run_case
from pensieve_lab.clients.openai_schemas import Schemas, all_complaints, reduced
from pensieve_lab.clients.recorder import Exchange, Recorder
from pensieve_lab.serving.served import ServedProcess


@pytest.fixture(scope="module")
def recorder(chat_server: ServedProcess) -> Iterator[Recorder]:
    """Yield a recording proxy in front of the shared server."""
    with Recorder(chat_server.address) as recorder:
        yield recorder


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas.of_file()


@pytest.mark.parametrize(
    "is_async", [False, pytest.param(True, marks=pytest.mark.long)], ids=["sync", "async"]
)
@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.area}: {one.name}")
def test_openai(recorder: Recorder, schemas: Schemas, one: Case, is_async: bool) -> None:
    num_before = len(recorder.exchanges)
    outcome = run_case(one, f"{recorder.address}/v1", is_async=is_async)
    assert outcome.problem is None
    recorder.wait_for_all()
    exchanges = recorder.exchanges[num_before:]
    assert all_complaints(schemas, exchanges) == []
    assert one.area == "other routes" or sum(map(schemas.num_bodies, exchanges)) > 0


def exchange(path: str, answer: object, *, status: int = 200, kind: str = "application/json") -> Exchange:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return Exchange("POST", path, "{}", status, kind, {}, text)


CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "chat",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
DELTA = {
    "type": "response.output_text.delta",
    "sequence_number": 4,
    "item_id": "msg_1",
    "output_index": 0,
    "content_index": 0,
    "delta": "Hi",
    "logprobs": [],
}


def test_violations_of_the_schema_are_found(schemas):
    chats, responses = "/v1/chat/completions", "/v1/responses"
    assert schemas.complaints(exchange(chats, CHAT)) == []
    for name, value in (("created", "now"), ("object", "chat"), ("choices", None)):
        assert schemas.complaints(exchange(chats, CHAT | {name: value})) != []
    wrong = copy.deepcopy(CHAT)
    wrong["choices"][0]["finish_reason"] = "done"
    assert "finish_reason" in schemas.complaints(exchange(chats, wrong))[0]
    stream = {"kind": "text/event-stream"}
    good = f"event: {DELTA['type']}\ndata: {json.dumps(DELTA)}\n\ndata: [DONE]\n\n"
    assert schemas.complaints(exchange(responses, good, **stream)) == []
    assert schemas.num_bodies(exchange(responses, good, **stream)) == 1
    for bad in (DELTA | {"delta": 5}, DELTA | {"type": "response.made_up"}):
        assert schemas.complaints(exchange(responses, f"data: {json.dumps(bad)}\n\n", **stream)) != []
    error = {"message": "No.", "type": "x", "param": None, "code": "y"}
    assert schemas.complaints(exchange(chats, {"error": error}, status=400)) == []
    assert schemas.complaints(exchange(chats, {"error": "No."}, status=400)) != []
    assert schemas.complaints(exchange("/v1/pensieve/stats", {"any": 1})) == []


def test_the_extracted_schema_keeps_what_it_references_and_null():
    schemas = {name: {"type": "object"} for names in _ROOTS for name in names if name}
    schemas["Model"] = {
        "description": "prose",
        "properties": {
            "description": {"type": "string", "nullable": True},
            "other": {"$ref": "#/components/schemas/Other"},
        },
    }
    schemas |= {"Other": {"type": "string"}, "Unused": {}, "ErrorResponse": {"type": "object"}}
    part = reduced({"components": {"schemas": schemas}, "info": {"license": {"name": "MIT"}, "version": "1"}})
    found = part["components"]["schemas"]
    assert "Unused" not in found and "Other" in found and "description" not in found["Model"]
    listed = Exchange("GET", "/v1/models/chat", "", 200, "application/json", {}, '{"description": null}')
    assert Schemas(part).complaints(listed) == []
    assert Schemas(part).complaints(replace(listed, answer='{"description": 5}')) != []


_ROOTS = [
    ("Response", "ResponseStreamEvent"),
    ("ResponseItemList", "TokenCountsResource"),
    ("ConversationResource", "DeletedConversationResource"),
    ("ConversationItemList", "ConversationItem"),
    ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    ("CreateCompletionResponse", "ListModelsResponse"),
]
