"""Checks of server answers against OpenAI's published API schema.

Owns: which schema an answer must satisfy, the exceptions and their reasons, and the part of the schema
document that this needs.
Does not know: which client asked.
Called by `programs.check_clients` and the server tests.

The document is `openapi.json` of github.com/openai/openai-openapi (MIT). `reduced` makes the file that tests
use of it: the schemas that answers of this server can reach, without descriptions and examples.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from pensieve_lab.clients.recorder import Exchange

SCHEMAS: Final = Path(__file__).parents[3] / "tests" / "server" / "openai" / "openai_schemas.json"
_EVENTS: Final = "text/event-stream"
_PLACES: Final = {
    ("POST", "/v1/responses"): ("Response", "ResponseStreamEvent"),
    ("GET", "/v1/responses/{}"): ("Response", "ResponseStreamEvent"),
    ("POST", "/v1/responses/{}/cancel"): ("Response", None),
    ("GET", "/v1/responses/{}/input_items"): ("ResponseItemList", None),
    ("POST", "/v1/responses/input_tokens"): ("TokenCountsResource", None),
    ("POST", "/v1/conversations"): ("ConversationResource", None),
    ("GET", "/v1/conversations/{}"): ("ConversationResource", None),
    ("POST", "/v1/conversations/{}"): ("ConversationResource", None),
    ("DELETE", "/v1/conversations/{}"): ("DeletedConversationResource", None),
    ("GET", "/v1/conversations/{}/items"): ("ConversationItemList", None),
    ("POST", "/v1/conversations/{}/items"): ("ConversationItemList", None),
    ("GET", "/v1/conversations/{}/items/{}"): ("ConversationItem", None),
    ("DELETE", "/v1/conversations/{}/items/{}"): ("ConversationResource", None),
    ("POST", "/v1/chat/completions"): ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    ("POST", "/v1/completions"): ("CreateCompletionResponse", "CreateCompletionResponse"),
    ("GET", "/v1/models"): ("ListModelsResponse", None),
    ("GET", "/v1/models/{}"): ("Model", None),
}
"""Schemas of a whole answer and of one stream event. The document has none for deleted responses."""
_ERROR: Final = "ErrorResponse"
EXCEPTED: Final = {
    "usage of a response that has not ended well": (
        "is null, as from OpenAI and as Open Responses demands; the document knows numbers only"
    ),
    "finish_reason in the stream of a completion": (
        "is null until the last piece, as from OpenAI; the document knows the last one only"
    ),
    "log-probability of the first token of an echoed prompt": (
        "is null, as from OpenAI's and vLLM's servers; the document knows numbers only"
    ),
}
"""Differences between the document and OpenAI's own server; the openai client's types differ there as well.
"""
_LEFT_OUT: Final = frozenset({"description", "example", "examples", "title", "x-oaiMeta"})


def reduced(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the document against which answers are checked."""
    schemas = document["components"]["schemas"]
    wanted = [name for names in _PLACES.values() for name in names if name is not None] + [_ERROR]
    found: dict[str, Any] = {}
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _without_prose(schemas[name])
            wanted += _references(schemas[name])
    return {
        "source": "openapi.json of https://github.com/openai/openai-openapi, without prose",
        "license": document["info"]["license"]["name"],
        "version": document["info"]["version"],
        "components": {"schemas": dict(sorted(found.items()))},
    }


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref" and isinstance(inner, str):
                yield inner.rpartition("/")[2]
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _without_prose(value: Any, *, names_fields: bool = False) -> Any:
    if isinstance(value, dict):
        found = {
            name: _without_prose(inner, names_fields=name == "properties")
            for name, inner in value.items()
            if names_fields or name not in _LEFT_OUT
        }
        # `nullable` is OpenAPI's older spelling, which JSON Schema validators do not know.
        is_nullable = not names_fields and found.pop("nullable", False) is True
        return {"anyOf": [found, {"type": "null"}]} if is_nullable else found
    if isinstance(value, list):
        return [_without_prose(inner) for inner in value]
    return value


