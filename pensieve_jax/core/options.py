"""Fields of a configuration that say everything about themselves: default, limit, help and unit, once.

Owns: how a limit is checked and worded, and what follows from the fields of a class: its checks, and the list
of attributes in its docstring; and which texts can be written down at all. Command-line flags follow from
`options_of`, too.
Does not know: any field, or absl.
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
      words: complete "must be".
      accepts: whether a value is that, of any type.
      choices: all of them, where they can be listed.
      is_told: a reader does not know it from the field's type and choices.
    """

    words: str
    accepts: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    is_told: bool = True


TRUTH = Limit("True or False", lambda value: isinstance(value, bool), is_told=False)
PATH = Limit("a path as a string", lambda value: isinstance(value, str), is_told=False)


def count(at_least: int) -> Limit:
    """An integer from so many up."""
    return Limit(f"an integer of at least {at_least}", lambda value: is_count(value, at_least))


def number(words: str, accepts: Callable[[float], bool]) -> Limit:
    """A number for which `accepts` is true, which NaN must make false."""
    return Limit(words, lambda value: _is_number(value) and accepts(value))


def one_of(choices: tuple[Any, ...]) -> Limit:
    """One of these, which are of one type."""
    kind = type(choices[0])
    is_told = kind is not str
    return Limit(f"one of {choices}", lambda v: isinstance(v, kind) and v in choices, choices, is_told)


def instance_of(kind: type) -> Limit:
    """A value of this class."""
    return Limit(f"a {kind.__name__}", lambda value: isinstance(value, kind), is_told=False)


def beside_others(words: str) -> Limit:
    """What only the class can check, since it depends on other fields."""
    return Limit(words, lambda value: True)


def optional(limit: Limit) -> Limit:
    """None, or what `limit` says."""
    words = f"None or {limit.words}"
    return limit._replace(words=words, accepts=lambda value: value is None or limit.accepts(value))


def is_count(value: object, at_least: int) -> TypeGuard[int]:
    """Whether this is an integer from so many up; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class OptionRow(NamedTuple):
    """What a field keeps in its metadata."""

    limit: Limit
    help: str
    unit: str


def option[T](default: T, limit: Limit, help: str, *, unit: str = "") -> T:
    """A field of a dataclass.

    Args:
      default: its default.
      limit: what it must be.
      help: what it means, as sentences: for the docstring and for the command line.
      unit: "bytes" for what a command line takes as 16GiB; the names of others say theirs.
    """
    return field(default=default, metadata={KEY: OptionRow(limit, help, unit)})


def part(kind: type, help: str) -> dict[str, Any]:
    """The metadata of a field that is a configuration of its own; its `default_factory` is `kind`."""
    return {KEY: OptionRow(instance_of(kind), help, "")}


@dataclass(frozen=True)
class Option:
    """A field as others see it.

    Attributes:
      name: of the field.
      kind: its type, less None: bool, int, float, str, tuple, or the class of a group.
      default: its default; of a group the class that makes it.
      limit: what it must be.
      help: what it means.
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
        """What it means, and its limit where that needs words."""
        return f"{self.help} Must be {self.limit.words}." if self.limit.is_told else self.help


@functools.cache
def options_of(config_class: type) -> tuple[Option, ...]:
    """The fields of a configuration, in order."""
    hints = get_type_hints(config_class)
    found = []
    for one in fields(config_class):
        row: OptionRow = one.metadata[KEY]
        default = one.default_factory if isinstance(one.default_factory, type) else one.default
        found.append(Option(one.name, _kind_of(hints[one.name]), default, *row))
    return tuple(found)


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raise ConfigError unless `ok`; for what only a class can check, beside its fields' own limits."""
    if not ok:
        raise ConfigError(name, value, limit)


def check_options(config: Any, prefix: str) -> None:
    """Raise ConfigError for the first value that its field's limit does not accept.

    Args:
      config: of a class that is made of options.
      prefix: of names in errors, such as "cache.".
    """
    for one in options_of(config.__class__):
        value = getattr(config, one.name)
        require(one.limit.accepts(value), prefix + one.name, value, one.limit.words)


def documented[T: type](config_class: T) -> T:
    """The class, with every field and its help, limit and default in its docstring."""
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
    """`int` for `int | None`, `tuple` for `tuple[int, ...] | None`."""
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
    kind: type = get_origin(hint) or hint
    return kind


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold it: a lone surrogate, half of a character, it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
