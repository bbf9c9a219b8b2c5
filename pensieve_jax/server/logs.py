"""The log of a server: a JSON object a line, with ids, counts and times, and never a word of anybody's text.

Owns: the form of a line, and what of an error is written.
Does not know: where lines go beyond a stream.
Called by: `http` for requests and errors; the command that starts a server.

An exception's message may quote a prompt, so only its class and where it was raised are written.
"""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

LOGGER = logging.getLogger("pensieve_jax.server")
_FIELDS = "fields"


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level and message, then the record's own fields."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage().partition("\n")[0],  # asyncio quotes errors in further lines
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = describe_error(record.exc_info[1])
        return msgspec.json.encode(line).decode()


def log_to(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Write this server's log, and uvicorn's, as JSON lines to a stream (stderr), and nowhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for name in (LOGGER.name, "asyncio", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.setLevel(level)
        logger.propagate = name == "uvicorn.error"


def log_request(request_id: str, **fields: Any) -> None:
    """A request is over."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("request", extra={_FIELDS: {"request_id": request_id, **fields}})


def log_error(request_id: str, error: BaseException) -> None:
    """Something that nobody expected, while a request was answered."""
    LOGGER.error("error", extra={_FIELDS: {"request_id": request_id, "error": describe_error(error)}})


def describe_error(error: BaseException) -> dict[str, Any]:
    """The class of an error and of what caused it, and where each was raised; no message."""
    described: dict[str, Any] = {
        "kind": f"{type(error).__module__}.{type(error).__qualname__}",
        "at": [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)],
    }
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        described["cause"] = describe_error(cause)
    return described