class Schemas:
    """Schemas of a document, whole or reduced."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Use a parsed document."""
        self._components = document["components"]

    @classmethod
    def of_file(cls, path: Path = SCHEMAS) -> Schemas:
        """Read the document from a file."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def complaints(self, exchange: Exchange) -> list[str]:
        """Return the schema violations of an answer; none for routes that OpenAI does not have."""
        place = _place(exchange.method, exchange.path)
        if place is None:
            return []
        whole, event = _PLACES[place]
        where = " ".join(place)
        if exchange.status >= 400:
            return self._wrong(json.loads(exchange.answer), _ERROR, where)
        if exchange.kind != _EVENTS:
            return self._wrong(json.loads(exchange.answer), whole, where)
        return [line for one in events_of(exchange.answer) for line in self._wrong_event(one, event, where)]

    def num_bodies(self, exchange: Exchange) -> int:
        """Return the number of checked bodies and events of an exchange."""
        if _place(exchange.method, exchange.path) is None:
            return 0
        is_stream = exchange.kind == _EVENTS and exchange.status < 400
        return sum(1 for _ in events_of(exchange.answer)) if is_stream else 1

    def _wrong_event(self, value: Mapping[str, Any], schema: str | None, where: str) -> list[str]:
        if set(value) == {"error"}:
            return self._wrong(value, _ERROR, where)
        kind = value.get("type")
        where = f"{where} {kind or value.get('object')}"
        return self._wrong(value, schema and self._of_kind(schema, kind), where)

    def _of_kind(self, schema: str, kind: Any) -> str | None:
        """Return the option of a choice of schemas that describes this type, for more specific complaints."""
        schemas = self._components["schemas"]
        if "anyOf" not in schemas[schema]:
            return schema
        names = (option["$ref"].rpartition("/")[2] for option in schemas[schema]["anyOf"])
        return next((name for name in names if kind in schemas[name]["properties"]["type"]["enum"]), None)

    def _wrong(self, value: Any, schema: str | None, where: str) -> list[str]:
        if schema is None:
            return [f"{where}: the document has no such answer"]
        errors = self._validator(schema).iter_errors(_without_excepted(value))
        return [f"{where}: {error.json_path}: {error.message[:200]}" for error in errors]

    @functools.cache  # noqa: B019 - as long as the process
    def _validator(self, name: str) -> Draft202012Validator:
        schema = {"$ref": f"#/components/schemas/{name}", "components": self._components}
        return Draft202012Validator(schema)


def events_of(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream without its end mark and comments; the last event may be cut off."""
    for part in text.split("\n\n")[:-1]:
        data = [line[6:] for line in part.split("\n") if line.startswith("data: ")]
        if data and data != ["[DONE]"]:
            yield json.loads("\n".join(data))


@functools.cache
def _place(method: str, path: str) -> tuple[str, str] | None:
    """Return the key of `_PLACES` that matches a path with ids; if two match, the more specific one."""
    parts = path.partition("?")[0].split("/")
    found = [
        (known, pattern)
        for known, pattern in _PLACES
        for words in [pattern.split("/")]
        if known == method and len(words) == len(parts) and all(map(_fits, words, parts))
    ]
    return min(found, key=lambda row: row[1].count("{}"), default=None)


def _fits(word: str, part: str) -> bool:
    return word in ("{}", part)


def _without_excepted(value: Any) -> Any:
    """Return a body without the fields that `EXCEPTED` names."""
    if not isinstance(value, dict):
        return value
    found = dict(value)
    if "response" in found:
        found["response"] = _without_excepted(found["response"])
    if found.get("object") == "response" and found.get("usage") is None:
        del found["usage"]
    if found.get("object") == "text_completion":
        found["choices"] = [
            {**_with_first_token(choice), "finish_reason": choice["finish_reason"] or "stop"}
            for choice in found["choices"]
        ]
    return found


def _with_first_token(choice: dict[str, Any]) -> dict[str, Any]:
    columns = choice["logprobs"]
    if not columns or columns["token_logprobs"][:1] != [None]:
        return choice
    values = {"token_logprobs": [0.0, *columns["token_logprobs"][1:]]}
    return {**choice, "logprobs": columns | values | {"top_logprobs": [{}, *columns["top_logprobs"][1:]]}}


def write_reduced(document: Path, path: Path = SCHEMAS) -> None:
    """Write the file that tests use, with one schema per line."""
    found = reduced(json.loads(document.read_text(encoding="utf-8")))
    schemas = found.pop("components")["schemas"]
    head = json.dumps(found)[:-1]
    lines = [
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}" for name, value in schemas.items()
    ]
    text = head + ', "components": {"schemas": {\n' + ",\n".join(lines) + "\n}}}\n"
    path.write_text(text, encoding="utf-8")


def all_complaints(schemas: Schemas, exchanges: Iterable[Exchange]) -> list[str]:
    """Return the distinct schema violations of several exchanges."""
    return list(dict.fromkeys(line for exchange in exchanges for line in schemas.complaints(exchange)))


if __name__ == "__main__":
    write_reduced(Path(sys.argv[1]))
