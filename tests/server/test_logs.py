"""The log: a JSON object a line, whatever is logged, and nobody's words in it."""

from __future__ import annotations

import io
import json
import logging

import pytest

from pensieve_jax.server.logs import LOGGER, log_error, log_request, log_to

SECRET = "words of a prompt"
NAMES = (LOGGER.name, "asyncio", "uvicorn", "uvicorn.error")


@pytest.fixture
def stream():
    """Where the log goes; afterwards it goes where it went before."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    stream = io.StringIO()
    log_to(stream)
    yield stream
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_a_line(stream):
    log_request("req_1", status=200, counts={"prompt_tokens": 3})
    (line,) = lines(stream)
    assert (
        line.items() >= {"level": "info", "message": "request", "request_id": "req_1", "status": 200}.items()
    )
    assert line["counts"] == {"prompt_tokens": 3} and line["time"].endswith("+00:00")


def test_an_error_is_its_class_its_places_and_its_causes(stream):
    try:
        try:
            raise ValueError(SECRET)
        except ValueError as error:
            raise RuntimeError(SECRET) from error
    except RuntimeError as error:
        log_error("req_1", error)
    (line,) = lines(stream)
    assert line["error"]["kind"] == "builtins.RuntimeError"
    assert line["error"]["cause"]["kind"] == "builtins.ValueError"
    assert "test_logs.py" in line["error"]["at"][0]
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error", "pensieve_jax.server.listening"])
def test_what_others_log_is_a_line_once_and_quotes_no_error(stream, name):
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        message = f"Task exception was never retrieved\nfuture: <Task exception={error!r}>"
        logging.getLogger(name).error(message, exc_info=error)
    (line,) = lines(stream)
    assert line["message"] == "Task exception was never retrieved"
    assert line["error"]["kind"] == "builtins.ValueError"
    assert SECRET not in stream.getvalue()
