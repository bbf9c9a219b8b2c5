"""Decoding of JSON bodies to structs, with errors that name the path of the invalid field.

Owns: decoding a body, listing its unknown fields, and rejecting unsupported ones by name; translating
msgspec's messages to `<field> is <value>, but must be <limit>.`; locating a lone surrogate in a body that
msgspec cannot decode.
Does not know: the fields of any request; the structs define them. Called by `HttpRequest.decode` and by the
parser of response items.

A field of OpenAI's API that this server does not support is in its struct's `UNSUPPORTED`, with the values
that ask for no effect. Any other value is rejected by name. A field that belongs to another route is rejected
with a hint. A field that no struct knows is ignored, but listed, so that a client can see that it had no
effect.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
import types
import typing
from collections.abc import Mapping, Sized
from typing import Any, ClassVar, Final, Literal, NamedTuple, get_args, get_origin

import msgspec

from pensieve_jax.server.http.body_values import check_num_values
from pensieve_jax.server.http.errors import ApiError, invalid_value, misplaced, unsupported

MAX_ITEMS: Final = 4096
"""Limit of a list of objects in a body: messages, items, or the parts of one of them."""
MAX_IGNORED: Final = 500
"""Limit of unknown fields that are listed; the response header has no room for more."""
MAX_DEPTH_ERROR = "The body is nested too deeply."
_NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {})
# msgspec gives the path, the bound and the expected type of an invalid field only in the text of its error.
# These patterns read that text. An error that a release words otherwise is reported less precisely.
_PATH: Final = re.compile(r" - at `(?:key in )?\$(?P<path>.*)`\Z")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_BOUND: Final = re.compile(r"Expected `\w+` (?P<sign><=|>=|<|>) (?P<bound>\S+)\Z")
_KINDS: Final = re.compile(r"Expected `(?P<kinds>[^`]*)`, got `")
_BOUNDS: Final[Mapping[str, str]] = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_WORDS: Final[Mapping[str, str]] = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Matches an escape: of a pair of surrogates, of a lone one, or any other.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F])|.)", re.DOTALL
)
_LONGEST_NAMED: Final = 2**16  # bytes; in longer bodies the field with the surrogate is not searched for
_LONGEST_PATH: Final = 200  # characters of a path in an error: unknown field names can have any length
_NAMES: Final = {True: "true", False: "false"}
_STEP: Final = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")


type Offers = Literal["auto", "functions", "ignore"]
"""How the tools that requests offer are treated, as in `ServerSettings.tools`."""


class Body(msgspec.Struct):
    """A JSON object of a request.

    Attributes:
        UNSUPPORTED: fields of OpenAI's API that this server does not implement, each with the values that ask
          for no effect and are accepted; None is always accepted.
        IGNORED: fields of OpenAI's API that are accepted and change nothing by design, such as labels.
        MISPLACED: fields that belong to other routes, each with a hint that names the right route or field.
          Values that ask for nothing, such as False, are accepted; if a field is in UNSUPPORTED too, the
          values there.
        OPTIONAL_OFFERS: fields that offer the model options it need not use, such as tools, each with the
          values of `type` in its entries that are functions. A server setting can have all or the others
          ignored.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    MISPLACED: ClassVar[Mapping[str, str]] = {}
    OPTIONAL_OFFERS: ClassVar[Mapping[str, tuple[str | None, ...]]] = {}


