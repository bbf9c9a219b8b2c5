"""Rendering of chat templates: the Jinja environment and the variables that published templates expect.

Owns: the sandbox with its filters, globals and blocks, and the variables of one rendering.
Does not know: turns, replies, token ids, or which part of a rendering is new.

Templates are written for transformers' `apply_chat_template`, and models are trained on what it writes. So a
variable has the value that it has there. Without tools, `tools` has the value None, and `documents` always
has it. `messages` is a list, the arguments of a tool call are an object, and a special token that the
tokenizer lacks is undefined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pensieve_jax.core.errors import ChatTemplateError, InvalidRequestError
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.text.call_arguments import CallArguments
from pensieve_jax.text.messages import Message

# Errors that a template's expression may raise beside Jinja's own (None + "x", missing["key"], 1 / 0).
_EXPRESSION_ERRORS: Final = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning. The first is the one that most templates read; gpt-oss reads the second."""
_OWN_VARIABLES: Final = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("strftime_now", "raise_exception"),
    }
)
"""Variables whose values follow from the request, so that no argument can give them."""
_ASKS_FOR_NO_CONTENT: Final = re.compile(r"""content(?:['"]\])?\s+is\s+(?:not\s+)?none""")

_PROBE: Final = "a text that shows whether content is read"


class ChatTemplate:
    """A compiled chat template. It stores nothing between calls; threads may share it.

    Attributes:
      variables: names of the variables that it reads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; raises ChatTemplateError if it is not valid Jinja.

        Args:
          source: Jinja source of the template.
          special_tokens: texts of the special tokens by the name of their variable, such as "bos_token".
        """
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The chat template is not valid Jinja ({str(error).rstrip('.')})",
                "correct chat_template in the model directory",
                refuses_all=True,
            ) from error
        self._no_content = None if _ASKS_FOR_NO_CONTENT.search(source) else ""
        self._reads_parts = not self._writes(_PROBE) and self._writes(_as_parts(_PROBE))

    def check_arguments(self, arguments: Mapping[str, Any], field: str) -> None:
        """Raise InvalidRequestError naming `field.name` for an argument that the template does not read."""
        for name, value in arguments.items():
            if name in _OWN_VARIABLES or name in self._special_tokens:
                limit = "left out, since the request or the tokenizer determines it"
                raise InvalidRequestError(f"{field}.{name}", value, limit)
            if name not in self.variables:
                known = sorted(self.variables - _OWN_VARIABLES - self._special_tokens.keys())
                raise InvalidRequestError(
                    f"{field}.{name}",
                    value,
                    f"a variable that the chat template reads ({', '.join(known) or 'it reads none'})",
                )

    def render(
        self,
        messages: Sequence[Message],
        now: datetime,
        *,
        generation_prompt: bool,
        template_input: TemplateInput = NO_INPUT,
    ) -> str:
        """Return the text of `messages`; `strftime_now` formats `now`.

        Of `template_input`, tools and arguments are read. Raises ChatTemplateError if the template refuses
        the messages or fails.
        """
        variables = {
            **self._special_tokens,
            **template_input.arguments,
            "messages": [self._as_read(message) for message in messages],
            "tools": list(template_input.tools) or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            "strftime_now": now.strftime,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The chat template cannot render these messages ({error})",
                "change their roles or order to what the template allows, or send text with generate",
            ) from error
        except _EXPRESSION_ERRORS as error:
            # Its message is in the hint, which a server does not tell its clients.
            raise ChatTemplateError(
                "The chat template cannot render these messages",
                f"change them to what its expressions allow ({error}), or send text with generate",
            ) from error

    def _writes(self, content: Any) -> bool:
        """Return whether the probe in `content` of a user's message is in what the template writes."""
        variables = {
            **self._special_tokens,
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": datetime(2000, 1, 1).strftime,
        }
        try:
            return _PROBE in self._template.render(variables)
        except (jinja2.TemplateError, *_EXPRESSION_ERRORS):  # it may want other messages or arguments
            return False

    def _as_read(self, message: Message) -> dict[str, Any]:
        """Return a message as templates read it.

        It has no keys of value None, its reasoning under each name, and the arguments of calls as objects. A
        message without content has the content "", or None if the template asks for that. A template that
        reads content as a list of parts, and would leave out a text, gets a list.
        """
        read = {key: value for key, value in message.items() if value is not None}
        read.setdefault("content", self._no_content)
        if self._reads_parts and isinstance(read["content"], str):
            read["content"] = _as_parts(read["content"])
        reasoning = next((read[key] for key in _REASONING_KEYS if key in read), None)
        if reasoning is not None:
            read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
        if "tool_calls" in read:
            read["tool_calls"] = [_call_as_read(call) for call in read["tool_calls"]]
        return read


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`, a marker for training that renders as its contents."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a set of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the block by its contents, in a scope of their own as transformers does."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line_number)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which `message.role` does not raise and catch an exception each time."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look for keys before attributes where the result is the same as the base class's."""
        if isinstance(obj, dict) and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> jinja2.Environment:
    """Return Jinja as chat templates expect it; sandboxed, since a template comes with a download."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return the content of a message as a list of parts."""
    return [{"type": "text", "text": text}]


def _call_as_read(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, CallArguments):
        arguments = CallArguments.canonical(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON without escaping HTML as Jinja's own filter does; models were not trained on that."""
    if isinstance(value, CallArguments) and not (ensure_ascii or indent or separators or sort_keys):
        return str(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
