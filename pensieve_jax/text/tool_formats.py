"""How models write tool calls and reasoning: a row for each format, and the choice of a row by the template.

Owns: the marks of each format, which of them a tokenizer may have as control tokens, and which row fits a
chat template.
Does not know: how a reply is read (`reply_parser`), requests, or grammars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text.call_values import ARGUMENT_NAME

Body = Literal["object", "list", "named", "parameters", "python", "channels"]
AUTO, NONE = "auto", "none"
ENDS_OF_MESSAGE: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
"""Marks that end a message of gpt-oss; the last two begin the header of another one."""
END_OF_MESSAGE: Final = re.compile("|".join(map(re.escape, ENDS_OF_MESSAGE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family of models writes calls.

    Attributes:
      name: name of the row, as in `--tool_call_parser`.
      words: texts that its chat templates have.
      lacks: texts that chat templates of similar formats have, and its own do not.
      body: what a call looks like. "object": a JSON object with the name and the arguments. "list": a JSON
        list of such objects. "named": a header with the name, then the arguments as JSON. "parameters": a
        header with the name, then each argument between tags. "python": a list of Python calls. "channels":
        messages with a header each, as gpt-oss writes them; these include reasoning and content.
      start: mark before the calls, or "" if calls stand at the beginning of the content.
      call_start: mark before each call, if calls are in a section of their own.
      header_end: text that ends the header; it is a part of the arguments if it is "{".
      header: regular expression of a whole header; its group is the name.
      call_end: marks behind the arguments of a call, in order; each may be missing.
      end: mark behind the section of calls.
      optional_start: mark that may stand before calls at the beginning of the content.
      argument_name: regular expression of the names of arguments that calls can have; "" for any name.
      id_form: how the ids of calls look. "call": "call_" and 24 digits. "short": nine letters and digits,
        which Mistral's templates demand. "header": the header, which Kimi's models number themselves.
    """

    name: str
    words: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    body: Body
    start: str = ""
    call_start: str = ""
    header_end: str = ""
    header: str = ""
    call_end: tuple[str, ...] = ()
    end: str = ""
    optional_start: str = ""
    argument_name: str = ""
    id_form: Literal["call", "short", "header"] = "call"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as control tokens, and that are needed to find calls."""
        found = (self.start, self.call_start, self.header_end, *self.call_end, self.end, self.optional_start)
        return tuple(dict.fromkeys(mark for mark in (*found, *_OTHER_MARKS.get(self.name, ())) if mark))


_OTHER_MARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "deepseek_v3": ("<｜tool▁sep｜>",),
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
}

_ROWS: Final = (
    ToolFormat(
        name="hermes",
        words=("<tool_call>",),
        lacks=("<arg_key>", "<function="),
        body="object",
        start="<tool_call>",
        call_end=("</tool_call>",),
    ),
    ToolFormat(
        name="qwen3_xml",
        words=("<tool_call>", "<function=", "<parameter="),
        body="parameters",
        start="<tool_call>",
        header_end=">",
        header=r"\s*<function=([^>\n]+)",
        argument_name=r"[^>\n]+",
        call_end=("</tool_call>",),
    ),
    ToolFormat(
        name="llama3_json",
        words=('"parameters": dictionary of argument name',),
        body="object",
        optional_start="<|python_tag|>",
    ),
    ToolFormat(
        name="pythonic",
        words=("[func_name1(",),
        body="python",
        optional_start="<|python_start|>",
        argument_name=ARGUMENT_NAME,
    ),
    ToolFormat(
        name="mistral",
        words=("[TOOL_CALLS]", "[ARGS]"),
        body="named",
        start="[TOOL_CALLS]",
        header_end="{",
        header=r"\s*([A-Za-z0-9_.:-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*",
        id_form="short",
    ),
    ToolFormat(
        name="mistral_v3", words=("[TOOL_CALLS]",), body="list", start="[TOOL_CALLS]", id_form="short"
    ),
    ToolFormat(
        name="deepseek_v3",
        words=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        body="named",
        start="<｜tool▁calls▁begin｜>",
        call_start="<｜tool▁call▁begin｜>",
        header_end="```json",
        header=r"function<｜tool▁sep｜>\s*([^<\s]+)\s*",
        call_end=("```", "<｜tool▁call▁end｜>"),
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="deepseek_v31",
        words=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        body="named",
        start="<｜tool▁calls▁begin｜>",
        call_start="<｜tool▁call▁begin｜>",
        header_end="<｜tool▁sep｜>",
        header=r"\s*([^<\s]+)\s*",
        call_end=("<｜tool▁call▁end｜>",),
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="kimi_k2",
        words=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        body="named",
        start="<|tool_calls_section_begin|>",
        call_start="<|tool_call_begin|>",
        header_end="<|tool_call_argument_begin|>",
        # The last number is that of the call, and a name may end with another.
        header=r"\s*(?:functions\.)?([A-Za-z0-9_.:-]+?)(?::\d+)?\s*",
        call_end=("<|tool_call_end|>",),
        end="<|tool_calls_section_end|>",
        id_form="header",
    ),
    ToolFormat(name="harmony", words=("<|channel|>", "<|message|>", "functions."), body="channels"),
)
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {row.name: row for row in _ROWS}
"""The rows by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How one family of models marks its reasoning, which comes before the content.

    Attributes:
      name: name of the row, as in `--reasoning_parser`.
      words: texts that its chat templates have.
      start, end: marks around the reasoning; both "" for "harmony", where headers say what a message is. The
        prompt may end with `start`.
    """

    name: str
    words: tuple[str, ...]
    start: str = ""
    end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as control tokens, and that are needed to find reasoning."""
        return (self.start, self.end) if self.end else TOOL_FORMATS["harmony"].marks


