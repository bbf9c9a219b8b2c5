"""A replica that continues one conversation as often as it can, while others do the same.

Owns the program `python racing_commits.py LOCATION NAME NUMBER`: it prints a line per commit with the id of
its turn, after "+" if it was stored and "-" if it was refused. Does not know its competitors. Called by the
tests of races.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pensieve_jax.core.errors import ConversationChangedError, PensieveError, UnknownConversationError
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import TurnRecord, open_store
from pensieve_jax.history.table_store import TableHistoryStore

FINGERPRINT = "model:a tokenizer:b"


def behind(store: TableHistoryStore, name: str) -> TurnRecord:
    """Return a turn that continues the current head."""
    try:
        head, index = store.head(name), store.info(name).num_turns
    except UnknownConversationError:
        head, index = None, 0
    return TurnRecord(
        name, index, (index % 1000,), (1,), 0, "stop", float(index),
        turn_id=new_turn_id(head), parent_id=head,
    )  # fmt: skip


def race(store: TableHistoryStore, name: str, number: int) -> Iterator[tuple[str, bool]]:
    """Commit `number` times; yield the id of each turn, and whether it was stored."""
    for _ in range(number):
        turn = behind(store, name)
        refused = store.commit([turn])
        if refused and not isinstance(refused[0], ConversationChangedError):
            raise PensieveError(f"refused as {refused[0]!r}")
        yield turn.turn_id, not refused


if __name__ == "__main__":
    with open_store(sys.argv[1], fingerprint=FINGERPRINT) as opened:
        print("ready", flush=True)
        sys.stdin.readline()
        for turn_id, kept in race(opened, sys.argv[2], int(sys.argv[3])):
            print("+" if kept else "-", turn_id)
