"""OpenAI's batch format: a line of requests in, a line of results out.

Owns: the fields of both, and their conversion to a prompt with parameters, and from an output.
Does not know: files, other formats of lines, or how turns are run.

A request is `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, or the same
with `/v1/completions`. The body is that of the HTTP API, without streams, tools and forms of replies. Fields
of `SamplingParams` count in it, too. A field that is null counts as left out.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from pensieve_jax import InvalidRequestError, Output, PensieveError, SamplingParams

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
_PROMPT_OF: Final = {CHAT: "messages", TEXT: "prompt"}
_KEYS: Final = ("custom_id", "method", "url", "body")
_WITHOUT_PLACE: Final = ("logprobs", "prompt_logprobs", "structured")  # in a line of results
_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(SamplingParams)).difference(_WITHOUT_PLACE)
# Values that ask for nothing.
_PLAIN: Final[dict[str, Any]] = {
    **{"n": 1, "stream": False, "logprobs": False, "echo": False, "store": False},
    **{"parallel_tool_calls": True, "tools": [], "tool_choice": "none"},
}
_LABELS: Final = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
_KNOWN: Final = _FIELDS | set(_PLAIN) | set(_LABELS) | {"model", "max_completion_tokens"}

type Line = dict[str, Any]


def is_request(line: Line) -> bool:
    """Return whether an object of a file is a request of this format, perhaps an invalid one."""
    return "custom_id" in line or "body" in line


def read_request(
    line: Line, model: str | None, parse: Callable[[str, Any, dict[str, Any]], Any]
) -> tuple[str, Any]:
    """Return `url` and what `parse` makes of the prompt's field, its value and the parameters.

    Args:
      line: the object of the line.
      model: the name that `body.model` must have; None accepts any.
      parse: makes the turn; the errors that it raises name fields of the body.

    Raises:
      InvalidRequestError: a missing, unknown or unsupported field.
    """
    for name in line:
        if name not in _KEYS:
            raise InvalidRequestError(
                f"unknown key {name}", line[name], "left out", f"known are {', '.join(_KEYS)}"
            )
    if line.get("method", "POST") != "POST":
        raise InvalidRequestError("method", line["method"], "POST")
    url, body = line.get("url"), line.get("body")
    if url not in _PROMPT_OF:
        raise InvalidRequestError("url", url, f"one of {', '.join(_PROMPT_OF)}")
    if not isinstance(body, dict):
        raise InvalidRequestError("body", body, "an object")
    try:
        given = {name: value for name, value in body.items() if value is not None}
        return url, _turn(given, url, model, parse)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"body.{error.field}", error.value, error.limit, error.hint) from error


def _turn(
    body: dict[str, Any], url: str, model: str | None, parse: Callable[[str, Any, dict[str, Any]], Any]
) -> Any:
    prompt = _PROMPT_OF[url]
    if prompt not in body:
        raise InvalidRequestError(prompt, None, "given")
    for name, value in body.items():
        # In Completions, logprobs of 0 asks for those of the reply; Python finds it equal to False.
        if name in _PLAIN and (type(value), value) != (type(_PLAIN[name]), _PLAIN[name]):
            limit = f"left out, or {_PLAIN[name]!r}"
            raise InvalidRequestError(name, value, limit, "pensieve serve answers such requests")
        if name not in _KNOWN and name != prompt:
            raise InvalidRequestError(name, value, "left out", "pensieve serve has all fields of the API")
    if model is not None and body.get("model", model) != model:
        hint = "change the file, or name the model so by --served_model_name"
        raise InvalidRequestError("model", body["model"], f"{model!r} or left out", hint)
    params = {name: value for name, value in body.items() if name in _FIELDS}
    if "max_completion_tokens" in body:
        params["max_tokens"] = body["max_completion_tokens"]
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    if isinstance(params.get("logit_bias"), dict):
        params["logit_bias"] = _biases(params["logit_bias"])
    return parse(prompt, body[prompt], params)


def _biases(given: dict[str, Any]) -> dict[int, Any]:
    """Return biases by token id, which JSON writes as text."""
    for name in given:
        if not name.isdecimal() or len(name) > 9:
            raise InvalidRequestError("logit_bias", name, "an object whose names are token ids")
    return {int(name): bias for name, bias in given.items()}


def result_line(custom_id: str, url: str, model: str, output: Output) -> Line:
    """Return the line of a request that was answered."""
    usage = output.usage
    tokens = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_gpu_tokens + usage.swapped_in_tokens},
    }
    message: Line = {"role": "assistant", "content": output.text, "refusal": None}
    message |= {"reasoning_content": output.reasoning} if output.reasoning else {}
    return _answered(custom_id, url, model, message, output.finish_reason, tokens)


def stored_line(custom_id: str, url: str, model: str, text: str, finish_reason: str) -> Line:
    """Return the line of a request that an earlier run answered; its usage is unknown."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return _answered(custom_id, url, model, message, finish_reason, None)


def _answered(
    custom_id: str, url: str, model: str, message: Line, finish_reason: str, usage: Line | None
) -> Line:
    ended = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    kind, prefix = ("chat.completion", "chatcmpl") if url == CHAT else ("text_completion", "cmpl")
    choice = ended | ({"message": message} if url == CHAT else {"text": message["content"]})
    body = {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    response = {"status_code": 200, "request_id": secrets.token_hex(12), "body": body}
    return _line(custom_id, response, None)


def error_line(custom_id: str, error: PensieveError) -> Line:
    """Return the line of a request that was refused or failed."""
    return _line(custom_id, None, {"code": type(error).__name__, "message": str(error)})


def _line(custom_id: str, response: Line | None, error: Line | None) -> Line:
    request_id = f"batch_req_{secrets.token_hex(12)}"
    return {"id": request_id, "custom_id": custom_id, "response": response, "error": error}


def reply_of(line: Line) -> str | None:
    """Return the reply of a line of results, or None for another line."""
    try:
        (choice,) = line["response"]["body"]["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, TypeError, ValueError):
        return None
    return text if isinstance(text, str) and isinstance(line.get("custom_id"), str) else None
