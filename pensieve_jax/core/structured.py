"""The form that a reply must have: a JSON schema, any JSON object, an expression, choices, or a grammar.

Owns: the description of a form, and its limits that need no grammar library.
Does not know: how a form becomes masks (`text.grammar`), tokens, or a server's fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import is_utf8

MAX_GRAMMAR_BYTES: Final = 1 << 16
MAX_MARK_CHARACTERS: Final = 64
WHOLE: Final = "start: @form\n"
"""The frame of a form that is the whole reply, whatever stands around texts of the model's replies."""
KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")

type Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class StructuredOutput:
    """The form of a reply. The class methods make one from Python values.

    Attributes:
      kind: one of `KINDS`.
      text: the schema as JSON, the regular expression, the choices as a JSON list of strings, or the grammar
        in Lark's or GBNF's notation; "" for "json_object".
      after: the text of the mark that ends the reasoning before the reply's form begins; "" if the form
        begins with the reply.
      opening: the text of the mark with which the reply itself begins its reasoning; a reply that does not
        begin with it has no reasoning. "" if the reply begins within its reasoning.
      prefill: the text with which the reply begins already; the form is that of the prefill and the reply.
      frame: a grammar in Lark's notation of the reply behind its reasoning, in which `@form` stands for this
        form. So there may be headers around it, or calls of tools in place of it. "" for the form alone.
    """

    kind: Kind
    text: str = ""
    after: str = ""
    opening: str = ""
    prefill: str = ""
    frame: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Self:
        """Return the form of JSON that a schema describes; a string is the schema's own JSON."""
        return cls("json_schema", schema if isinstance(schema, str) else _as_json("json_schema", schema))

    @classmethod
    def json_object(cls) -> Self:
        """Return the form of any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the form of texts that a regular expression matches whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return the form that is one of these texts."""
        return cls("choice", _as_json("choice", texts if isinstance(texts, str) else list(texts)))

    @classmethod
    def grammar(cls, text: str) -> Self:
        """Return the form of a context-free grammar in Lark's or GBNF's notation."""
        return cls("grammar", text)

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError` for values that no grammar library needs to see."""
        if self.kind not in KINDS:
            raise InvalidRequestError("structured.kind", self.kind, f"one of {', '.join(KINDS)}")
        for name in ("text", "after", "opening", "prefill", "frame"):
            value = getattr(self, name)
            if not isinstance(value, str) or not is_utf8(value):
                raise InvalidRequestError(f"structured.{name}", value, "a string that UTF-8 can hold")
        for name, value in ((self.kind, self.text), ("frame", self.frame)):
            num_bytes = len(value.encode())
            if num_bytes > MAX_GRAMMAR_BYTES:
                limit = f"at most {MAX_GRAMMAR_BYTES} bytes"
                raise InvalidRequestError(f"structured.{name}", f"{num_bytes} bytes", limit)
        for name in ("after", "opening"):
            length = len(getattr(self, name))
            if length > MAX_MARK_CHARACTERS:
                limit = f"at most {MAX_MARK_CHARACTERS} characters"
                raise InvalidRequestError(f"structured.{name}", f"{length} characters", limit)
        if self.opening and not self.after:
            raise InvalidRequestError("structured.opening", self.opening, '"" without `after`')
        _CHECKS[self.kind](self.text)

    @property
    def choices(self) -> list[str]:
        """The texts of a "choice"."""
        assert self.kind == "choice"
        texts: list[str] = json.loads(self.text)
        return texts


def _as_json(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured.{kind}", value, f"a value of JSON ({error})") from error


def _from_json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured.{kind}", text, f"JSON ({error})") from error


def _check_schema(text: str) -> None:
    schema = _from_json("json_schema", text)
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("structured.json_schema", schema, "a JSON schema: an object, true or false")


def _check_object(text: str) -> None:
    if text:
        raise InvalidRequestError("structured.json_object", text, 'the empty text ""')


def _check_choices(text: str) -> None:
    texts = _from_json("choice", text)
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequestError("structured.choice", texts, "a list of at least one non-empty string")


def _check_not_empty(kind: str, text: str) -> None:
    if not text:
        raise InvalidRequestError(f"structured.{kind}", text, "a non-empty string")


_CHECKS: Final[Mapping[Kind, Callable[[str], None]]] = {
    "json_schema": _check_schema,
    "json_object": _check_object,
    "choice": _check_choices,
    "regex": lambda text: _check_not_empty("regex", text),
    "grammar": lambda text: _check_not_empty("grammar", text),
}
