"""What counting each owner's amounts costs a commit of the history.

    python -m pensieve_lab.programs.benchmark_commits --num_commits=2000
    python -m pensieve_lab.programs.benchmark_commits --history=postgresql://... --num_commits=500

Commits to a history with the triggers that keep `stored_amounts`, and to one without them, alternating commit
by commit: one turn with its response, and a group of turns. The report has the medians of both and their
ratio. It also has the ratio of the lower quartiles, which other programs on the host change less. With a
history in Postgres, two sessions then commit at the same time, for one owner and for two, alternating.

The histories are new: a file in a temporary directory, or namespaces of the database that begin with
`benchmark_commits_`, which stay.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from absl import flags

from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import TurnRecord, open_store
from pensieve_jax.history.opening import is_postgres
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.history.table_store import TableHistoryStore

FLAGS = flags.FLAGS
_FINGERPRINT: Final = "benchmark_commits"
_TABLES: Final = ("turns", "conversations", "items", "responses", "idempotency")
_NUM_PROMPT, _NUM_REPLY = 200, 150
_TEXT: Final = "word " * 120
_WARM_UP: Final = 20


class Commit(NamedTuple):
    """Turns and their responses, for one commit."""

    turns: list[TurnRecord]
    drafts: list[ResponseDraft]


def main() -> int:
    with ExitStack() as stack:
        place = FLAGS.history or stack.enter_context(tempfile.TemporaryDirectory())
        counting = stack.enter_context(open_store(_location(place, "counting"), fingerprint=_FINGERPRINT))
        plain = stack.enter_context(open_store(_location(place, "plain"), fingerprint=_FINGERPRINT))
        drop_triggers(plain)
        rows = [_compared(counting, plain, int(size)) for size in FLAGS.group_sizes]
        waits = _waits(place) if is_postgres(FLAGS.history) else []
    columns = ["turns", "counted, us", "plain, us", "ratio of medians", "of quartiles"]
    print(table(columns, [list(row.values()) for row in rows]))
    for row in waits:
        print(f"two sessions, {row['owners']} owners: {row['commits_per_s']:.0f} commits/s")
    results = {"database": "postgres" if waits else "file", "commits": rows, "two_sessions": waits}
    units = {"counted_us": "us", "plain_us": "us", "commits_per_s": "commits per second"}
    print_document(json_line("commits", results, units=units, device="cpu"))
    return 0


def drop_triggers(store: TableHistoryStore) -> None:
    """Let a history keep no amounts."""

    def drop(connection: Any) -> None:
        for name in _TABLES:
            if store.is_shared:
                connection.execute(f"DROP TRIGGER count_{name} ON {name}")
                continue
            query = "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = ?"
            for (trigger,) in connection.execute(query, (name,)).fetchall():
                connection.execute(f"DROP TRIGGER {trigger}")

    store.change(drop)


def new_commit(size: int, owner: str) -> Commit:
    """Return a commit of `size` first turns with their responses."""
    turns = [
        TurnRecord(
            *("", 0, tuple(range(_NUM_PROMPT)), tuple(range(_NUM_REPLY)), 7, "stop", 1000.0),
            messages=({"role": "user", "content": _TEXT},),
            output_text=_TEXT,
            turn_id=new_turn_id(None),
            owner=owner,
        )
        for _ in range(size)
    ]
    drafts = [
        ResponseDraft(
            response_id=f"resp_{one.turn_id}",
            owner=owner,
            request='{"temperature":1,"max_output_tokens":150}',
            input_items=f'[{{"id":"msg_1","type":"message","role":"user","content":"{_TEXT}"}}]',
            output_item_id=f"msg_{one.turn_id}",
            created_at_s=1000.0,
            expires_at_s=9e9,
        )
        for one in turns
    ]
    return Commit(turns, drafts)


def _location(place: str, name: str) -> str:
    if not is_postgres(place):
        return str(Path(place, f"{name}.sqlite"))
    joint = "&" if "?" in place else "?"
    return f"{place}{joint}namespace=benchmark_commits_{name}_{time.time_ns() % 10**12}"


def _timed(store: TableHistoryStore, size: int, owner: str = "ann") -> float:
    """Commit, and return the seconds that it took."""
    turns, drafts = new_commit(size, owner)
    began_s = time.perf_counter()
    refused = store.commit(turns, drafts)
    took_s = time.perf_counter() - began_s
    assert not refused, refused
    return took_s


def _compared(counting: TableHistoryStore, plain: TableHistoryStore, size: int) -> dict[str, float]:
    """Return the times of commits of `size` turns, with and without counting."""
    stores, times = (counting, plain), ([], [])  # type: tuple[Any, Any], tuple[list[float], list[float]]
    for number in range(-_WARM_UP, max(1, FLAGS.num_commits // size)):
        for place in (0, 1) if number % 2 else (1, 0):
            took_s = _timed(stores[place], size)
            if number >= 0:
                times[place].append(took_s)
    counted, bare = (statistics.median(one) for one in times)
    quartiles = [sorted(one)[len(one) // 4] for one in times]
    return {
        "turns": size,
        "counted_us": round(1e6 * counted, 1),
        "plain_us": round(1e6 * bare, 1),
        "ratio": round(counted / bare, 4),
        "ratio_of_quartiles": round(quartiles[0] / quartiles[1], 4),
    }


def _waits(place: str) -> list[dict[str, float]]:
    """Return how many commits two sessions make, for one owner and for two, alternating."""
    history = _location(place, "waits")
    rates: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(history, fingerprint=_FINGERPRINT)) for _ in range(2)]
        for number in range(FLAGS.num_windows):
            for owners in (1, 2) if number % 2 else (2, 1):
                rates[owners].append(_rate(stores, [f"owner {place % owners}" for place in range(2)]))
    return [
        {"owners": owners, "commits_per_s": round(statistics.median(found), 1)}
        for owners, found in rates.items()
    ]


def _rate(stores: Sequence[TableHistoryStore], owners: Sequence[str]) -> float:
    """Return the commits a second of stores that commit at the same time, each for one owner."""
    counts = [0] * len(stores)
    until_s = time.monotonic() + FLAGS.window_s

    def work(place: int) -> None:
        while time.monotonic() < until_s:
            _timed(stores[place], 1, owners[place])
            counts[place] += 1

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / float(FLAGS.window_s)


def define_flags() -> None:
    flags.DEFINE_string("history", None, "URL of a Postgres database; default: a file.")
    flags.DEFINE_integer("num_commits", 2000, "Turns to commit for each size of groups.", lower_bound=1)
    flags.DEFINE_list("group_sizes", ["1", "8"], "Turns of a commit.")
    flags.DEFINE_integer("num_windows", 10, "Windows of two sessions, with Postgres.", lower_bound=1)
    flags.DEFINE_float("window_s", 1.0, "Seconds of a window.", lower_bound=0.01)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
