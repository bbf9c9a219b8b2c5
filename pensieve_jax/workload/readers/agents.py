"""Reader of coding-agent sessions (kv-cache-tester): JSON lines of sessions, each a list of requests.

Owns: this format, sub-agents included, and the judgement of which request continues the one before.
Does not know: how requests become turns (`chains`).
Called by: `read_trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pensieve_jax.workload.readers.chains import LoggedRequest, chain_requests
from pensieve_jax.workload.rows import Row, UniqueIds, read_json_lines
from pensieve_jax.workload.trace import ConversationTrace

# A service moves a few blocks at an input's end even while a session just goes on; a history that was
# compacted or rewritten loses far more. Of 38,130 requests 97.1% keep all, 1.0% this much, 1.9% less.
_MIN_KEPT_FRACTION: Final = 0.9


def read_agent_sessions(path: Path) -> Iterator[ConversationTrace]:
    """`{"id", "block_size", "requests": [{"t", "in", "out", "hash_keep", "think_time", "api_time", ...}]}`.

    `hash_keep` counts the blocks that an input shares with the one before. Times count from the start of
    each session, so no arrivals are known. A session is several conversations if its history was rewritten,
    and a sub-agent's requests are one of their own.
    """
    ids = UniqueIds()
    for row in read_json_lines(path):
        block_tokens = row.count("block_size")
        for name, requests in _request_lists(row, ids.add(row, "id")):
            yield from chain_requests(_requests(requests, name, block_tokens), has_arrivals=False)


def _request_lists(session: Row, session_id: str) -> Iterator[tuple[str, list[Row]]]:
    """The session's own requests, then those of each sub-agent, under names that differ."""
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
    for index, row in enumerate(rows):
        time_s = row.time("t")
        if parent is not None and time_s < parent.time_s:
            raise row.error("t", f"at least {parent.time_s:g}, the time of the request before")
        kept_tokens = row.count("hash_keep", at_least=0) * block_tokens
        keeps = parent is not None and kept_tokens >= _MIN_KEPT_FRACTION * parent.input_tokens - block_tokens
        parent = LoggedRequest(
            request_id=f"{name}:{index}",
            time_s=time_s,
            input_tokens=row.count("in"),
            # An answer that was cut off before its first token has cost its input, so it is not left out.
            output_tokens=max(row.count("out", at_least=0), 1),
            parent_id=parent.request_id if parent is not None and keeps else None,
            # Recorded since the last end that was known: wrong behind a request whose end was not.
            think_s=row.optional_time("think_time") if parent_end_known else None,
        )
        parent_end_known = row.has("api_time")
        yield parent
