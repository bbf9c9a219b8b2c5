"""A trace file given by its path.

Owns: guessing the format, counting tokens of texts without a tokenizer, and reporting rows that were left
out.
Does not know: flags of users or arrivals.
Called by programs and `common.session_flags`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pensieve_jax import ConfigError
from pensieve_jax.text import load_tokenizer
from pensieve_lab.workload import (
    TEXT_FORMATS,
    CountTokens,
    Trace,
    TraceError,
    count_words,
    guess_format,
    read_trace,
)

WORDS = "words"
"""Value of `--tokenizer` that is not a directory."""
TOKENIZER_HELP = f'Directory of a tokenizer for traces of texts, or "{WORDS}" to count words and punctuation.'
_MAX_TOLD = 5


def read_trace_file(
    path: str, format: str | None, tokenizer: str | None, *, flag: str = "--trace"
) -> tuple[Trace, str]:
    """Return the trace and the format as which it was read; report skipped rows on standard error.

    Raises ConfigError, which names `flag`, for a file that cannot be opened, and for one of texts without a
    tokenizer; TraceError for invalid content.
    """
    skipped = _SkippedRows()
    try:
        format = format or guess_format(path)
        if tokenizer is None and format in TEXT_FORMATS:
            limit = f'given, or "{WORDS}", for a file of {format}, which holds texts'
            raise ConfigError("--tokenizer", None, limit)
        trace = read_trace(path, format=format, count_tokens=_count_tokens(tokenizer), on_skip=skipped.see)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(flag, path, "a file that can be read", reason) from error
    skipped.end(Path(path))
    return trace, format


class _SkippedRows:
    """Reporter of the first few skipped rows, and of the number of further ones."""

    def __init__(self) -> None:
        self._num_seen = 0

    def see(self, skipped: TraceError) -> None:
        self._num_seen += 1
        if self._num_seen <= _MAX_TOLD:
            print(f"left out: {skipped}", file=sys.stderr)

    def end(self, path: Path) -> None:
        if self._num_seen > _MAX_TOLD:
            print(f"left out: {self._num_seen - _MAX_TOLD:,} more of {path}", file=sys.stderr)


def _count_tokens(tokenizer: str | None) -> CountTokens | None:
    if tokenizer is None:
        return None
    if tokenizer == WORDS:
        return count_words
    found = load_tokenizer(tokenizer)
    if found is None:
        raise ConfigError("--tokenizer", tokenizer, "a directory with a tokenizer")
    return lambda text: len(found.encode(text, add_bos=False))
