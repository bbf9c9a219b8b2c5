"""JSON bodies to structs, with the path of what is wrong.

Owns: how a body is decoded, which of its fields are unknown, and which are refused by name.
Does not know: any request's fields: the structs say.

A field of OpenAI's API that this server does not have is in a struct's `UNSUPPORTED`, with the values that
would change nothing; any other value is refused, by name. So is a field of another route
that would be missed, with a hint. A name that no struct knows is left alone, and listed, so that a client can
tell that it had no effect.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping, Sized
from typing import Any, ClassVar, Final

import msgspec

from pensieve_jax.server.http.errors import ApiError, invalid_value, misplaced, unsupported
from pensieve_jax.server.http.wrong_values import explained, lone_surrogate

MAX_ITEMS: Final = 4096
"""Of a list of objects in a body: messages, items, or the parts of one of them."""
MAX_IGNORED: Final = 500
"""Of names that a body has and no struct knows; an answer's header has no room for more of them."""
MAX_DEPTH_ERROR = "The body is nested too deeply."
_NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {})
_OFFER = "its model calls none, and only `pensieve serve --tools=ignore` takes them, without effect"


class Body(msgspec.Struct):
    """A JSON object of a request.

    Attributes:
      UNSUPPORTED: fields of OpenAI's API without the effect they ask for, each with the values that ask for
        none; beside them None.
      IGNORED: fields of OpenAI's API that are taken and change nothing by their nature, such as labels.
      MISPLACED: fields of other routes that would be missed here, each with where or under which name it is
        taken; beside values that ask for nothing, such as False.
      OFFERS: fields of UNSUPPORTED that offer the model what it may always leave alone; whoever starts a
        server may have them ignored.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    MISPLACED: ClassVar[Mapping[str, str]] = {}
    OFFERS: ClassVar[frozenset[str]] = frozenset()


def decode_body[T](body: bytes, kind: type[T], *, ignores_offers: bool = False) -> tuple[T, tuple[str, ...]]:
    """The body as `kind`, and the paths of fields that it does not know.

    With `ignores_offers`, what is in `OFFERS` is one of these fields instead of being refused.

    Raises ApiError 400 with the path of the field as `param`.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        surrogate = lone_surrogate(body)
        if surrogate is not None:
            raise surrogate from None
        raise ApiError(400, "invalid_json", f"The body is no JSON: {error}.") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", MAX_DEPTH_ERROR) from None
    offers = _offers(value, kind) if ignores_offers else {}
    if offers:
        value = {name: inner for name, inner in value.items() if name not in offers}
    converted, ignored = convert(value, kind)
    return converted, (*offers, *ignored)


def convert[T](value: Any, kind: type[T], at: str = "") -> tuple[T, tuple[str, ...]]:
    """As `decode_body`, of a value that is decoded already; `at` is its own path."""
    ignored: dict[str, None] = {}
    _look(value, kind, at, ignored)
    try:
        return msgspec.convert(value, kind), tuple(ignored)
    except msgspec.ValidationError as error:
        raise explained(error, value, kind, at) from None
    except RecursionError:
        raise ApiError(400, "invalid_json", MAX_DEPTH_ERROR) from None


def check_num_items(value: Sized, at: str) -> None:
    """Raise ApiError 400 for a list of more than `MAX_ITEMS` objects."""
    if len(value) > MAX_ITEMS:
        raise invalid_value(at, f"{at} has {len(value)} items, but must have at most {MAX_ITEMS}.")


def _offers(value: Any, kind: Any) -> dict[str, None]:
    """The names, in their order, of an object's own fields that offer something."""
    body = _body_of(kind, value) if isinstance(value, dict) else None
    if body is None:
        return {}
    return dict.fromkeys(
        name for name in value if name in body.OFFERS and value[name] and isinstance(value[name], list)
    )


def _look(value: Any, kind: Any, at: str, ignored: dict[str, None]) -> None:
    """Refuse what is unsupported, and collect what is unknown, in a value that should be a `kind`."""
    if isinstance(value, dict):
        body = _body_of(kind, value)
        if body is None:
            return
        known = _fields(body)
        for name, inner in value.items():
            path = f"{at}.{name}" if at else name
            if name in known:
                if isinstance(inner, dict | list):
                    _look(inner, known[name], path, ignored)
            elif name in body.UNSUPPORTED:
                taken = body.UNSUPPORTED[name]
                if inner is not None and not _is_one_of(inner, taken):
                    raise unsupported(path, _OFFER if name in body.OFFERS else "", taken)
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
                    _look(inner, item, f"{at}[{index}]", ignored)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether JSON wrote one of these; 0 is not False."""
    return any(value == other and (isinstance(value, bool) == isinstance(other, bool)) for other in values)


@functools.cache
def _fields(body: type[Body]) -> dict[str, Any]:
    """What the fields of a struct are, by the names that JSON gives them."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(body)}


@functools.cache
def _options(kind: Any) -> tuple[Any, ...]:
    """A type, or those of a union."""
    if isinstance(kind, typing.TypeAliasType):
        return _options(kind.__value__)
    if typing.get_origin(kind) is typing.Annotated:
        return _options(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(one for option in typing.get_args(kind) for one in _options(option))
    return (kind,)


def _body_of(kind: Any, value: dict[str, Any]) -> type[Body] | None:
    """The struct that an object should be; in a tagged union, its tag says which."""
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
    """What the items of a list are, where they may be structs."""
    for one in _options(kind):
        if typing.get_origin(one) in (list, tuple) and typing.get_args(one):
            item = typing.get_args(one)[0]
            if any(isinstance(each, type) and issubclass(each, Body) for each in _options(item)):
                return item
    return None
