"""What a stored turn holds, for every API.

Owns: the record that is committed with a turn, and how long it lives; the request fields that a response
echoes unless its request said otherwise. A stored turn is the response `resp_<turn id>`, whichever API
created it: clients retrieve, continue and delete it by that id.
Does not know: how replies are written, or the fields of any request. Called by `server.openai`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.history.server_tables.changes import ConversationAppend, Idempotency, ResponseDraft
from pensieve_jax.server.turns.items import Item, reply_id, with_input_ids

LIFETIME_S: Final = 30 * 24 * 3600.0


def stored_draft(
    owner: str,
    turn_id: str,
    echo: Mapping[str, Any],
    items: Iterable[Item],
    created_at_s: float,
    *,
    body_sha256: str = "",
    conversation: tuple[str, int] | None = None,
    idempotency: Idempotency | None = None,
) -> ResponseDraft:
    """Return the response record that is committed with a turn.

    Args:
      owner: the key owner of the turn.
      turn_id: id of the turn.
      echo: the request fields that the response echoes; see `default_echo`.
      items: the new items of the turn, without ids; none for a prompt of token ids.
      created_at_s: when the response was created, in seconds since the Unix epoch.
      body_sha256: digest by which a repeated request is recognized; "" for a route that recognizes none.
      conversation: id and version of the conversation that the items and the reply are appended to.
      idempotency: the key of the request.
    """
    packed = json.dumps(with_input_ids(items, turn_id))
    append = None
    if conversation is not None:
        conversation_id, version = conversation
        append = ConversationAppend(conversation_id=conversation_id, expected_version=version, items=packed)
    return ResponseDraft(
        response_id=f"resp_{turn_id}",
        owner=owner,
        request=json.dumps(echo),
        input_items=packed,
        output_item_id=reply_id(turn_id),
        created_at_s=created_at_s,
        expires_at_s=created_at_s + LIFETIME_S,
        background=bool(echo["background"]),
        body_sha256=body_sha256,
        conversation=append,
        idempotency=idempotency,
    )


def completion_echo(model: str, params: SamplingParams, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the echoed fields of a stored turn of Chat Completions or Completions."""
    return default_echo(model, params.temperature, params.top_p) | {
        "max_output_tokens": params.max_tokens,
        "top_logprobs": params.logprobs or 0,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "metadata": dict(metadata or {}),
    }


def default_echo(model: str, temperature: float, top_p: float) -> dict[str, Any]:
    """Return the request fields that a response echoes, with the defaults of a minimal request.

    These are all the fields that the schemas of OpenAI and of Open Responses require.
    """
    return {
        "model": model,
        "instructions": None,
        "previous_response_id": None,
        "metadata": {},
        "temperature": temperature,
        "top_p": top_p,
        "top_logprobs": 0,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "reasoning": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "service_tier": "default",
        "store": True,
        "background": False,
        "safety_identifier": None,
        "prompt_cache_key": None,
    }
