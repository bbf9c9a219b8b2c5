"""What `jsonschema`, an independent validator, says of a reply.

Owns: the validator with its formats, and the differences of definition that are known by name.
Does not know: grammars, models, or how a reply was made.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

import jsonschema
import jsonschema_specifications

DEFAULT_DRAFT: Final = "2020-12"
LEAP_SECOND: Final = "a second 60 in any minute (formats time and date-time)"
"""RFC 3339 has leap seconds at 23:59:60 UTC only, and the validator refuses them all; the grammar library
allows the second 60 in every minute."""
_LEAP_FORMATS: Final = ("time", "date-time")
_SECOND_60: Final = re.compile(r"(?<=:)60(?=$|[.zZ+-])")


class WrittenFloat(float):
    """A number with the digits with which JSON has it.

    Attributes:
      text: the digits.
    """

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Return the number of a JSON text."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def problem_of(schema: Any, text: str) -> str | None:
    """Return None for a valid reply, a known difference such as `LEAP_SECOND`, or what is wrong with it."""
    try:
        value = json.loads(text, parse_float=WrittenFloat)
    except ValueError as error:
        return f"not JSON: {error}"
    errors = list(_validator(json.dumps(schema)).iter_errors(value))
    unknown = [error for error in errors if not _is_leap_second(error)]
    if unknown:
        return str(unknown[0]).splitlines()[0]
    return LEAP_SECOND if errors else None


def checked_formats() -> list[str]:
    """Return the formats that are checked in schemas of the default draft."""
    return sorted(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)


def _is_multiple(
    validator: Any, divisor: float, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Check `multipleOf` with the numbers as they are written.

    The validator's own check divides binary fractions, and denies that 671759711441.18 is a multiple of 0.01.
    """
    if validator.is_type(instance, "number") and _exact(instance) % _exact(divisor):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {divisor}")


def _exact(number: float) -> Fraction:
    return Fraction(number.text if isinstance(number, WrittenFloat) else number)


def _is_leap_second(error: jsonschema.ValidationError) -> bool:
    if error.validator != "format" or error.validator_value not in _LEAP_FORMATS:
        return False
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    before, count = _SECOND_60.subn("59", error.instance)
    return count == 1 and checker.conforms(before, error.validator_value)


@functools.lru_cache(maxsize=64)
def _validator(schema_text: str) -> Any:
    """Return the validator of a schema's own draft, with formats, which fetches no other document."""
    schema = json.loads(schema_text, parse_float=WrittenFloat)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    exact = jsonschema.validators.extend(kind, {"multipleOf": _is_multiple})
    return exact(schema, registry=jsonschema_specifications.REGISTRY, format_checker=kind.FORMAT_CHECKER)
