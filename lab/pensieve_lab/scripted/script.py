"""The script of a scripted model: which text answers which messages.

Owns: the rules, their file format, and the division of a context into messages.
Does not know: token ids or engines.

A file has tables `[[reply]]`. The first rule whose conditions all hold gives the reply:

    [[reply]]
    last = "weather in Paris"       # regular expression, searched for in the last message
    role = "user"                   # role of the last message; "tool" is a tool's result
    tool = "get_weather"            # name of a tool that the request offers
    context = "My name is Ada"      # regular expression, searched for in all messages
    text = "<tool_call>...</tool_call>"

Every condition may be left out. A rule without any answers all that is left.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from pensieve_jax import ConfigError

MESSAGE_BEGIN: Final = "<|im_start|>"
MESSAGE_END: Final = "<|im_end|>"
REPLY_BEGIN: Final = f"{MESSAGE_BEGIN}assistant\n"
TOOL_RESULT: Final = "<tool_response>"
REASONING: Final = "<think>"
NO_THINKING: Final = f"{REASONING}\n\n</think>\n\n"
"""What the template puts before a reply without reasoning."""
DEFAULT_SCRIPT: Final = Path(__file__).with_name("script.toml")
"""Replies that the programs of `client_matrix` expect."""
_REASONING: Final = re.compile(r"^<think>.*?</think>\s*", re.DOTALL)
_TOOL_NAME: Final = re.compile(r'"function": \{"name": "([^"]+)"')
_TOOLS: Final = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; a condition of None always holds."""

    text: str
    last: str | None = None
    role: str | None = None
    tool: str | None = None
    context: str | None = None

    def applies(self, context: Context) -> bool:
        """Return whether all conditions hold."""
        return (
            (self.role is None or self.role == context.role)
            and (self.tool is None or self.tool in context.tools)
            and (self.last is None or re.search(self.last, context.last) is not None)
            and (self.context is None or re.search(self.context, context.text) is not None)
        )


@dataclass(frozen=True, slots=True)
class Context:
    """What a reply answers.

    Attributes:
      text: all messages as the template writes them.
      role, last: role and text of the last message; role "tool" is a tool's result, and role "" is a text
        without messages.
      tools: names of the tools that are offered.
      thinks: whether the reply may begin with reasoning.
    """

    text: str
    role: str
    last: str
    tools: tuple[str, ...]
    thinks: bool = True


def divide(text: str) -> tuple[Context, str]:
    """Return what the last reply in a rendered text answers, and that reply as far as it goes.

    A text without a generation prompt is a context with role "", and has no reply.
    """
    before, mark, reply = text.rpartition(REPLY_BEGIN)
    if not mark or MESSAGE_END in reply:
        return Context(text, "", text, ()), ""
    role, _, last = before.rpartition(MESSAGE_BEGIN)[2].partition("\n")
    last = last.partition(MESSAGE_END)[0]
    if last.startswith(TOOL_RESULT):
        role, last = "tool", last[last.rindex(TOOL_RESULT) :]
    tools = tuple(_TOOL_NAME.findall("".join(_TOOLS.findall(before)[:1])))
    thinks = not reply.startswith(NO_THINKING)
    return Context(before, role, last, tools, thinks), reply.removeprefix(NO_THINKING)


@dataclass(frozen=True, slots=True)
class Script:
    """Rules in order; the last one has no condition."""

    rules: tuple[Rule, ...]

    def replies(self, context: Context) -> list[str]:
        """Return the text of the first rule that applies, and the same without reasoning."""
        text = next(rule.text for rule in self.rules if rule.applies(context))
        plain = _REASONING.sub("", text)
        return [text, plain] if context.thinks and plain != text else [plain]


def load_script(path: Path) -> Script:
    """Read a script; raises ConfigError that names the rule."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--script", str(path), "a TOML file", str(error)) from error
    replies = found.get("reply")
    if not isinstance(replies, list) or not replies:
        raise ConfigError("--script", str(path), "tables [[reply]]")
    return Script(tuple(_rules(replies)))


def _rules(replies: Sequence[object]) -> list[Rule]:
    names = {field.name for field in fields(Rule)}
    rules = []
    for number, reply in enumerate(replies, start=1):
        place = f"reply {number} of the script"
        if not isinstance(reply, dict) or "text" not in reply or not reply.keys() <= names:
            raise ConfigError(place, reply, f"a table with `text` and some of {', '.join(sorted(names))}")
        for name, value in reply.items():
            _check(f"{place}: {name}", value, is_pattern=name in ("last", "context"))
        rules.append(Rule(**reply))
    if rules[-1] != Rule(rules[-1].text):
        raise ConfigError("the last reply of the script", replies[-1], "a table with `text` only")
    return rules


def _check(place: str, value: object, *, is_pattern: bool) -> None:
    if not isinstance(value, str):
        raise ConfigError(place, value, "text")
    if is_pattern:
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(place, value, "a regular expression", str(error)) from error
