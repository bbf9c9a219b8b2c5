"""Completion turns stored as responses.

Owns: the stored form of a Chat Completions or Completions turn with `store`, how long responses are stored,
and the default request fields that a response echoes. The stored turn is the response `resp_<turn id>`:
clients retrieve and delete it by that id, and it expires like any response.
Does not know: how replies are written, or the fields of any request. Called by `server.openai`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.turns.items import item_of, reply_id, with_input_ids
from pensieve_jax.text import Message

LIFETIME_S: Final = 30 * 24 * 3600.0


def stored_draft(
    services: Services, owner: str, turn_id: str, messages: Sequence[Message], params: SamplingParams
) -> ResponseDraft:
    """Return the response record that is committed with a turn.

    Args:
      services: the server's services.
      owner: the key owner of the turn.
      turn_id: id of the turn.
      messages: the new messages of the turn; empty for a prompt of token ids.
      params: its sampling parameters.
    """
    now_s = services.now_s()
    echo = default_echo(services.model_name, params.temperature, params.top_p)
    echo["max_output_tokens"] = params.max_tokens
    return ResponseDraft(
        response_id=f"resp_{turn_id}",
        owner=owner,
        request=json.dumps(echo),
        input_items=json.dumps(with_input_ids(map(item_of, messages), turn_id)),
        output_item_id=reply_id(turn_id),
        created_at_s=now_s,
        expires_at_s=now_s + LIFETIME_S,
    )


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
