"""The response object has all fields that OpenAI's and Open Responses' schemas require, in every state."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response
from pydantic import ConfigDict

from pensieve_jax.core.outputs import Usage
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.openai.responses.response import stored_response, usage_object
from pensieve_jax.server.openai.responses.schemas import CreateResponse, echo_of
from pensieve_jax.text.token_texts import TokenTexts

# `ResponseResource` of Open Responses' schema; the types are those of its fields that are not objects.
OPEN_RESPONSES = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": int | None,
    "status": str,
    "incomplete_details": dict | None,
    "model": str,
    "previous_response_id": str | None,
    "instructions": str | None,
    "output": list,
    "error": dict | None,
    "tools": list,
    "tool_choice": str,
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": int | float,
    "presence_penalty": int | float,
    "frequency_penalty": int | float,
    "top_logprobs": int,
    "temperature": int | float,
    "reasoning": dict | None,
    "usage": dict | None,
    "max_output_tokens": int | None,
    "max_tool_calls": int | None,
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": str | None,
    "prompt_cache_key": str | None,
}
USAGE = Usage(
    prompt_tokens=5,
    reused_gpu_tokens=30,
    swapped_in_tokens=4,
    recomputed_tokens=2,
    prefilled_tokens=6,
    output_tokens=7,
)


class StrictResponse(Response):
    model_config = ConfigDict(extra="allow", strict=False)


def record(status: str) -> ResponseRecord:
    ended = status in ("completed", "incomplete")
    return ResponseRecord(
        response_id="resp_1",
        owner="ann",
        request=json.dumps(echo_of(CreateResponse(input="hi"), "chat", 0.5, 1.0)),
        input_items="[]",
        output_item_id="msg_1",
        created_at_s=1.5,
        expires_at_s=2.0,
        background=True,
        status=status,
        turn_id="1" if ended else None,
        completed_at_s=None if status == "queued" else 3.7,
        output_text="yes" if ended else None,
        finish_reason={"completed": "stop", "incomplete": "length"}.get(status),
        usage=json.dumps({name: getattr(USAGE, name) for name in USAGE.__slots__}) if ended else None,
        error='{"code": "server_error", "message": "no"}' if status == "failed" else None,
    )


@pytest.mark.parametrize("status", ["queued", "completed", "incomplete", "cancelled", "failed"])
def test_every_required_field_is_there(status):
    response = stored_response(record(status), TokenTexts(None))
    for name, kind in OPEN_RESPONSES.items():
        assert isinstance(response[name], kind), name
    assert "user" not in response  # a null would be against OpenAI's schema
    parsed = StrictResponse.model_validate(response)
    assert parsed.status == status
    assert (parsed.output_text == "yes") == (status in ("completed", "incomplete"))
    assert (response["error"] is None) == (status != "failed")


def test_cached_tokens_are_the_reused_ones():
    usage = usage_object(USAGE)
    assert usage["input_tokens"] == 42 and usage["total_tokens"] == 49
    assert usage["input_tokens_details"] == {"cached_tokens": 34, "cache_write_tokens": 0}
    assert usage["pensieve"] == {
        "new_tokens": 5,
        "gpu_tokens": 30,
        "cpu_tokens": 4,
        "recomputed_tokens": 2,
        "prefilled_tokens": 6,
    }
