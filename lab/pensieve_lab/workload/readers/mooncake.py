"""Reader of Mooncake's traces: JSON lines of requests with the hashes of their blocks of 512 input tokens.

Owns: both spellings of the format, and finding conversations by hashes if the file does not name parents.
Does not know: how requests become turns (`chains`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pensieve_lab.workload.readers.chains import LoggedRequest, chain_requests
from pensieve_lab.workload.rows import Row, UniqueIds, read_json_lines
from pensieve_lab.workload.trace import ConversationTrace

_BLOCK_TOKENS: Final = 512
# The first block of most inputs is a common system prompt, so one common block is not a history.
_MIN_COMMON_BLOCKS: Final = 2


def read_mooncake(path: Path) -> Iterator[ConversationTrace]:
    """Read the published `{"timestamp" (ms), "input_length", "output_length", "hash_ids"}`.

    The names `timestamp_ms`, `input_tokens`, `output_tokens` are also accepted, together with `line`, the
    request's number in the file that a sample was taken from, and `parent_line`, the number of the request
    that it continues, or -1. Without these, a request continues the one with the longest input whose full
    blocks its own input begins with, the latest of several; a block's hash covers everything before it as
    well. Such links are likely, not certain. An input of less than two full blocks gets no successor.
    """
    return chain_requests(_requests(path))


def _requests(path: Path) -> Iterator[LoggedRequest]:
    last_with_block: dict[int, str] = {}  # the last full block of an input -> the latest such request
    ids = UniqueIds()
    previous_ms = 0.0
    for index, row in enumerate(read_json_lines(path)):
        time_ms = row.time(time_name := row.name_of("timestamp", "timestamp_ms"))
        if time_ms < previous_ms:
            raise row.error(time_name, f"at least {previous_ms:g}, the time of the request before")
        previous_ms = time_ms
        input_tokens = row.count(row.name_of("input_length", "input_tokens"))
        request_id = ids.add(row, "line") if "line" in row.values else str(index)
        if "parent_line" in row.values:
            parent_line = row.count("parent_line", at_least=-1)
            parent_id = str(parent_line) if parent_line >= 0 else None
        else:
            parent_id = _hashed_parent(row, input_tokens, request_id, last_with_block)
        output_tokens = row.count(row.name_of("output_length", "output_tokens"))
        yield LoggedRequest(request_id, time_ms / 1000, input_tokens, output_tokens, parent_id)


def _hashed_parent(
    row: Row, input_tokens: int, request_id: str, last_with_block: dict[int, str]
) -> str | None:
    blocks: list[int] = []
    for block in row.items("hash_ids"):
        if not isinstance(block, int):
            raise row.error("hash_ids", "a list of ints")
        blocks.append(block)
    known = (last_with_block.get(block) for block in reversed(blocks[_MIN_COMMON_BLOCKS - 1 :]))
    parent_id = next((found for found in known if found is not None), None)
    num_full = input_tokens // _BLOCK_TOKENS
    if _MIN_COMMON_BLOCKS <= num_full <= len(blocks):
        last_with_block[blocks[num_full - 1]] = request_id
    return parent_id
