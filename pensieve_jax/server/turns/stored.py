"""Turns of Chat Completions and Completions that a client asks to be kept.

Owns: that such a turn is kept as a response, under resp_ and its turn's id: found, deleted and expiring so.
Does not know: how replies are written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.server.api.response_schemas import CreateResponse, echo_of
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.turns.items import item_of, reply_id, with_input_ids
from pensieve_jax.text import Message
from typing import Final


def kept_draft(
    services: Services, owner: str, turn_id: str, messages: Sequence[Message], params: SamplingParams
) -> ResponseDraft:
    """What is committed with a turn.

    Args:
      services: of the server.
      owner: whose turn it is.
      turn_id: the turn's.
      messages: its new ones; none for a prompt of token ids.
      params: how it is sampled.
    """
    now_s = services.now_s()
    body = CreateResponse(max_output_tokens=params.max_tokens)
    echo = echo_of(body, services.model_name, params.temperature, params.top_p)
    return ResponseDraft(
        response_id=f"resp_{turn_id}",
        owner=owner,
        request=json.dumps(echo),
        input_items=json.dumps(with_input_ids(map(item_of, messages), turn_id)),
        output_item_id=reply_id(turn_id),
        created_at_s=now_s,
        expires_at_s=now_s + LIFETIME_S,
    )



LIFETIME_S: Final = 30 * 24 * 3600.0
