"""The log: one JSON object per line for any record, without users' text."""

from __future__ import annotations

import io
import json
import logging

import pytest

from pensieve_jax.server.logs import is_text, log_error, log_request, log_to
from tests.log_state import kept_log

SECRET = "words of a prompt"


@pytest.fixture
def stream(request):
    """Yield the log's stream in the format of the parameter; restore the former destination afterwards."""
    stream = io.StringIO()
    with kept_log():
        log_to(stream, log_format=getattr(request, "param", "json"))
        yield stream


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_a_line(stream):
    log_request("req_1", status=200, counts={"prompt_tokens": 3})
    (line,) = lines(stream)
    assert (
        line.items() >= {"level": "info", "message": "request", "request_id": "req_1", "status": 200}.items()
    )
    assert line["counts"] == {"prompt_tokens": 3} and line["time"].endswith("+00:00")


def test_an_error_is_logged_with_its_class_its_locations_and_its_causes(stream):
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


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error", "pensieve_jax.server.main"])
def test_records_of_other_packages_are_one_line_without_the_errors_text(stream, name):
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        message = f"Task exception was never retrieved\nfuture: <Task exception={error!r}>"
        logging.getLogger(name).error(message, exc_info=error)
    (line,) = lines(stream)
    assert line["message"] == "Task exception was never retrieved"
    assert line["error"]["kind"] == "builtins.ValueError"
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("stream", ["text"], indirect=True)
def test_on_a_terminal_a_request_is_a_short_line(stream):
    usage = {
        "prompt_tokens": 37,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 27},
    }
    fields = {"method": "POST", "route": "/v1/responses", "duration_ms": 124.5, "client_gone": False}
    log_request("req_1", **fields, status=200, counts=usage)
    (line,) = stream.getvalue().splitlines()
    assert line[8:] == " POST /v1/responses 200, 124 ms, 37 + 9 tokens, 27 cached"
    log_request("req_2", **fields | {"client_gone": True}, status=499)
    assert stream.getvalue().splitlines()[1].endswith("499, 124 ms, the client left")


@pytest.mark.parametrize("stream", ["text"], indirect=True)
def test_on_a_terminal_successful_polls_are_not_logged_and_failures_are(stream):
    log_request("req_1", method="GET", route="/v1/pensieve/trees", status=200)
    assert stream.getvalue() == ""
    log_request("req_2", method="GET", route=None, status=404)
    assert "GET no such path 404" in stream.getvalue()
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        log_error("req_3", error)
        logging.getLogger("asyncio").error("A task failed\n%r", error, exc_info=error)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and all("builtins.ValueError" in line for line in lines[1:])
    assert "req_3" in lines[1] and SECRET not in stream.getvalue()


def test_the_json_format_is_the_default_without_a_terminal(monkeypatch):
    stream = io.StringIO()
    assert not is_text("auto", stream) and is_text("text", stream) and not is_text("json", stream)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    assert is_text("auto", stream) and not is_text("json", stream)
