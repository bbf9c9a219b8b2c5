"""What a reply consists of: the events of its parser, and the parts that they add up to.

Owns: these immutable values.
Does not know: formats, or how a reply is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ReasoningText(NamedTuple):
    """A piece of the reasoning."""

    text: str


class ContentText(NamedTuple):
    """A piece of the content."""

    text: str


class CallBegun(NamedTuple):
    """A call begins; `header` is what stands before its arguments, "" if the format has no header.

    A header that repeats an earlier one of the reply ends with another number.
    """

    call: int
    name: str
    header: str


class ArgumentText(NamedTuple):
    """A piece of a call's arguments, which are JSON."""

    call: int
    text: str


class CallEnded(NamedTuple):
    """A call is complete. A call that the reply's end cuts has no such event."""

    call: int


type ReplyEvent = ReasoningText | ContentText | CallBegun | ArgumentText | CallEnded


class ParsedCall(NamedTuple):
    """A call: its name, its arguments as the model wrote them, and its header."""

    name: str
    arguments: str
    header: str


class ParsedReply(NamedTuple):
    """The parts of a whole reply; "" and () for missing ones."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


def parsed_reply(events: Iterable[ReplyEvent], *, calls: bool = True) -> ParsedReply:
    """Return the parts of a reply from all its events, or from some of them if without `calls`."""
    reasoning: list[str] = []
    content: list[str] = []
    found: list[tuple[str, list[str], str]] = []
    for event in events:
        if isinstance(event, ReasoningText):
            reasoning.append(event.text)
        elif isinstance(event, ContentText):
            content.append(event.text)
        elif calls and isinstance(event, CallBegun):
            found.append((event.name, [], event.header))
        elif calls and isinstance(event, ArgumentText):
            found[event.call][1].append(event.text)
    whole = tuple(ParsedCall(name, "".join(parts), header) for name, parts, header in found)
    return ParsedReply("".join(reasoning), "".join(content), whole)
