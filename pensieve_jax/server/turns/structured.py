"""Structured output of requests: the fields that ask for it, and the form of the reply that they mean.

Owns: the fields of each route, the checks of a form that need no model, which field an error is about, and
where the form begins in a reply with reasoning.
Does not know: how masks are made, or how replies are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from pensieve_jax.core.errors import GrammarTooComplexError, InvalidRequestError, UnsupportedGrammarError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import ApiError, as_api_error, invalid_value
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.text.grammar import check_grammar

_MAX_CHECKED: Final = 256


class JsonSchemaFormat(Body):
    """The `json_schema` of a `response_format`.

    `name` and `description` are labels. A schema is always enforced, whether or not `strict` is true.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset({"description"})

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The `response_format` of Chat Completions and Completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"structural_tag": (), "grammar": (), "regex": ()}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class TextFormat(Body):
    """The `text.format` of Responses; its schema is beside its type."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"description"})

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class StructuredOutputs(Body):
    """The `structured_outputs` of vLLM: exactly one form."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "structural_tag": ("",),
        "whitespace_pattern": ("",),
        "disable_fallback": (False, True),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredFields(Body):
    """Fields of Chat Completions and Completions that ask for a form of the reply; one may be given.

    `guided_*` are the names that vLLM had for `structured_outputs` before 0.12.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None


class AskedForm(NamedTuple):
    """The form that a request asks for.

    Attributes:
      form: the form, or None.
      fields: the client's name of the field by the engine's name, for errors.
      ignored: paths of fields that have no effect.
    """

    form: StructuredOutput | None = None
    fields: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()


class _Wish(NamedTuple):
    """A field that asks for a form: its path, the form, and whether it may be loosened to any JSON object."""

    at: str
    make: Callable[[], StructuredOutput]
    is_loose: bool = False


async def asked_form(call: HttpRequest, body: StructuredFields) -> AskedForm:
    """Return the form that a chat or a completion asks for, and note what has no effect; raise ApiError."""
    return await _checked(call, _wishes(body))


async def asked_text_format(call: HttpRequest, text_format: TextFormat | None) -> AskedForm:
    """Return the form that a response's `text.format` asks for; see `asked_form`."""
    if text_format is None:
        return AskedForm()
    kind, schema, is_loose = text_format.type, text_format.schema, text_format.strict is False
    wishes = _format_wishes(kind, schema, "text.format", "text.format.schema", is_loose)
    return await _checked(call, wishes)


async def asked_schema(call: HttpRequest, schema: dict[str, Any] | None, at: str) -> AskedForm:
    """Return the form of a schema, whose path is `at`; None asks for none. See `asked_form`."""
    wishes = [] if schema is None else _format_wishes("json_schema", schema, at, at, False)
    return await _checked(call, wishes)


async def _checked(call: HttpRequest, wishes: list[_Wish]) -> AskedForm:
    if not wishes:
        return AskedForm()
    # A short schema can take long to check, so this never runs on the event loop.
    asked = await call.run_long(_form_of, wishes)
    call.notes.ignored_fields += asked.ignored
    return asked


def _wishes(body: StructuredFields) -> list[_Wish]:
    """Return what the fields of a request ask for."""
    found: list[_Wish] = []
    format_, outputs = body.response_format, body.structured_outputs
    if format_ is not None:
        given = format_.json_schema
        if format_.type == "json_schema" and given is None:
            raise _missing("response_format.json_schema")
        schema, is_loose = (None, False) if given is None else (given.schema, given.strict is False)
        at = "response_format"
        found += _format_wishes(format_.type, schema, at, "response_format.json_schema.schema", is_loose)
    if outputs is not None:
        for field in msgspec.structs.fields(StructuredOutputs):
            found += _wish(field.name, getattr(outputs, field.name), f"structured_outputs.{field.name}")
    for kind in ("json", "json_object", "regex", "choice", "grammar"):
        found += _wish(kind, getattr(body, f"guided_{kind}"), f"guided_{kind}")
    if len(found) > 1:
        others = f"{found[1].at} and {found[0].at} exclude each other; give only one form of the reply."
        raise invalid_value(found[1].at, others)
    return found


def _missing(path: str) -> ApiError:
    return ApiError(400, "missing_required_parameter", f"{path} is missing.", param=path)


def _format_wishes(kind: str, schema: Any, at: str, schema_at: str, is_loose: bool) -> list[_Wish]:
    if kind == "json_schema":
        if schema is None:
            raise _missing(schema_at)
        return [_Wish(schema_at, functools.partial(StructuredOutput.json_schema, schema), is_loose)]
    if schema is not None:
        sentence = f"{at}.type is {kind!r}, but must be 'json_schema' beside a schema."
        raise invalid_value(f"{at}.type", sentence)
    return [] if kind == "text" else [_Wish(at, StructuredOutput.json_object)]


def _wish(kind: str, value: Any, at: str) -> list[_Wish]:
    """Return what one field of vLLM's asks for; an empty form is one that no reply can have."""
    if value is None or (kind == "json_object" and value is False):
        return []
    if kind == "json_object":
        return [_Wish(at, StructuredOutput.json_object)]
    make = StructuredOutput.json_schema if kind == "json" else getattr(StructuredOutput, kind)
    return [_Wish(at, functools.partial(make, value))]


def _form_of(wishes: list[_Wish]) -> AskedForm:
    (wish,) = wishes
    ignored: tuple[str, ...] = ()
    try:
        form = wish.make()
        fields = {f"structured.{form.kind}": wish.at, "structured": wish.at}
    except InvalidRequestError as error:
        raise as_api_error(error, {error.field: wish.at}) from error
    try:
        _check(form)
    except InvalidRequestError as error:
        is_refused = isinstance(error, UnsupportedGrammarError | GrammarTooComplexError)
        if not wish.is_loose or not is_refused:
            raise as_api_error(error, fields) from error
        form, ignored = StructuredOutput.json_object(), (wish.at,)
        fields |= {"structured.json_object": wish.at}
        try:
            _check(form)
        except InvalidRequestError as missing:  # the library
            raise as_api_error(missing, fields) from missing
    return AskedForm(form, fields, ignored)


# Clients send one schema many times. Errors are not kept.
_check = functools.lru_cache(_MAX_CHECKED)(check_grammar)
