"""What it takes to run a background response once more, as bytes.

Owns: the form of a job in the history, and what is known of a response without one that can be read.
Does not know: when it runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.engine.validation import TurnSpec
from pensieve_jax.history.server_tables.changes import ResponseDraft, ResponseRecord


class _Job(msgspec.Struct):
    node: TurnNode
    draft: ResponseDraft
    params: SamplingParams
    prompt_token_ids: list[int]
    messages: list[dict[str, Any]]


def encode_job(spec: TurnSpec, draft: ResponseDraft) -> bytes:
    """The job of a turn with a node, and of what is kept with it."""
    assert spec.node is not None
    job = _Job(
        node=replace(spec.node, attachment=None),
        draft=draft,
        params=spec.params,
        prompt_token_ids=list(spec.prompt_token_ids),
        messages=[dict(message) for message in spec.messages or ()],
    )
    return msgspec.msgpack.encode(job)


def decode_job(job: bytes) -> tuple[TurnSpec, ResponseDraft]:
    """The turn of a job, with its draft attached to its node, and the draft.

    Raises msgspec.DecodeError for bytes that are no job of this release.
    """
    kept = msgspec.msgpack.decode(job, type=_Job)
    node = replace(kept.node, attachment=kept.draft)
    return TurnSpec(kept.prompt_token_ids, kept.params, messages=tuple(kept.messages), node=node), kept.draft


def draft_of(record: ResponseRecord) -> ResponseDraft:
    """What its record says of a response whose job cannot be read."""
    names = ("response_id", "owner", "request", "input_items", "output_item_id", "created_at_s")
    return ResponseDraft(
        **{name: getattr(record, name) for name in names}, expires_at_s=record.expires_at_s, background=True
    )
