"""Reader of coding-agent sessions (kv-cache-tester): JSON of sessions, each a list of requests.

Owns: this format, including sub-agents, and the decision which request continues the one before.
Does not know: how requests become turns (`chains`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pensieve_lab.workload.errors import TraceError
from pensieve_lab.workload.readers.chains import LoggedRequest, chain_requests
from pensieve_lab.workload.rows import Row, UniqueIds, read_json
from pensieve_lab.workload.trace import ConversationTrace

# A service moves a few blocks at an input's end even while a session just continues; a history that was
# compacted or rewritten loses far more. Of 38,130 requests 97.1% keep all, 1.0% this much, 1.9% less.
_MIN_KEPT_FRACTION: Final = 0.9


def read_agent_sessions(path: Path) -> Iterator[ConversationTrace]:
    """Read `{"id", "block_size", "requests": [{"t", "in", "out", "hash_ids", "think_time", "api_time",
    ...}]}`.

    The path is a directory of files of one session each, as published, or one file of a session, an array of
    sessions, or one session per line. `hash_keep`, the number of blocks that an input shares with the one
    before, may replace `hash_ids`. Two consecutive requests with the same input are a retry: the second
    answer counts, from the arrival of the first. Times count from the start of each session, so arrivals are
    unknown. A session becomes several conversations if its history was rewritten, and the requests of a
    sub-agent become a conversation of their own.
    """
    ids = UniqueIds()
    for file in _files(path):
        for row in read_json(file):
            block_tokens = row.count("block_size")
            session_id = ids.add(row, "id")
            for name, rows in _request_lists(row, session_id):
                requests = _requests(rows, name, block_tokens)
                yield from chain_requests(requests, has_arrivals=False, session_id=session_id)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    if not found:
        raise TraceError(path, None, "is a directory without a .json file")
    return found


def _request_lists(session: Row, session_id: str) -> Iterator[tuple[str, list[Row]]]:
    """Yield the session's own requests, then those of each sub-agent, under different names."""
    own: list[Row] = []
    nested: list[tuple[str, list[Row]]] = []
    for index, row in enumerate(session.rows("requests", at_least=1)):
        if row.values.get("type") == "subagent":
            nested.append((f"{session_id}/{index}", list(row.rows("requests"))))
        else:
            own.append(row)
    yield session_id, own
    yield from nested


def _requests(rows: list[Row], name: str, block_tokens: int) -> Iterator[LoggedRequest]:
    parent: LoggedRequest | None = None
    parent_end_known = False
    for asked in _distinct(rows):
        first, row = asked.first, asked.last
        time_s = first.time("t")
        if parent is not None and time_s < parent.time_s:
            raise first.error("t", f"at least {parent.time_s:g}, the time of the request before")
        kept_tokens = asked.kept_blocks * block_tokens
        keeps = parent is not None and kept_tokens >= _MIN_KEPT_FRACTION * parent.input_tokens - block_tokens
        parent = LoggedRequest(
            request_id=f"{name}:{asked.index}",
            time_s=time_s,
            input_tokens=row.count("in"),
            # An answer that was cut off before its first token still cost its input, so it stays.
            output_tokens=max(row.count("out", at_least=0), 1),
            parent_id=parent.request_id if parent is not None and keeps else None,
            # Recorded since the last known end, so it is wrong after a request without a known end.
            think_s=first.optional_time("think_time") if parent_end_known else None,
        )
        parent_end_known = row.has("api_time")
        yield parent


@dataclass(slots=True)
class _DistinctInput:
    """Input with its consecutive requests: its index, first and last request, and blocks kept from before."""

    index: int
    first: Row
    last: Row
    kept_blocks: int


def _distinct(rows: list[Row]) -> Iterator[_DistinctInput]:
    asked: _DistinctInput | None = None
    before: list[object] = []
    for index, row in enumerate(rows):
        if "hash_ids" not in row.values:
            kept_blocks = row.count("hash_keep", at_least=0)
        else:
            blocks = row.items("hash_ids")
            if asked is not None and blocks == before and row.values.get("in") == asked.last.values.get("in"):
                asked.last = row
                continue
            kept_blocks, before = _num_common(before, blocks), blocks
        if asked is not None:
            yield asked
        asked = _DistinctInput(index, row, row, kept_blocks)
    if asked is not None:
        yield asked


def _num_common(one: list[object], other: list[object]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
