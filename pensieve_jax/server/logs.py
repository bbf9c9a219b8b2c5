"""The log of a server: ids, counts and times, but never text of a prompt or reply.

Owns: the two line formats, JSON for programs and short text for terminals, which parts of an error are
logged, and the end of the log.
Does not know: where lines go beyond a stream, or how they are queued (`log_writer`).

An exception's message may quote a prompt. Therefore only its class and the place where it was raised are
logged.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import msgspec

from pensieve_jax.server.log_writer import LogWriter

LOGGER = logging.getLogger("pensieve_jax.server")
_FIELDS = "fields"
_QUIET: Final = ("GET", "HEAD")
_ENGINES: Final = ("pensieve_jax", "jax")  # loggers of an engine, shown from WARNING up
_FLUSH_S: Final = 1.0  # how long the end of the process waits for the reader of the log
_writers: dict[int, LogWriter] = {}  # by file descriptor
type LogFormat = Literal["auto", "json", "text"]


class JsonLines(logging.Formatter):
    """Formatter that writes a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Write time, level and message, then the record's own fields."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": _first_line(record),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = describe_error(record.exc_info[1])
        return msgspec.json.encode(line).decode()


class TextLines(logging.Formatter):
    """Formatter that writes a record as short text for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the time of day and the event."""
        fields = getattr(record, _FIELDS, {})
        words = _request_words(fields) if _is_request(fields) else _first_line(record)
        error = fields.get("error")
        if record.exc_info and record.exc_info[1] is not None:
            error = describe_error(record.exc_info[1])
        if error is not None:
            at = error["at"][-1] if error["at"] else "?"
            words += f": {error['kind']} at {at} ({fields.get('request_id', 'no request')})"
        return f"{datetime.fromtimestamp(record.created):%H:%M:%S} {words}"


class _Worth(logging.Filter):
    """Filter for terminals that hides successful GET and HEAD requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, _FIELDS, {})
        return not _is_request(fields) or fields["method"] not in _QUIET or fields["status"] >= 400


def _is_request(fields: Mapping[str, Any]) -> bool:
    return "method" in fields and "status" in fields


def _request_words(fields: Mapping[str, Any]) -> str:
    counts = fields.get("counts", {})
    words = f"{fields['method']} {fields.get('route') or 'no such path'} {fields['status']}"
    words += f", {fields.get('duration_ms', 0):.0f} ms"
    if "prompt_tokens" in counts:
        words += f", {counts['prompt_tokens']} + {counts['completion_tokens']} tokens"
        words += f", {counts['prompt_tokens_details']['cached_tokens']} cached"
    return words + (", the client left" if fields.get("client_gone") else "")


def _first_line(record: logging.LogRecord) -> str:
    return record.getMessage().partition("\n")[0]  # further lines of asyncio quote errors


def is_text(log_format: LogFormat, stream: TextIO) -> bool:
    """Return whether lines are text; `auto` means text on a terminal and JSON elsewhere."""
    return stream.isatty() if log_format == "auto" else log_format == "text"


def log_to(stream: TextIO | None = None, level: int = logging.INFO, log_format: LogFormat = "json") -> None:
    """Write the logs of this server and of its libraries to one place and nowhere else.

    By default this is stderr, through a queue: a log call never waits for the reader of the log.
    """
    handler = _stderr_writer() if stream is None else logging.StreamHandler(stream)
    stream = stream or sys.stderr
    handler.filters.clear()
    if is_text(log_format, stream):
        handler.setFormatter(TextLines())
        handler.addFilter(_Worth())
    else:
        handler.setFormatter(JsonLines())
    for name in (LOGGER.name, "asyncio", "opentelemetry", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.setLevel(level)
        logger.propagate = name == "uvicorn.error"
    for name in _ENGINES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(level, logging.WARNING))


def flush_log() -> None:
    """Wait up to a second until the lines so far are written. A normal exit calls this by itself."""
    for writer in _writers.values():
        writer.flush_for(_FLUSH_S)


def num_dropped_lines() -> int:
    """Return the number of lines that this process dropped because the reader of its log had stopped."""
    return sum(writer.num_dropped for writer in _writers.values())


def _stderr_writer() -> logging.Handler:
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # a stream of a test has no descriptor
        return logging.StreamHandler(sys.stderr)
    if not _writers:
        atexit.register(flush_log)
    return _writers.setdefault(descriptor, LogWriter(descriptor))


def log_uncaught() -> None:
    """Log errors that end this process or a thread. Python's own handlers would print their messages."""
    sys.excepthook = lambda kind, error, trace: _log_end(error)
    threading.excepthook = lambda args: _log_end(args.exc_value)


def _log_end(error: BaseException | None) -> None:
    LOGGER.critical("ended by an unexpected error", exc_info=error)


def log_end_of_task(log: logging.Logger, sentence: str) -> Callable[[asyncio.Task[None]], None]:
    """Return a done callback that logs `sentence` if the task failed.

    It is for tasks that run as long as the server, because no caller awaits them earlier.
    """

    def note(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error(sentence, exc_info=error)

    return note


def log_request(request_id: str, **fields: Any) -> None:
    """Log a finished request."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("request", extra={_FIELDS: {"request_id": request_id, **fields}})


def log_error(request_id: str, error: BaseException) -> None:
    """Log an unexpected error that occurred while a request was answered."""
    LOGGER.error("error", extra={_FIELDS: {"request_id": request_id, "error": describe_error(error)}})


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the class and traceback locations of an error and of its causes, without any message."""
    described: dict[str, Any] = {
        "kind": f"{type(error).__module__}.{type(error).__qualname__}",
        "at": [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)],
    }
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        described["cause"] = describe_error(cause)
    return described