def decode_body[T](body: bytes, kind: type[T], *, offers: Offers = "auto") -> tuple[T, tuple[str, ...]]:
    """Decode a body to `kind`, and return it with the paths of its unknown fields.

    Fields in `OPTIONAL_OFFERS` are decoded as others with "auto". With "ignore" they are left out and listed;
    with "functions" so are their entries that are not functions, with their place.

    Raises ApiError 400 with the path of the field as `param`.
    """
    check_num_values(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        surrogate = lone_surrogate(body)
        if surrogate is not None:
            raise surrogate from None
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", MAX_DEPTH_ERROR) from None
    left_out: tuple[str, ...] = ()
    if offers != "auto":
        value, left_out = _without_offers(value, kind, functions_stay=offers == "functions")
    converted, ignored = convert(value, kind)
    return converted, (*left_out, *ignored)


def convert[T](value: Any, kind: type[T], at: str = "") -> tuple[T, tuple[str, ...]]:
    """Convert an already decoded value as `decode_body` does; `at` is the path of the value."""
    ignored: dict[str, None] = {}
    _check_fields(value, kind, at, ignored)
    try:
        return msgspec.convert(value, kind), tuple(ignored)
    except msgspec.ValidationError as error:
        raise error_of(error, value, kind, at) from None
    except RecursionError:
        raise ApiError(400, "invalid_json", MAX_DEPTH_ERROR) from None


def check_num_items(value: Sized, at: str) -> None:
    """Raise ApiError 400 for a list of more than `MAX_ITEMS` objects."""
    if len(value) > MAX_ITEMS:
        raise invalid_value(at, f"{at} has {len(value)} items, but must have at most {MAX_ITEMS}.")


def _without_offers(value: Any, kind: Any, *, functions_stay: bool) -> tuple[Any, tuple[str, ...]]:
    """Return an object without what its `OPTIONAL_OFFERS` hold, and the paths of what is left out."""
    body = _body_of(kind, value) if isinstance(value, dict) else None
    if body is None:
        return value, ()
    rest, left_out = dict(value), []
    for name, inner in value.items():
        functions = body.OPTIONAL_OFFERS.get(name)
        if functions is None or not inner or not isinstance(inner, list):
            continue
        if not functions_stay:
            del rest[name]
            left_out.append(name)
            continue
        is_other = [isinstance(one, dict) and one.get("type") not in functions for one in inner]
        rest[name] = [one for one, other in zip(inner, is_other, strict=True) if not other]
        left_out += [f"{name}[{index}]" for index, other in enumerate(is_other) if other]
    return rest, tuple(left_out[:MAX_IGNORED])


def _check_fields(value: Any, kind: Any, at: str, ignored: dict[str, None]) -> None:
    """Reject unsupported fields and collect unknown ones, in a value that should be a `kind`."""
    if isinstance(value, dict):
        body = _body_of(kind, value)
        if body is None:
            return
        known = _fields(body)
        for name, inner in value.items():
            path = f"{at}.{name}" if at else name
            if name in known:
                if isinstance(inner, dict | list):
                    _check_fields(inner, known[name], path, ignored)
            elif name in body.UNSUPPORTED:
                taken = body.UNSUPPORTED[name]
                if inner is not None and not _is_one_of(inner, taken):
                    if name in body.MISPLACED:
                        raise misplaced(path, body.MISPLACED[name])
                    raise unsupported(path, taken=taken)
            elif name in body.MISPLACED and not _is_one_of(inner, _NOTHING):
                raise misplaced(path, body.MISPLACED[name])
            elif name not in body.IGNORED and len(ignored) < MAX_IGNORED:
                ignored[re.sub(r"\[\d+\]", "[]", path)] = None
    elif isinstance(value, list):
        item = _item_of(kind)
        if item is not None:
            check_num_items(value, at)
            for index, inner in enumerate(value):
                if isinstance(inner, dict | list):
                    _check_fields(inner, item, f"{at}[{index}]", ignored)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a JSON value equals one of these, without mixing up 0 and False."""
    return any(value == other and (isinstance(value, bool) == isinstance(other, bool)) for other in values)


@functools.cache
def _fields(body: type[Body]) -> dict[str, Any]:
    """Return the types of a struct's fields by their JSON names."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(body)}


@functools.cache
def _options(kind: Any) -> tuple[Any, ...]:
    """Return the member types of a union, or the type itself; resolve aliases and annotations."""
    if isinstance(kind, typing.TypeAliasType):
        return _options(kind.__value__)
    if typing.get_origin(kind) is typing.Annotated:
        return _options(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(one for option in typing.get_args(kind) for one in _options(option))
    return (kind,)


def _body_of(kind: Any, value: dict[str, Any]) -> type[Body] | None:
    """Return the struct type of an object; in a tagged union, the tag selects it."""
    bodies = [one for one in _options(kind) if isinstance(one, type) and issubclass(one, Body)]
    if len(bodies) > 1:
        for body in bodies:
            config = body.__struct_config__
            if config.tag_field is not None and value.get(config.tag_field) == config.tag:
                return body
        return None
    return bodies[0] if bodies else None


@functools.cache
def _item_of(kind: Any) -> Any:
    """Return the item type of a list type, or None if its items cannot be structs."""
    for one in _options(kind):
        if typing.get_origin(one) in (list, tuple) and typing.get_args(one):
            item = typing.get_args(one)[0]
            if any(isinstance(each, type) and issubclass(each, Body) for each in _options(item)):
                return item
    return None


class _JsonRepr(reprlib.Repr):
    """A shortened `repr` of a value as in the engine's errors, but with JSON's names."""

    def __init__(self) -> None:
        super().__init__(maxstring=100)

    def repr_bool(self, value: bool, level: int) -> str:
        return _NAMES[value]

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


def error_of(error: msgspec.ValidationError, value: Any, kind: Any, at: str) -> ApiError:
    """Return the ApiError for a msgspec error.

    Args:
      error: the error that msgspec raised.
      value: the value that was converted.
      kind: the type it was converted to, usually a struct.
      at: the path of the value in the body.
    """
    text = str(error)
    match = _PATH.search(text)
    reason = text[: match.start()] if match else text
    inner, wrong = _follow_path(value, match["path"] if match else "", reason)
    path = (at + inner).removeprefix(".")
    missing = _MISSING.match(reason)
    if missing:
        path = f"{path}.{missing['name']}".removeprefix(".")
        return ApiError(400, "missing_required_parameter", f"{path} is missing.", param=path)
    limit = _limit(reason, kind, inner)
    if not path:
        limit = limit or "readable"
        return ApiError(400, "invalid_value", _sentence("The body", wrong, limit))
    if limit is None:
        return invalid_value(path, f"{path} cannot be read: {reason}.")
    return invalid_value(path, _sentence(path, wrong, limit))


def _sentence(field: str, value: Any, limit: str) -> str:
    return f"{field} is {_JsonRepr().repr(value)}, but must be {limit}."


def lone_surrogate(body: bytes) -> ApiError | None:
    """Return the error for a body that msgspec cannot decode because of a lone surrogate, else None.

    JSON can escape a lone surrogate, but UTF-8 text cannot contain one. Clients send one when they cut a
    text between the two surrogates of an emoji.
    """
    # Escape by escape, so that other threads can run in between.
    if not any(found["lone"] for found in _ESCAPE.finditer(body)):
        return None
    what = "must be text that UTF-8 can hold: it contains a lone surrogate, half of a character."
    if len(body) > _LONGEST_NAMED:
        return ApiError(400, "invalid_value", f"The body {what}")
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError):  # invalid JSON anyway
        return None
    found = _surrogate_path(value)
    if found is None:
        return None
    if not found or len(found) > _LONGEST_PATH:
        return ApiError(400, "invalid_value", f"The body {what}")
    return invalid_value(found, f"{found} {what}")


class _Step(NamedTuple):
    """One key or index of a path, linked to the step before it."""

    before: _Step | None
    name: str | int


def _surrogate_path(value: Any) -> str | None:
    """Return the path of the first string, or of the object with a key, that has a lone surrogate.

    A path is formatted only for the result, because a body may have a million values.
    """
    waiting: list[tuple[_Step | None, Any]] = [(None, value)]
    while waiting:
        step, inner = waiting.pop()
        if isinstance(inner, str):
            if _SURROGATE.search(inner):
                return _written(step)
        elif isinstance(inner, dict):
            if any(map(_SURROGATE.search, inner)):
                return _written(step)
            waiting += [(_Step(step, name), each) for name, each in reversed(inner.items())]
        elif isinstance(inner, list):
            waiting += [(_Step(step, index), inner[index]) for index in reversed(range(len(inner)))]
    return None


def _written(step: _Step | None) -> str:
    parts: list[str] = []
    while step is not None:
        parts.append(f"[{step.name}]" if isinstance(step.name, int) else f".{step.name}")
        step = step.before
    return "".join(reversed(parts)).removeprefix(".")


def _limit(reason: str, kind: Any, path: str) -> str | None:
    """Return the words that complete "must be", or None for an unknown reason of msgspec."""
    bound = _BOUND.match(reason)
    if bound:
        # Integers are not converted: a float cannot represent 2**63 - 1 exactly.
        is_whole = bound["bound"].lstrip("-").isdecimal()
        return f"{_BOUNDS[bound['sign']]} {bound['bound'] if is_whole else f'{float(bound["bound"]):.20g}'}"
    kinds = _KINDS.match(reason)
    if kinds:
        names = kinds["kinds"].split(" | ")
        words = [_WORDS[name] for name in names if name in _WORDS and name != "null"]
        return " or ".join(words) or None
    if reason.startswith("Invalid enum value"):
        return _one_of(kind, path.removeprefix("."))
    return None


def _one_of(kind: Any, name: str) -> str | None:
    """Return the choices of a Literal field of a struct, or None for any other field."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return None
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    choices = get_args(types[name]) if get_origin(types.get(name)) is Literal else ()
    return f"one of {', '.join(map(str, choices))}" if choices else None


def _follow_path(value: Any, path: str, reason: str) -> tuple[str, Any]:
    """Follow a msgspec path; return it with key names in place of `...`, and the value there."""
    found = ""
    for step in _STEP.finditer(path):
        key: Any = step["name"]
        if step["index"] is not None and isinstance(value, list):
            key = int(step["index"])
            found += f"[{key}]"
        else:
            if step["index"] is not None:
                key = _wrong_key(value, reason)
            found += f".{key}"
        try:
            value = value[key]
        except (LookupError, TypeError):  # msgspec's error is about a key, not a value
            return found, None
    return found, value


def _wrong_key(value: Mapping[str, Any], reason: str) -> str:
    """Return the first key whose value has the type that msgspec rejected; msgspec does not name the key."""
    got = reason.rpartition("got `")[2].rstrip("`")
    return next((key for key, inner in value.items() if _kind(inner) == got), "...")


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), type(value).__name__)
