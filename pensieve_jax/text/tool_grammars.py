"""Grammars of tool calls: what a reply must be that has to call tools, in the notation of llguidance.

Owns: one grammar for each row of `tool_formats`, with the tools' names and the schemas of their arguments.
Does not know: the grammar library, masks, which requests demand calls, or the reasoning before them.

A mark that is a token of its own is written by its id (`Tokenizer.mark_id`). Any other mark is text. The
schemas of arguments stand in the grammar as they are, so what the library does not hold is refused with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import UnsupportedGrammarError
from pensieve_jax.text.argument_schemas import Choices, Text, argument_form, root_of_arguments, types_of
from pensieve_jax.text.call_values import written_choice
from pensieve_jax.text.grammar import mark_in_lark, schema_for_library, text_without
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tool_formats import ENDS_OF_MESSAGE, TOOL_FORMATS, ToolFormat
from pensieve_jax.text.tools import Tool

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_MAX_MESSAGES: Final = 8
"""Messages of gpt-oss before its last one, so that a weak model comes to that."""
_DEFINITIONS: Final = ("$defs", "definitions")
"""Keys of a schema that references within it name, from the schema's root."""
_NARROWING: Final = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keys of a schema of all arguments that narrow more than the arguments one by one."""


def call_grammar(
    row: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    has_one_call: bool = False,
    has_text: bool = False,
    has_form: bool = False,
    free: Collection[str] = (),
    shown: Sequence[Tool] = (),
) -> str:
    """Return the grammar of a reply that calls these tools.

    Args:
      row: how the model writes calls.
      tools: the tools that may be called, at least one.
      tokenizer: the model's tokenizer.
      has_one_call: whether the reply ends behind its first call.
      has_text: whether text may stand before the calls, or be all of the reply. Where calls have no mark, it
        is one or the other, and text does not begin as calls do.
      has_form: whether the reply may be a text of `@form` in place of the calls; see
        `StructuredOutput.frame`.
      free: names of tools whose arguments need not follow their schemas.
      shown: the tools of the turn, whose positions errors name; () for `tools`.

    Raises UnsupportedGrammarError naming `tools[i].function.parameters`, or a part of it, for a schema that
    calls cannot keep whose arguments are written one by one.
    """
    grammar = _Grammar(row, tools, tokenizer, free, shown)
    return grammar.text(has_one_call=has_one_call, has_text=has_text, has_form=has_form)


def final_message(tokenizer: Tokenizer) -> str:
    """Return the frame of a form that is the last message of a reply of gpt-oss, behind its reasoning."""
    grammar = _Grammar(TOOL_FORMATS["harmony"], (), tokenizer, ())
    return grammar.text(has_one_call=False, has_text=False, has_form=True)


class _Grammar:
    """The rules of one grammar."""

    def __init__(
        self,
        row: ToolFormat,
        tools: Sequence[Tool],
        tokenizer: Tokenizer,
        free: Collection[str],
        shown: Sequence[Tool] = (),
    ) -> None:
        self._row = row
        self._shown = shown or tools
        self._tools = [tool["function"] for tool in tools]
        self._tokenizer = tokenizer
        self._free = frozenset(free)
        self._rules: list[str] = []

    def text(self, *, has_one_call: bool, has_text: bool, has_form: bool) -> str:
        """Return the grammar's text."""
        assert not (has_text and has_form), "the form is that of the text"
        choices = [self._calls(has_one_call)] if self._tools else []
        if has_form:
            choices.append(f"{self._header()} @form" if self._row.body == "channels" else "@form")
        if has_text:
            choices.append(self._text())
        if self._row.body == "channels":
            # Text on the channel "commentary" is content, which a form has no room for.
            channels = ("analysis", "commentary") if has_text else ("analysis",)
            self._rules.append(f"MESSAGE: {text_without(*ENDS_OF_MESSAGE)}")
            messages = " | ".join(map(self._message, channels))
            before = f'(({messages}) {self._mark("<|start|>")} "assistant"){{0,{_MAX_MESSAGES}}}'
            start = f"{before} ({' | '.join(choices)})"
        elif has_text and self._row.start:
            start = f"TEXT ({choices[0]})?"
        else:
            start = " | ".join(choices)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _text(self) -> str:
        """Return the rule of a reply without calls, and define the text before calls with a mark."""
        row = self._row
        if row.body == "channels":
            return f"{self._header()} MESSAGE"
        if row.start:
            has_token = self._tokenizer.mark_id(row.start) is not None
            self._rules.append(f"TEXT: {text_without(row.start)}" if has_token else "TEXT: /[^<\\[]*/")
        else:
            opening = "\\[" if row.body == "python" else "{"
            has_token = self._tokenizer.mark_id(row.optional_start) is not None
            first = opening if has_token else opening + row.optional_start[0]
            text = f"/[ \\t\\r\\n]*([^ \\t\\r\\n{first}](.|\\n)*)?/"
            spelled = f"/[ \\t\\r\\n]*/ {json.dumps(row.optional_start)} /(.|\\n)*/"
            self._rules.append(f"TEXT: {text} & ~({spelled})" if has_token else f"TEXT: {text}")
        return "TEXT"

    def _calls(self, has_one_call: bool) -> str:
        """Return the rule of one or more calls."""
        row = self._row
        one = {
            "object": self._object_call,
            "list": self._object,
            "named": self._named_call,
            "parameters": self._parameters_call,
            "python": self._python_call,
            "channels": self._channel_call,
        }[row.body]
        for number, function in enumerate(self._tools):
            self._rules.append(f"call_{number}: {one(function, number)}")
        self._rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(self._tools))))
        before, between, after = self._around()
        rest = "" if has_one_call or row.body == "channels" else f" ({between} call)*"
        return " ".join(part for part in (before, "call" + rest, after) if part)

    def _around(self) -> tuple[str, str, str]:
        """Return what stands before, between and after the calls of a reply."""
        row = self._row
        if row.body in ("object", "parameters") and row.start:
            return "", '"\\n"', ""
        if row.body == "object":
            return "", '"; "', ""
        if row.body == "list":
            return f'{self._mark(row.start)} " ["', '", "', '"]"'
        if row.body == "python":
            return '"["', '", "', '"]"'
        if row.call_start:
            return self._mark(row.start), "", self._mark(row.end)
        return "", "", ""

    def _mark(self, mark: str) -> str:
        """Return a mark as the grammar writes it."""
        return mark_in_lark(self._tokenizer, mark)

    def _json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps(schema_for_library(dict(schema)), ensure_ascii=False)}"

    def _value(self, schema: Any, function: Mapping[str, Any]) -> str:
        """Return the rule of one argument, whose schema may refer to the function's definitions."""
        own = schema if isinstance(schema, Mapping) else {}
        return self._json({**_definitions(_schema(function)), **own})

    def _schema(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema that the arguments of a function have to follow."""
        return _ANY_OBJECT if function["name"] in self._free else _schema(function)

    def _object(self, function: Mapping[str, Any], number: int) -> str:
        key = "parameters" if self._row.name == "llama3_json" else "arguments"
        schema = self._schema(function)
        return self._json(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, key: schema},
                "required": ["name", key],
                "additionalProperties": False,
                **_definitions(schema),
            }
        )

    def _object_call(self, function: Mapping[str, Any], number: int) -> str:
        if not self._row.start:
            return self._object(function, number)
        self._rules.append(f"object_{number}: {self._object(function, number)}")
        (end,) = self._row.call_end
        return f'{self._mark(self._row.start)} "\\n" object_{number} "\\n" {self._mark(end)}'

    def _arguments(self, function: Mapping[str, Any], number: int) -> str:
        self._rules.append(f"arguments_{number}: {self._json(self._schema(function))}")
        return f"arguments_{number}"

    def _named_call(self, function: Mapping[str, Any], number: int) -> str:
        row, name = self._row, json.dumps(function["name"])
        arguments = self._arguments(function, number)
        if row.name == "mistral":
            separator = "" if self._tokenizer.mark_id("[ARGS]") is None else self._mark("[ARGS]")
            return f"{self._mark(row.start)} {name} {separator} {arguments}"
        if row.name == "kimi_k2":
            header = f"{json.dumps('functions.' + function['name'] + ':')} /[0-9]{{1,4}}/"
            return self._section_call(header, self._mark(row.header_end), arguments, ())
        if row.name == "deepseek_v3":
            header = f'"function" {self._mark("<｜tool▁sep｜>")} {name}'
            return self._section_call(header, '"\\n```json\\n"', arguments, ('"\\n```"',))
        return self._section_call(name, self._mark(row.header_end), arguments, ())

    def _section_call(self, header: str, separator: str, arguments: str, tail: Sequence[str]) -> str:
        end = self._mark(self._row.call_end[-1])
        return " ".join([self._mark(self._row.call_start), header, separator, arguments, *tail, end])

    def _parameters_call(self, function: Mapping[str, Any], number: int) -> str:
        def one(name: str, schema: Any, place: str) -> str:
            opening = json.dumps(f"<parameter={name}>\n", ensure_ascii=False)
            form = argument_form(schema, function.get("parameters"))
            if isinstance(form, Text):
                # The reader ends an argument at its first closing tag, wherever that stands.
                times = "*" if form.max_length is None else f"{{0,{form.max_length}}}\\n?"
                self._rules.append(f'{place}[suffix="</parameter>"]: /(.|\\n){times}/')
                return f'{opening} {place} "\\n"'
            if isinstance(form, Choices):
                texts = [self._choice(function, name, value, form) for value in form.values.values()]
                # One lexeme, since a choice can be the beginning of another.
                self._rules.append(f"{place}: {place.upper()}")
                self._rules.append(f"{place.upper()}: {' | '.join(texts)}")
                return f"{opening} {place}"
            self._rules.append(f"{place}: {self._value(schema, function)}")
            return f'{opening} {place} "\\n</parameter>\\n"'

        if function["name"] in self._free:
            # The reader ends an argument at its first closing tag.
            self._rules.append(f'value_{number}[suffix="</parameter>"]: /(.|\\n)*/')
            parameters = f'("<parameter=" /[^>\\n]+/ ">\\n" value_{number} "\\n")*'
        else:
            parameters = self._optional(function, number, one, "")
        opening = json.dumps(f"\n<function={function['name']}>\n", ensure_ascii=False)
        start, (end,) = self._mark(self._row.start), map(self._mark, self._row.call_end)
        return f'{start} {opening} {parameters} "</function>\\n" {end}'

    def _choice(self, function: Mapping[str, Any], name: str, value: Any, choices: Choices) -> str:
        """Return a value that an argument between tags may have, with the tag behind it."""
        text = written_choice(value, choices)
        if text is None:
            raise self._refusal(function, f".properties.{name}", value, "values without </parameter>")
        return json.dumps(f"{text}\n</parameter>\n", ensure_ascii=False)

    def _python_call(self, function: Mapping[str, Any], number: int) -> str:
        def one(name: str, schema: Any, place: str) -> str:
            self._rules.append(f"{place}: {self._value(schema, function)}")
            return f"{json.dumps(name + '=')} {place}"

        if function["name"] in self._free:
            self._rules.append(f"value_{number}: {self._json({})}")
            argument = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" value_{number}'
            parameters = f'({argument} (", " {argument})*)?'
        else:
            parameters = self._optional(function, number, one, '", "')
        return f'{json.dumps(function["name"] + "(")} {parameters} ")"'

    def _channel_call(self, function: Mapping[str, Any], number: int) -> str:
        recipient = json.dumps(f"commentary to=functions.{function['name']} ")
        return (
            f'{self._mark("<|channel|>")} {recipient} {self._mark("<|constrain|>")} "json" '
            f"{self._mark('<|message|>')} {self._arguments(function, number)}"
        )

    def _message(self, channel: str) -> str:
        """Return the rule of a whole message of any text on a channel."""
        end = self._tokenizer.mark_id("<|end|>")
        suffix = "" if end is not None else '[suffix="<|end|>"]'
        self._rules.append(f"{channel}{suffix}: MESSAGE")
        header = f'{self._mark("<|channel|>")} "{channel}" {self._mark("<|message|>")}'
        return f"{header} {channel}" + ("" if suffix else f" <[{end}]>")

    def _header(self) -> str:
        """Return the rule of the header of the message for the user."""
        kind = f'(/ ?/ {self._mark("<|constrain|>")} "json")?'
        return f'{self._mark("<|channel|>")} "final" {kind} {self._mark("<|message|>")}'

    def _optional(
        self,
        function: Mapping[str, Any],
        number: int,
        one: Callable[[str, Any, str], str],
        separator: str,
    ) -> str:
        """Return the rule of all arguments in the order of the schema; those not required may be missing."""
        properties, required = self._arguments_of(function)
        written = [
            (name, one(name, inner, f"value_{number}_{place}"))
            for place, (name, inner) in enumerate(properties.items())
        ]
        # `first` rules are for the arguments from one place on, before any was written; `next` rules after.
        rules = {"first": '""', "next": '""'}
        for place in range(len(written) - 1, -1, -1):
            name, text = written[place]
            both = {}
            for kind in ("first", "next"):
                glue = f"{separator} " if separator and kind == "next" else ""
                taken = f"{glue}{text} {rules['next']}"
                left = "" if name in required else f" | {rules[kind]}"
                rule = f"{kind}_{number}_{place}"
                self._rules.append(f"{rule}: {taken}{left}")
                both[kind] = rule
            rules = both
        return rules["first"]

    def _arguments_of(self, function: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
        """Return the schemas of a function's arguments by their names, and the names of those required."""
        schema = root_of_arguments(_schema(function))
        if not isinstance(schema, Mapping) or "object" not in types_of({"type": "object", **schema}, None):
            raise self._refusal(function, "", schema, "the schema of an object")
        for key in (
            *_NARROWING,
            *(("unevaluatedProperties",) if schema.get("unevaluatedProperties") else ()),
        ):
            if key in schema:
                raise self._refusal(function, f".{key}", schema[key], "left out")
        others = schema.get("additionalProperties", True)
        properties = dict(schema.get("properties") or {})
        required = set(schema.get("required") or ())
        properties |= {name: others for name in schema.get("required") or () if name not in properties}
        for name in required:
            if properties[name] is False:
                limit = "names that `properties` or `additionalProperties` allow"
                raise self._refusal(function, ".required", name, limit)
            if not re.fullmatch(self._row.argument_name, name):
                raise self._refusal(
                    function, ".required", name, f"names that match {self._row.argument_name}"
                )
        properties = {name: inner for name, inner in properties.items() if inner is not False}
        for key, number in (("minProperties", len(required)), ("maxProperties", len(properties))):
            limit = schema.get(key, number)
            if type(limit) is not int or (limit > number if key == "minProperties" else limit < number):
                raise self._refusal(function, f".{key}", limit, "left out")
        return properties, required

    def _refusal(
        self, function: Mapping[str, Any], path: str, value: object, limit: str
    ) -> UnsupportedGrammarError:
        """Return the error for a part of a function's parameters that its calls cannot keep."""
        number = [tool["function"]["name"] for tool in self._shown].index(function["name"])
        field = f"tools[{number}].function.parameters{path}"
        return UnsupportedGrammarError(
            field, value, f"{limit}, since the model writes calls as {self._row.name}"
        )


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments; a schema without a type is one of an object."""
    schema = function.get("parameters") or _ANY_OBJECT
    return schema if "type" in schema else {**schema, "type": "object"}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions of a function's schema, as they have to stand at the root of each part of it."""
    return {key: schema[key] for key in _DEFINITIONS if key in schema}
