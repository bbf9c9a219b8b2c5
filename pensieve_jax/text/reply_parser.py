"""The parts of a reply as its text arrives: reasoning, content, and calls of tools.

Owns: which part each character of a reply belongs to, for every row of `tool_formats`.
Does not know: tokens, requests, how calls are numbered across turns, or who carries them out.

The parts do not depend on how the text is cut into pieces. Three rules make that so:

- White space behind a mark belongs to no part, nor does white space between content and a call. Where
  content goes on behind a call, it begins with one line break.
- A text that may still become a mark is held back. Marks within JSON strings are text: in arguments, and in
  a message of gpt-oss for the user that begins as JSON does. A reply that has a form is this text or calls,
  so its content has no marks at all.
- Arguments are held until the name of their call is known, since some models write them first.

A reply that does not keep to its format loses nothing. What follows a mark without being a call is content,
marks included. A call that the reply's end cuts keeps its arguments so far, and arguments that are not JSON
are passed on as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pensieve_jax.text.argument_schemas import root_of_arguments
from pensieve_jax.text.call_arguments import without_surrogates
from pensieve_jax.text.call_values import (
    CLOSING_TAG,
    PYTHON_NAME,
    ClosingTag,
    PythonCallEnd,
    argument_of,
    python_call,
)
from pensieve_jax.text.partial_json import SPACE, CallObject, JsonValue
from pensieve_jax.text.reply_events import (
    ArgumentText,
    CallBegun,
    CallEnded,
    ContentText,
    ReasoningText,
    ReplyEvent,
)
from pensieve_jax.text.tool_formats import END_OF_MESSAGE, ENDS_OF_MESSAGE, ReasoningFormat, ToolFormat

_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>")
_NUMBER_OF_HEADER: Final = re.compile(r":\d+\Z")
_MAX_HEADER: Final = 512
"""Characters within which the header of a call must end; a longer text is none."""


class ReplyParser:
    """The parser of one reply.

    Attributes:
      is_reasoning: whether the text so far ends within the reasoning.
      num_calls: number of calls so far, including one that has begun.
      is_over: whether the last call that the reply may have has ended; what follows it is dropped.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None = None,
        *,
        is_open: bool = False,
        schemas: Mapping[str, Any] | None = None,
        max_calls: int | None = None,
        has_form: bool = False,
        has_header: bool = True,
    ) -> None:
        """Start at the beginning of a reply.

        Args:
          tools: how calls are written; None reads calls as content.
          reasoning: how reasoning is marked; None reads it as content.
          is_open: whether the prompt ends with the mark that begins reasoning.
          schemas: JSON schemas of the parameters, by the tools' names. They say which arguments are strings
            where the format does not. Where calls have no mark, only these names make a call. None: any.
          max_calls: number of calls behind which the reply is over; None for any number.
          has_form: whether the content is held to a form, unless it is calls. Then no mark ends it.
          has_header: whether the reply begins with a header, in formats where messages have headers;
            otherwise it begins within the message for the user.
        """
        self.num_calls = 0
        self.is_over = False
        self._num_ended_calls = 0
        self._has_content = self._needs_break = False
        self._tools, self._reasoning = tools, reasoning
        self._schemas, self._max_calls, self._has_form = schemas, max_calls, has_form
        self._headers: set[str] = set()
        self._next_number = 0  # of a header that repeats another
        self._buffer = ""  # text that was not read yet
        self._events: list[ReplyEvent] = []
        self._is_after_mark = is_open  # white space here belongs to no part
        self._raw = ""  # what was read since a mark, until it is known to be a call
        self._object = CallObject()
        self._value = JsonValue()
        self._call_end = PythonCallEnd()
        self._num_parameters = 0
        self._closing_tag: ClosingTag | None = None  # of the argument between tags at hand
        self._name = ""
        self._has_arguments = False
        self._num_ends = 0
        self._channel = ""  # of the message at hand, in formats where messages have headers
        self._is_in_json = False  # whether a message may begin as JSON does, and this has not ended
        if (reasoning is not None and reasoning.name == "harmony") or (
            tools is not None and tools.body == "channels"
        ):
            self._state: Callable[[], bool] = self._header_of_message
            if not has_header:
                self._begin_message("final")
        elif reasoning is None:
            self._state = self._first_content
        else:
            self._state = self._think if is_open else self._before_reasoning

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning, or before anything is known."""
        if self._state in (self._think, self._before_reasoning):
            return True
        return self._state == self._body_of_message and self._channel == "analysis"

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far, or at the end the reply, ends within a call."""
        if self._channel == "call" and self._value.is_over:  # the id that ends the message is not text
            return False
        return self._num_ended_calls < self.num_calls

    @property
    def holds_content(self) -> bool:
        """Whether text is held back that becomes content, unless it becomes a mark."""
        if self._state == self._body_of_message:
            is_held = bool(self._buffer) or (self._is_in_json and self._value.holds_space)
            return is_held and self._channel not in ("analysis", "call")
        return self._state in (self._content, self._first_content, self._calls_or_form) and bool(self._buffer)

    def feed(self, text: str) -> list[ReplyEvent]:
        """Return the events of the next piece of text."""
        self._buffer += text
        return self._run()

    def end(self) -> list[ReplyEvent]:
        """Return the events of the reply's end: what was held back becomes text of its part."""
        events = self._run()
        while self._state == self._parameters and self._ends_open_string():
            events += self._run()
        if self._state == self._think:
            self._say(ReasoningText, self._buffer)
        elif self._state in (
            self._content,
            self._first_content,
            self._calls_or_form,
            self._before_reasoning,
        ):
            self._say(ContentText, self._buffer)
        elif self._state == self._python:
            self._cut_python()
        elif self._raw:  # a mark, or the beginning of an object, without a call
            self._say(ContentText, self._raw + self._buffer)
        elif self._state == self._body_of_message:
            self._add_to_message((self._value.rest() if self._is_in_json else "") + self._buffer)
            if self._channel == "call" and not self._has_arguments:
                self._pass("{}")
        elif self._state == self._header_of_message and not self._channel:
            self._say(ContentText, self._buffer)
        elif self._state == self._read_object:
            self._pass(self._object.rest())
        elif self._state == self._arguments:
            self._pass(self._value.rest())
        elif self._state == self._parameters:
            self._cut_parameters()
        self._buffer = self._raw = ""
        self._state = self._nothing
        events += self._events
        self._events = []
        return _joined(events)

    # Private methods. Those that are states return whether another round may find more.

    def _run(self) -> list[ReplyEvent]:
        while self._state():
            pass
        events, self._events = self._events, []
        return _joined(events)

    def _nothing(self) -> bool:
        self._buffer = ""
        return False

    def _say(self, kind: type[ReasoningText] | type[ContentText], text: str) -> None:
        if not text:
            return
        if kind is ContentText:
            text = f"\n{text}" if self._needs_break else text
            self._has_content, self._needs_break = True, False
        self._events.append(kind(text))

    def _drop_space(self) -> str:
        """Drop white space at the beginning of the unread text, and return the rest."""
        self._buffer = self._buffer.lstrip(SPACE)
        return self._buffer

    # Reasoning

    def _before_reasoning(self) -> bool:
        assert self._reasoning is not None
        text = self._buffer.lstrip(SPACE)
        if text.startswith(self._reasoning.start):
            self._buffer = text[len(self._reasoning.start) :]
            self._is_after_mark = True
            self._state = self._think
            return True
        if not text or self._reasoning.start.startswith(text):
            return False
        self._state = self._first_content
        return True

    def _think(self) -> bool:
        assert self._reasoning is not None
        if self._is_after_mark and not self._drop_space():
            return False
        end = self._reasoning.end
        at = self._buffer.find(end)
        if at < 0:
            num_held = _num_held(self._buffer, (end,))
            ready = self._buffer[: len(self._buffer) - num_held].rstrip(SPACE)
            self._buffer = self._buffer[len(ready) :]
            self._say(ReasoningText, ready)
            self._is_after_mark &= not ready
            return False
        self._say(ReasoningText, self._buffer[:at].rstrip(SPACE))
        self._buffer = self._buffer[at + len(end) :]
        self._is_after_mark = True
        self._state = self._first_content
        return True

    # Content, up to a call

    def _first_content(self) -> bool:
        """Look for calls that have no mark, at the beginning of the content."""
        if self._is_after_mark and not self._drop_space():
            return False
        tools = self._tools
        if tools is None or tools.start:
            in_form = self._calls_or_form if self._has_form else self._content
            self._state = self._rest if tools is None else in_form
            return True
        text = self._buffer.lstrip(SPACE)
        mark = tools.optional_start
        if mark and text.startswith(mark):
            text = text[len(mark) :].lstrip(SPACE)
            self._raw = self._buffer[: len(self._buffer) - len(text)]
        elif not text or mark.startswith(text):
            return False
        opening = "[" if tools.body == "python" else "{"
        if self._raw and not text:
            self._raw = ""
            return False
        if text.startswith(opening):
            self._raw = self._buffer[: len(self._buffer) - len(text)]
            self._buffer = text
            self._begin_call()
            return True
        self._raw = ""
        self._state = self._rest
        return True

    def _calls_or_form(self) -> bool:
        """Find out whether a reply that has a form is calls; otherwise all of it is content."""
        assert self._tools is not None
        mark = self._tools.start
        if len(self._buffer) < len(mark) and mark.startswith(self._buffer):
            return False
        self._state = self._content if self._buffer.startswith(mark) else self._rest
        return True

    def _content(self) -> bool:
        tools = self._tools
        assert tools is not None
        if self._is_after_mark and not self._drop_space():
            return False
        text = self._buffer
        at = text.find(tools.start)
        if at < 0:
            num_held = _num_held(text, (tools.start,))
            ready = text[: len(text) - num_held].rstrip(SPACE)
            self._buffer = text[len(ready) :]
            self._say(ContentText, ready)
            self._is_after_mark &= not ready
            return False
        end = at + len(tools.start)
        ready = text[:at].rstrip(SPACE)
        self._say(ContentText, ready)
        self._raw, self._buffer = text[len(ready) : end], text[end:]
        self._begin_call()
        return True

    def _rest(self) -> bool:
        """Read everything as content."""
        self._say(ContentText, self._buffer)
        self._buffer = ""
        return False

    def _not_a_call(self) -> bool:
        """Read what looked like a call as content."""
        self._say(ContentText, self._raw)
        self._raw = ""
        self._is_after_mark = False
        assert self._tools is not None
        may_call = bool(self._tools.start) and not (self._has_form and not self.num_calls)
        self._state = self._content if may_call else self._rest
        return True

    # Calls

    def _begin_call(self) -> None:
        assert self._tools is not None
        self._object, self._value, self._call_end = CallObject(), JsonValue(), PythonCallEnd()
        self._name, self._has_arguments, self._num_parameters, self._num_ends = "", False, 0, 0
        states = {
            "object": self._read_object,
            "list": self._list,
            "named": self._section if self._tools.call_start else self._header,
            "parameters": self._header,
            "python": self._python,
        }
        self._state = states[self._tools.body]

    def _call(self, name: str, header: str = "") -> None:
        self._name, self._raw = without_surrogates(name), ""
        self.num_calls += 1
        self._needs_break = self._has_content
        header = self._distinct_header(without_surrogates(header))
        self._events.append(CallBegun(self.num_calls - 1, self._name, header))

    def _distinct_header(self, header: str) -> str:
        """Return a header, with another number if the reply has it already, since it can be the call's id."""
        if not header:
            return ""
        unnumbered = _NUMBER_OF_HEADER.sub("", header)
        self._next_number = max(self._next_number, self.num_calls - 1)
        while header in self._headers:
            header = f"{unnumbered}:{self._next_number}"
            self._next_number += 1
        self._headers.add(header)
        return header

    def _pass(self, text: str) -> None:
        """Add text to the arguments of the call at hand."""
        if text:
            self._has_arguments = True
            self._events.append(ArgumentText(self.num_calls - 1, without_surrogates(text)))

    def _end_call(self, following: Callable[[], bool]) -> None:
        """End the call at hand; go on with the state `following`, unless the reply is over."""
        if not self._has_arguments:
            self._pass("{}")
        self._events.append(CallEnded(self.num_calls - 1))
        self._name, self._num_ends = "", 0
        self._num_ended_calls += 1
        self.is_over = self.num_calls == self._max_calls
        self._state = self._nothing if self.is_over else following

    def _read_object(self) -> bool:
        """Read an object with a name and arguments."""
        assert self._tools is not None
        if not self._object.has_begun:
            self._raw += self._buffer[: len(self._buffer) - len(self._buffer.lstrip(SPACE))]
            text = self._drop_space()
            if not text:
                return False
            if text[0] != "{":
                return self._not_a_call()
        reader = self._object
        num_read = reader.read(self._buffer, self._stop_marks())
        if not self._name:
            self._raw += self._buffer[:num_read]
        self._buffer = self._buffer[num_read:]
        if not self._name and reader.name:
            if not self._tools.start and self._schemas is not None and reader.name not in self._schemas:
                return self._not_a_call()
            self._call(reader.name)
        if self._name:
            self._pass(reader.take_arguments())
        if not reader.is_over:
            return False
        if not self._name:
            return self._not_a_call()
        self._end_call(self._after_call)
        return True

    def _stop_marks(self) -> tuple[str, ...]:
        """Marks that end arguments outside of strings, even if brackets are still open."""
        assert self._tools is not None
        return tuple(mark for mark in self._tools.call_end if mark.startswith("<"))

    def _list(self) -> bool:
        """Find the next object of a list."""
        text = self._buffer.lstrip(SPACE + ",[")
        if not self.num_calls or self._raw:
            self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text:
            return False
        if text[0] == "{":
            self._begin_call()
            self._state = self._read_object
            return True
        if text[0] == "]" and not self._raw:
            self._buffer = text[1:]
            self._back_to_content()
            return True
        return self._not_a_call()

    def _section(self) -> bool:
        """Find the next call of a section of calls, or its end."""
        tools = self._tools
        assert tools is not None
        text = self._buffer.lstrip(SPACE)
        if self._raw:
            self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        for mark in (tools.call_start, tools.end):
            if text.startswith(mark):
                self._buffer = text[len(mark) :]
                if mark == tools.end:
                    if self._raw:  # a section without calls
                        self._raw = ""
                    self._back_to_content()
                    return True
                self._begin_call()
                self._raw += mark
                self._state = self._header
                return True
        if not text or any(mark.startswith(text) for mark in (tools.call_start, tools.end)):
            return False
        if self._raw:
            return self._not_a_call()
        self._back_to_content()
        return True

    def _header(self) -> bool:
        tools = self._tools
        assert tools is not None
        at = self._buffer.find(tools.header_end, 0, _MAX_HEADER)
        if at < 0:
            return self._not_a_call() if len(self._buffer) >= _MAX_HEADER else False
        header = self._buffer[:at]
        found = re.fullmatch(tools.header, header)
        if found is None:
            return self._not_a_call()
        self._buffer = self._buffer[at if tools.header_end == "{" else at + len(tools.header_end) :]
        self._call(found[1], header.strip(SPACE))
        self._state = self._parameters if tools.body == "parameters" else self._arguments
        return True

    def _arguments(self) -> bool:
        """Read JSON as it is, until it is complete or a mark ends it."""
        num_read = self._value.read(self._buffer, self._stop_marks())
        self._buffer = self._buffer[num_read:]
        self._pass(self._value.take())
        if not self._value.is_over:
            return False
        self._end_call(self._after_call)
        return True

    def _parameters(self) -> bool:
        """Read arguments between tags: each is passed on whole, as JSON of the type in the tool's schema."""
        text = self._drop_space()
        begun = _PARAMETER.match(text)
        if begun is not None:
            if self._closing_tag is None:
                self._closing_tag = ClosingTag(self._argument_schema(begun[1]), self._parameters_schema)
            end = self._closing_tag.find(text, begun.end())
            if end is None:
                return False
            self._closing_tag = None
            value = text[begun.end() : end].removeprefix("\n").removesuffix("\n")
            self._buffer = text[end + len(CLOSING_TAG) :]
            self._pass_parameter(begun[1], value)
            return True
        if text.startswith("</function>"):
            self._buffer = text[len("</function>") :]
            self._pass("}" if self._num_parameters else "{}")
            self._end_call(self._after_call)
            return True
        for mark in self._stop_marks():
            if text.startswith(mark):
                self._pass("}" if self._num_parameters else "{}")
                self._end_call(self._after_call)
                return True
        if "<parameter=".startswith(text[: len("<parameter=")]):
            return False
        if any(mark.startswith(text) for mark in ("</function>", *self._stop_marks())):
            return False
        self._buffer = text[1:]  # a model's slip between two arguments
        return True

    @property
    def _parameters_schema(self) -> Any:
        """The schema of all arguments of the call at hand."""
        return (self._schemas or {}).get(self._name)

    def _argument_schema(self, name: str) -> Any:
        own = root_of_arguments(self._parameters_schema)
        own = own if isinstance(own, Mapping) else {}
        properties, others = own.get("properties"), own.get("additionalProperties")
        return properties.get(name, others) if isinstance(properties, Mapping) else others

    def _pass_parameter(self, name: str, text: str, *, is_cut: bool = False) -> None:
        if is_cut:
            value = json.dumps(text, ensure_ascii=False)
        else:
            value = argument_of(text, self._argument_schema(name), self._parameters_schema)
        start = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._pass(f"{start}{json.dumps(name)}: {value[:-1] if is_cut else value}")

    def _ends_open_string(self) -> bool:
        """Take an argument as text whose string the reply's end leaves open; return whether that ends it.

        Marks must follow its first tag, else the reply's end cuts JSON with a tag in a string.
        """
        tag, begun = self._closing_tag, _PARAMETER.match(self._buffer)
        if tag is None or begun is None or not tag.is_in_string:
            return False
        at = self._buffer.find(CLOSING_TAG, begun.end())
        following = self._buffer[at + len(CLOSING_TAG) :].lstrip(SPACE)
        marks = ("<parameter=", "</function>", *self._stop_marks())
        if at < 0 or not any(following.startswith(mark) or mark.startswith(following) for mark in marks):
            return False
        tag.take_as_text()
        return True

    def _cut_parameters(self) -> None:
        """Pass on the argument that the reply's end cuts."""
        begun = _PARAMETER.match(self._buffer)
        if begun is not None:
            text = self._buffer[begun.end() :].removeprefix("\n")
            self._pass_parameter(begun[1], text, is_cut=True)

    def _after_call(self) -> bool:
        """Read the marks behind a call's arguments, then what follows."""
        tools = self._tools
        assert tools is not None
        text = self._drop_space()
        for number, mark in enumerate(tools.call_end[self._num_ends :], self._num_ends):
            if text.startswith(mark):
                self._buffer = text[len(mark) :]
                self._num_ends = number + 1
                return True
            if text and mark.startswith(text):
                return False
        if not text:
            return False
        if tools.call_start:
            self._state = self._section
        elif tools.body == "list":
            self._state = self._list
        elif tools.start:
            self._back_to_content()
        else:
            return self._after_unmarked_call()
        return True

    def _after_unmarked_call(self) -> bool:
        """Find another object behind one, with ";" or "," between them."""
        text = self._buffer.lstrip(SPACE + ";,")
        if not text:
            return False
        self._raw = self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if text[0] == "{":
            self._begin_call()
            return True
        return self._not_a_call()

    def _back_to_content(self) -> None:
        self._state = self._content
        self._is_after_mark = True

    # Calls in Python

    def _python(self) -> bool:
        """Read a list of Python calls; each is passed on once it is complete."""
        end = self._call_end.find(self._buffer)
        if end is None:
            return False
        self._call_end = PythonCallEnd()
        text, rest = self._buffer[:end], self._buffer[end:]
        if text == "]" or text.endswith("]"):
            if self.num_calls and not text[:-1].strip(SPACE + ","):
                self._buffer, self._raw = rest, ""
                self._state = self._rest_after_list
                return True
            return self._not_a_call()
        call = python_call(text)
        if call is None or (self._schemas is not None and call[0] not in self._schemas):
            return self._not_a_call()
        self._buffer = rest
        self._call(call[0])
        self._pass(call[1])
        self._end_call(self._python)
        return True

    def _rest_after_list(self) -> bool:
        """Drop the mark and the white space behind a list of calls."""
        if not self._drop_space():
            return False
        if self._buffer.startswith("<|python_end|>"):
            self._buffer = self._buffer[len("<|python_end|>") :]
            return True
        if "<|python_end|>".startswith(self._buffer):
            return False
        self._state = self._rest
        return True

    def _cut_python(self) -> None:
        """Pass on a call that the reply's end cuts, as far as it goes; any other text becomes content."""
        found = re.match(rf"[\s,\[]*{PYTHON_NAME}\s*", self._buffer)
        if found is None or (self._schemas is not None and found[1] not in self._schemas):
            if self._raw or not self.num_calls or self._buffer.strip(SPACE + ","):
                self._say(ContentText, self._raw + self._buffer)
            return
        self._call(found[1])
        self._pass(self._buffer[found.end() :])

    # Messages with a header each (gpt-oss)

    def _header_of_message(self) -> bool:
        """Read the header of a message: role, recipient, channel and type of content."""
        at = self._buffer.find("<|message|>")
        if at < 0:
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len("<|message|>") :]
        recipient = re.search(r"to=([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        self._begin_message("final" if channel is None else channel[1])
        if recipient is not None and self._tools is not None and recipient[1].startswith("functions."):
            self._channel, self._has_arguments = "call", False
            self._call(recipient[1].removeprefix("functions."))
            self._is_in_json, self._state = True, self._body_of_message
        if self._channel == "analysis" and self._reasoning is None:
            self._channel = "final"
        return True

    def _begin_message(self, channel: str) -> None:
        self._channel, self._is_after_mark = channel, True
        self._value, self._is_in_json = JsonValue(), channel == "final"
        is_form = channel == "final" and self._has_form  # then it is the last message
        self._state = self._rest if is_form else self._body_of_message

    def _body_of_message(self) -> bool:
        if self._is_in_json and not self._json_of_message():
            return False
        found = END_OF_MESSAGE.search(self._buffer)  # one search, so that a reply is not read five times
        if found is None:
            num_held = _num_held(self._buffer, ENDS_OF_MESSAGE)
            ready = self._buffer[: len(self._buffer) - num_held].rstrip(SPACE)
            if ready:
                self._buffer = self._buffer[len(ready) :]
                self._add_to_message(ready)
            return False
        at, mark = found.start(), found[0]
        text = self._buffer[:at].rstrip(SPACE)
        self._buffer = self._buffer[at if mark == "<|channel|>" else at + len(mark) :]
        self._add_to_message(text)
        self._state = self._header_of_message
        if self._channel == "call":
            self._end_call(self._header_of_message)
        return True

    def _json_of_message(self) -> bool:
        """Read JSON in which marks within strings are text; return whether it is over or never began."""
        if self._channel == "final" and self._is_after_mark:
            text = self._buffer.lstrip(SPACE)
            self._is_in_json = not text or text[0] in '{["'
            if not text or not self._is_in_json:
                return bool(text)
        num_read = self._value.read(self._buffer, ENDS_OF_MESSAGE)
        self._buffer = self._buffer[num_read:]
        self._add_to_message(self._value.take())
        self._is_in_json = not self._value.is_over
        return not self._is_in_json

    def _add_to_message(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._is_after_mark = False
        if self._channel == "call":
            self._pass(text)
        elif self._channel == "analysis":
            self._say(ReasoningText, text)
        else:
            self._say(ContentText, text)


def _num_held(text: str, marks: Collection[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark."""
    lengths = (
        num
        for mark in marks
        for num in range(min(len(mark) - 1, len(text)), 0, -1)
        if text.endswith(mark[:num])
    )
    return max(lengths, default=0)


def _joined(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """Join neighbouring pieces of one part."""
    joined: list[ReplyEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ReasoningText | ContentText) and type(last) is type(event):
            joined[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ArgumentText) and isinstance(last, ArgumentText) and last.call == event.call:
            joined[-1] = ArgumentText(event.call, last.text + event.text)
        else:
            joined.append(event)
    return joined
