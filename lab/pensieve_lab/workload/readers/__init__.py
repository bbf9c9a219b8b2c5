"""Readers of public workload files.

Owns: the list of formats and the one function that reads them all.
Does not know: any format's fields; each family of formats has a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from pensieve_lab.workload.errors import TraceError, WorkloadError
from pensieve_lab.workload.readers.agents import read_agent_sessions
from pensieve_lab.workload.readers.azure import read_azure
from pensieve_lab.workload.readers.bailian import read_bailian
from pensieve_lab.workload.readers.burstgpt import read_burstgpt
from pensieve_lab.workload.readers.chats import (
    CountTokens,
    OnSkip,
    count_words,
    read_dialogues,
    read_openai,
    read_sharegpt,
    read_ultrachat,
)
from pensieve_lab.workload.readers.guess import guess_format
from pensieve_lab.workload.readers.lengths import read_lengths
from pensieve_lab.workload.readers.mooncake import read_mooncake
from pensieve_lab.workload.trace import ConversationTrace, Trace

type _TextReader = Callable[[Path, CountTokens, OnSkip | None], Iterator[ConversationTrace]]
type _LengthReader = Callable[[Path], Iterator[ConversationTrace]]

_TEXT_READERS: Final[dict[str, _TextReader]] = {
    "sharegpt": read_sharegpt,
    "ultrachat": read_ultrachat,
    "openai": read_openai,
    "vllm": read_openai,
    "dialogues": read_dialogues,
}
_LENGTH_READERS: Final[dict[str, _LengthReader]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "agent-sessions": read_agent_sessions,
    "azure": read_azure,
    "lengths": read_lengths,
}
_OWN_FORMAT: Final = "pensieve"
_BURSTGPT: Final = "burstgpt"  # a format of lengths whose reader leaves rows out

FORMATS: Final = (_OWN_FORMAT, *_TEXT_READERS, *_LENGTH_READERS, _BURSTGPT)
"""Values of `format` in `read_trace`; "pensieve" is the format of `Trace.save`."""
TEXT_FORMATS: Final = tuple(_TEXT_READERS)
"""Formats whose files hold texts, which need a `count_tokens`."""

__all__ = [
    "FORMATS",
    "TEXT_FORMATS",
    "CountTokens",
    "OnSkip",
    "count_words",
    "guess_format",
    "read_trace",
]


def read_trace(
    path: str | Path,
    *,
    format: str,
    count_tokens: CountTokens | None = None,
    on_skip: OnSkip | None = None,
) -> Trace:
    """Read a trace file; `.gz` files are decompressed.

    Args:
      path: the file; for "agent-sessions" also a directory of files.
      format: one of FORMATS; `guess_format` determines it from a file's content.
      count_tokens: counts the tokens of a text; required by formats of texts, unused by formats of lengths.
      on_skip: called with file, line and reason for what is left out: each conversation of texts without an
        answered prompt, and each kind of rows that belong to no session.

    Raises TraceError for a file that does not have the format or holds no conversation, WorkloadError for an
    unknown format or a missing `count_tokens`, OSError for a file that cannot be opened.
    """
    path = Path(path)
    if format == _OWN_FORMAT:
        return Trace.load(path)
    conversations: Iterable[ConversationTrace]
    if format in _TEXT_READERS:
        if count_tokens is None:
            raise WorkloadError("count_tokens", None, f"given for {format!r}, whose files hold texts")
        conversations = _TEXT_READERS[format](path, count_tokens, on_skip)
    elif format in _LENGTH_READERS:
        conversations = _LENGTH_READERS[format](path)
    elif format == _BURSTGPT:
        conversations = read_burstgpt(path, on_skip)
    else:
        raise WorkloadError("format", format, f"one of {', '.join(FORMATS)}")
    trace = Trace(path.name, tuple(conversations))
    if not trace.conversations:
        raise TraceError(path, None, "holds no conversation that can be served")
    return trace
