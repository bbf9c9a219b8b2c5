"""Self-describing configuration fields: each states its default, limit, help and unit once.

Owns: how a limit is checked and worded, what follows from a class's fields (its checks, and the list of
attributes in its docstring), and which texts can be encoded. Command-line flags are derived from
`options_of`, too.
Does not know: any particular field, or absl.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from pensieve_jax.core.errors import ConfigError

_DOCUMENTED_WIDTH = 100
KEY = "option"


class Limit(NamedTuple):
    """What a value must be by itself, apart from other fields.

    Attributes:
      words: text that completes "must be".
      accepts: returns whether a value of any type is within the limit.
      choices: all accepted values, if they can be listed.
      must_be_stated: whether texts must state the limit, as type and choices do not show it.
    """

    words: str
    accepts: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    must_be_stated: bool = True


TRUTH = Limit("True or False", lambda value: isinstance(value, bool), must_be_stated=False)
PATH = Limit("a path as a string", lambda value: isinstance(value, str), must_be_stated=False)


def count(at_least: int) -> Limit:
    """Return the limit of integers that are at least `at_least`."""
    return Limit(f"an integer of at least {at_least}", lambda value: is_count(value, at_least))


def number(words: str, accepts: Callable[[float], bool]) -> Limit:
    """Return the limit of numbers for which `accepts` is true; it must be false for NaN."""
    return Limit(words, lambda value: _is_number(value) and accepts(value))


def one_of(choices: tuple[Any, ...]) -> Limit:
    """Return the limit of these choices, which are all of one type."""
    kind = type(choices[0])
    must_be_stated = kind is not str
    return Limit(f"one of {choices}", lambda v: isinstance(v, kind) and v in choices, choices, must_be_stated)


def instance_of(kind: type) -> Limit:
    """Return the limit of instances of this class."""
    return Limit(f"a {kind.__name__}", lambda value: isinstance(value, kind), must_be_stated=False)


def beside_others(words: str) -> Limit:
    """Return a limit that only the class can check, since it depends on other fields."""
    return Limit(words, lambda value: True)


def optional(limit: Limit) -> Limit:
    """Return the limit of None and what `limit` accepts."""
    words = f"None or {limit.words}"
    return limit._replace(words=words, accepts=lambda value: value is None or limit.accepts(value))


def is_count(value: object, at_least: int) -> TypeGuard[int]:
    """Return whether `value` is an integer, not a bool, and at least `at_least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class OptionRow(NamedTuple):
    """The metadata of a field."""

    limit: Limit
    help: str
    unit: str


def option[T](default: T, limit: Limit, help: str, *, unit: str = "") -> T:
    """Return a dataclass field with a default, a limit and a help text.

    Args:
      default: default value.
      limit: what the value must be.
      help: what the field means, as sentences, for the docstring and the command line.
      unit: "bytes" if the command line accepts sizes such as 16GiB; otherwise the field's name has the unit.
    """
    return field(default=default, metadata={KEY: OptionRow(limit, help, unit)})


def part(kind: type, help: str) -> dict[str, Any]:
    """Return the metadata of a field that is a configuration itself; its `default_factory` is `kind`."""
    return {KEY: OptionRow(instance_of(kind), help, "")}


@dataclass(frozen=True)
class Option:
    """A field's public description.

    Attributes:
      name: name of the field.
      kind: type of the field without None: bool, int, float, str, tuple, or the class of a group.
      default: default value; for a group, the class that makes it.
      limit: what the value must be.
      help: what the field means.
      unit: as in `option`.
    """

    name: str
    kind: type
    default: Any
    limit: Limit
    help: str
    unit: str

    @property
    def text(self) -> str:
        """The help text, followed by the limit if that must be stated."""
        return f"{self.help} Must be {self.limit.words}." if self.limit.must_be_stated else self.help


@functools.cache
def options_of(config_class: type) -> tuple[Option, ...]:
    """Return the fields of a configuration, in order."""
    hints = get_type_hints(config_class)
    found = []
    for one in fields(config_class):
        row: OptionRow = one.metadata[KEY]
        default = one.default_factory if isinstance(one.default_factory, type) else one.default
        found.append(Option(one.name, _kind_of(hints[one.name]), default, *row))
    return tuple(found)


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raise ConfigError unless `ok`. For checks that involve several fields."""
    if not ok:
        raise ConfigError(name, value, limit)


def check_options(config: Any, prefix: str) -> None:
    """Raise ConfigError for the first value that its field's limit does not accept.

    Args:
      config: instance of a class whose fields are options.
      prefix: prefix of field names in errors, such as "cache.".
    """
    for one in options_of(config.__class__):
        value = getattr(config, one.name)
        require(one.limit.accepts(value), prefix + one.name, value, one.limit.words)


def documented[T: type](config_class: T) -> T:
    """Append every field with help, limit and default to the docstring of a class, and return the class."""
    lines = [inspect.cleandoc(config_class.__doc__ or ""), "", "Attributes:"]
    for one in options_of(config_class):
        default = "" if isinstance(one.default, type) else f" Default: {one.default!r}."
        lines += textwrap.wrap(
            f"{one.name}: {one.text}{default}",
            _DOCUMENTED_WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    config_class.__doc__ = "\n".join(lines)
    return config_class


def _kind_of(hint: Any) -> type:
    """Return `int` for `int | None`, and `tuple` for `tuple[int, ...] | None`."""
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
    kind: type = get_origin(hint) or hint
    return kind


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode the text; a lone surrogate, half of a character, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