_REASONING_ROWS: Final = (
    ReasoningFormat(name="think", words=("</think>",), start="<think>", end="</think>"),
    ReasoningFormat(name="mistral", words=("[THINK]",), start="[THINK]", end="[/THINK]"),
    ReasoningFormat(name="harmony", words=("<|channel|>", "<|message|>", "analysis")),
)
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {row.name: row for row in _REASONING_ROWS}
"""The rows by name."""


class Parsers(NamedTuple):
    """How replies are read: names of rows, "auto" for those that the chat template has, or "none"."""

    calls: str = AUTO
    reasoning: str = AUTO


AUTOMATIC: Final = Parsers()


def tool_format(choice: str, template: str | None) -> ToolFormat | None:
    """Return the row that `choice` names, or for "auto" the row that fits a chat template best.

    Returns None for "none", and if no row fits. Raises ConfigError for an unknown name.
    """
    if choice in (AUTO, NONE):
        return None if choice == NONE or template is None else _best(_ROWS, template)
    if choice not in TOOL_FORMATS:
        raise ConfigError("tool_call_parser", choice, _one_of(TOOL_FORMATS))
    return TOOL_FORMATS[choice]


def reasoning_format(choice: str, template: str | None) -> ReasoningFormat | None:
    """Return the row that `choice` names, or for "auto" the row that fits a chat template best.

    Returns None for "none", and if no row fits. Raises ConfigError for an unknown name.
    """
    if choice in (AUTO, NONE):
        return None if choice == NONE or template is None else _best(_REASONING_ROWS, template)
    if choice not in REASONING_FORMATS:
        raise ConfigError("reasoning_parser", choice, _one_of(REASONING_FORMATS))
    return REASONING_FORMATS[choice]


def _best[T: (ToolFormat, ReasoningFormat)](rows: tuple[T, ...], template: str) -> T | None:
    """Return the row with the most words, among those that have all their words in the template."""
    # Templates write quotes within Jinja strings with a backslash.
    text = template.replace('\\"', '"')
    fitting = [
        row
        for row in rows
        if all(word in text for word in row.words) and not any(word in text for word in _lacks(row))
    ]
    return max(fitting, key=lambda row: len(row.words), default=None)


def _lacks(row: ToolFormat | ReasoningFormat) -> tuple[str, ...]:
    return row.lacks if isinstance(row, ToolFormat) else ()


def _one_of(rows: Mapping[str, object]) -> str:
    return f"one of {AUTO}, {NONE}, {', '.join(rows)}"
