"""Turns with every kind of attachment, committed until the process is killed.

Owns the content of the n-th commit, a function of n, so that a test can check the file; and the program that
commits repeatedly: `python endless_commits.py PATH FIRST`. Does not know when it will die. Called by the
tests of kills.

A lane is an endless chain of turns, one in each commit. Every sixth turn begins a new tree.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

from pensieve_jax.core.errors import InvalidRequestError, PensieveError
from pensieve_jax.history import HistoryStore, TurnRecord, open_store
from pensieve_jax.history.server_tables.changes import (
    ConversationAppend,
    CreateConversation,
    Idempotency,
    QueueResponse,
    ResponseDraft,
)

FINGERPRINT = "model:a tokenizer:b"
OWNER = "ann"
NUM_LANES = 4
_TREE = 6
KINDS = ("plain", "keyed", "conversation", "background")


class Planned(NamedTuple):
    """A turn of a commit, its attachment, and the parts of it that can be looked up."""

    turn: TurnRecord
    draft: ResponseDraft
    item_ids: tuple[str, ...]


def conversation_id(lane: int) -> str:
    """Return the id of the conversation that some of a lane's turns belong to."""
    return f"conv_{lane}"


@functools.cache
def planned(number: int) -> tuple[Planned, ...]:
    """Return the turns of a commit that must be stored."""
    return tuple(_planned(number, lane) for lane in range(NUM_LANES))


def named(number: int) -> TurnRecord:
    """Return the turn of a named conversation in the same commit."""
    return TurnRecord("alice", number, (number,) * 5, (1,), 0, "stop", float(number))


def latecomer(number: int) -> Planned | None:
    """Return, for every third commit, a turn whose conversation has changed: it must be refused."""
    if number % 3:
        return None
    digest = hashlib.sha256(f"late {number}".encode()).hexdigest()
    turn = TurnRecord("", 0, (1,), (2,), 0, "stop", 1.0, turn_id=digest[:32], owner=OWNER)
    append = ConversationAppend(
        conversation_id=conversation_id(0),
        expected_version=10**9,
        items=json.dumps([{"id": f"late_{number}"}]),
    )
    return Planned(turn, _draft(turn, "conversation", append), (f"late_{number}",))


def _planned(number: int, lane: int) -> Planned:
    depth = number % _TREE
    kind = _kind(number, lane)
    turn = TurnRecord(
        "", depth, tuple(range(lane, 200)), (number,), 0, "stop" if lane else "length", float(number),
        output_text=f"reply {number}", owner=OWNER, turn_id=_turn_id(number, lane), chain=bytes([lane + 1]),
        parent_id=_turn_id(number - 1, lane) if depth else None,
    )  # fmt: skip
    append, item_ids = None, ()
    if kind == "conversation":
        version = len(range((KINDS.index(kind) - lane) % len(KINDS), number, len(KINDS)))  # appended earlier
        items = json.dumps([{"id": f"in_{number}_{lane}", "role": "user", "content": "x" * 500}])
        append = ConversationAppend(
            conversation_id=conversation_id(lane), expected_version=version, items=items
        )
        item_ids = (f"in_{number}_{lane}", f"msg_{turn.turn_id}")
    return Planned(turn, _draft(turn, kind, append), item_ids)


def _kind(number: int, lane: int) -> str:
    return KINDS[(number + lane) % len(KINDS)]


def _turn_id(number: int, lane: int) -> str:
    parts = (f"root {number // _TREE} {lane}", f"turn {number} {lane}")
    return "".join(hashlib.sha256(part.encode()).hexdigest()[:16] for part in parts)


def _draft(turn: TurnRecord, kind: str, append: ConversationAppend | None) -> ResponseDraft:
    key = Idempotency(key=f"key {turn.turn_id}", body_sha256="b", expires_at_s=9e9)
    return ResponseDraft(
        response_id=f"resp_{turn.turn_id}",
        owner=OWNER,
        request="{}",
        input_items="[]",
        output_item_id=f"msg_{turn.turn_id}",
        created_at_s=turn.created_at_s,
        expires_at_s=9e9,
        background=kind == "background",
        conversation=append,
        idempotency=None if kind == "plain" else key,
    )


def _run(store: HistoryStore, first: int) -> Iterator[int]:
    for lane in range(NUM_LANES):
        with contextlib.suppress(InvalidRequestError):  # an earlier process created it
            store.apply(
                CreateConversation(
                    owner=OWNER, conversation_id=conversation_id(lane), metadata="{}", created_at_s=0.0
                )
            )
    number = first
    while True:
        plans, late = planned(number), latecomer(number)
        for plan in plans:
            if plan.draft.background:
                with contextlib.suppress(InvalidRequestError):  # an earlier process queued it
                    store.apply(QueueResponse(draft=plan.draft, job=b"job"))
        plans += (late,) if late else ()
        turns, drafts = [plan.turn for plan in plans], [plan.draft for plan in plans]
        refused = store.commit([*turns, named(number)], [*drafts, None])
        expected = [NUM_LANES] if late else []
        if list(refused) != expected:
            raise PensieveError(f"commit {number} refused {refused}")
        yield number
        number += 1


if __name__ == "__main__":
    with open_store(sys.argv[1], fingerprint=FINGERPRINT) as store:
        for done in _run(store, int(sys.argv[2])):
            print(done, flush=True)
