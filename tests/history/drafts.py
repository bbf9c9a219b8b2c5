"""Drafts of responses, for tests of what is stored with a turn."""

from __future__ import annotations

from typing import Any

from pensieve_jax.history.server_tables.changes import ResponseDraft


def draft_of(turn_id: str, **fields: Any) -> ResponseDraft:
    """Return the draft of a turn's response; `fields` replace ann's."""
    plain = {
        "response_id": f"resp_{turn_id}",
        "owner": "ann",
        "request": "{}",
        "input_items": "[]",
        "output_item_id": f"msg_{turn_id}",
        "created_at_s": 1.0,
        "expires_at_s": 9e9,
    }
    return ResponseDraft(**(plain | fields))
