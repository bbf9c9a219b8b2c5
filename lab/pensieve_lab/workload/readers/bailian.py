"""Reader of the Qwen-Bailian traces: JSON lines of requests that name their parent request.

Owns: this format.
Does not know: how requests become turns (`chains`); the hashes of blocks are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pensieve_lab.workload.readers.chains import LoggedRequest, chain_requests
from pensieve_lab.workload.rows import UniqueIds, read_json_lines
from pensieve_lab.workload.trace import ConversationTrace


def read_bailian(path: Path) -> Iterator[ConversationTrace]:
    """Read `{"chat_id", "parent_chat_id" (-1: none), "timestamp" (s), "input_length", "output_length", ...}`.

    A request whose parent lies before the trace's beginning begins a conversation with all of its input.
    """
    # Sort by arrival; the published files are sorted except for ties, which a stable sort keeps.
    requests = sorted(_requests(path), key=lambda request: request.time_s)
    return chain_requests(requests)


def _requests(path: Path) -> Iterator[LoggedRequest]:
    ids = UniqueIds()
    for row in read_json_lines(path):
        parent_id = row.identifier("parent_chat_id")
        yield LoggedRequest(
            request_id=ids.add(row, "chat_id"),
            time_s=row.time("timestamp"),
            input_tokens=row.count("input_length"),
            output_tokens=row.count("output_length"),
            parent_id=None if parent_id == "-1" else parent_id,
        )
