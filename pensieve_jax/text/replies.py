"""From the text of a finished reply to the message of the assistant that later turns are rendered from.

Owns: the parts of a reply's message, and the ids of its tool calls.
Does not know: templates, or where a reply is stored.

A stored turn has the text that the model wrote, marks included. Its message is read from that text whenever
it is needed, so that both cannot differ. Therefore the ids of calls follow from the turn.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pensieve_jax.core.outputs import Output, ToolCall
from pensieve_jax.core.template_input import NO_INPUT, ReplyFormat, TemplateInput
from pensieve_jax.text.messages import Message, message_call
from pensieve_jax.text.reply_events import parsed_reply
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tool_formats import END_OF_MESSAGE, REASONING_FORMATS, TOOL_FORMATS, ToolFormat

_BEGIN_OF_TEXT: Final = "<|message|>"
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


class ReplyParts(NamedTuple):
    """The parts of a reply.

    Attributes:
      content: the text for the user.
      reasoning: the text before it that the model wrote between its marks of reasoning; "" without them.
      calls: the tool calls; their arguments are text, as the model wrote them.
      is_cut: whether the reply ends within its last call.
    """

    content: str
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    is_cut: bool = False


class ReplyReader:
    """The reading of one model's replies. It stores nothing between calls; threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def message(
        self,
        text: str | None,
        token_ids: Sequence[int],
        template: TemplateInput = NO_INPUT,
        *,
        turn: str = "",
    ) -> Message:
        """Return the assistant's message of a finished reply; a prefill is its beginning.

        Args:
          text: the reply as text; None if only the ids are known.
          token_ids: its ids.
          template: what its turn was rendered with.
          turn: a name of its turn that no other turn of the conversation has, for the ids of calls.
        """
        if text is None:
            text = "" if self._tokenizer is None else self._tokenizer.decode(token_ids)
        return message_of(self.parts((template.prefill or "") + text, template, turn=turn))

    def parts(self, text: str, template: TemplateInput, *, turn: str = "") -> ReplyParts:
        """Return the parts of a reply's text, prefill included; see `message` for `turn`."""
        if not has_parts(template):
            return ReplyParts(text)
        return _parts(reply_parser(template), text, template.reply, turn)


def message_of(parts: ReplyParts) -> Message:
    """Return the assistant's message of a reply; one that only calls tools has no content."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.reasoning:
        message["reasoning"] = parts.reasoning
    if parts.calls:
        message["content"] = parts.content or None
        message["tool_calls"] = [message_call(*call) for call in parts.calls]
    return message


def divided_output(output: Output, template: TemplateInput) -> Output:
    """Return the output of a turn of an `LLM` with its text divided into parts."""
    if not has_parts(template):
        return output
    usage = output.usage
    num_before = (
        usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens + usage.prefilled_tokens
    )
    parts = added_parts(output.text, template, turn=str(num_before))
    return replace(output, text=parts.content, reasoning=parts.reasoning, tool_calls=tuple(parts.calls))


def added_parts(text: str, template: TemplateInput, *, turn: str) -> ReplyParts:
    """Return the parts of the text that a turn adds to its prefill; see `ReplyReader.message` for `turn`."""
    if not has_parts(template):
        return ReplyParts(text)
    return _parts(new_parser(template), text, template.reply, turn)


def _parts(parser: ReplyParser, text: str, reply: ReplyFormat, turn: str) -> ReplyParts:
    found = parsed_reply([*parser.feed(text), *parser.end()])
    calls = tuple(
        ToolCall(call_id(turn, index, row=reply.calls, header=call.header), call.name, call.arguments)
        for index, call in enumerate(found.calls)
    )
    return ReplyParts(found.content, found.reasoning, calls, parser.is_in_call)


def num_reasoning_tokens(pieces: Iterable[str], template: TemplateInput) -> int:
    """Return how many tokens of a reply are reasoning, its marks included.

    Args:
      pieces: the text that each token completes; "" for a token without text.
      template: what the reply's turn was rendered with.
    """
    if not template.reply.reasoning:
        return 0
    pieces, prefill = list(pieces), template.prefill or ""
    is_header = template.prefill is None or template.reply.reasoning != "harmony"
    spans = deque(_reasoning_spans(prefill + "".join(pieces), template.reply) if is_header else ())
    num_tokens, begin = 0, len(prefill)
    for piece in pieces:
        while spans and spans[0][1] <= begin:
            spans.popleft()
        num_tokens += bool(spans) and spans[0][0] <= begin
        begin += len(piece)
    return num_tokens


def _reasoning_spans(text: str, reply: ReplyFormat) -> list[tuple[int, int]]:
    """Return where the reasoning of a reply begins and ends in its text, marks included, in order."""
    row = REASONING_FORMATS[reply.reasoning]
    if not row.end:
        return list(_analysis_spans(text))
    begin = 0 if reply.is_open else len(text) - len(text.lstrip())
    if not reply.is_open and not text.startswith(row.start, begin):
        return []
    end = text.find(row.end)
    return [(begin, len(text) if end < 0 else end + len(row.end))]


def _analysis_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where messages of reasoning begin and end in a reply of gpt-oss, in one pass.

    They stand before its call or its message for the user, whose text may spell marks.
    """
    begin = 0
    while (at := text.find(_BEGIN_OF_TEXT, begin)) >= 0:
        header = text[begin:at]
        channel = _CHANNEL.search(header)
        if channel is None or channel[1] == "final" or "to=functions." in header:
            return
        ended = END_OF_MESSAGE.search(text, at + len(_BEGIN_OF_TEXT))
        end = len(text) if ended is None else ended.end() if ended[0] == "<|end|>" else ended.start()
        if channel[1] == "analysis":
            yield begin + channel.start(), end
        if ended is None:
            return
        begin = ended.start() if ended[0] == "<|channel|>" else ended.end()


def has_parts(template: TemplateInput) -> bool:
    """Return whether a turn's reply may have parts beside its content."""
    return _call_format(template.reply) is not None or bool(template.reply.reasoning)


def new_parser(template: TemplateInput) -> ReplyParser:
    """Return the parser of the text that a turn adds to its prefill."""
    parser = reply_parser(template)
    if template.prefill:
        parser.feed(template.prefill)
    return parser


def reply_parser(template: TemplateInput) -> ReplyParser:
    """Return the parser of a turn's reply at its beginning, before a prefill."""
    reply = template.reply
    return ReplyParser(
        _call_format(reply),
        REASONING_FORMATS[reply.reasoning] if reply.reasoning else None,
        is_open=reply.is_open,
        schemas={tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in template.tools},
        max_calls=reply.max_calls,
        has_form=reply.has_form,
        has_header=template.prefill is None,
    )


def shown_marks(template: TemplateInput) -> tuple[str, ...]:
    """Return the marks that the text of a turn's reply shows even if they are control tokens."""
    reply, row = template.reply, _call_format(template.reply)
    calls = () if row is None else row.marks
    reasoning = REASONING_FORMATS[reply.reasoning].marks if reply.reasoning else ()
    return tuple(dict.fromkeys((*calls, *reasoning)))


def banned_ids(template: TemplateInput, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that a turn's reply does not have: the mark before calls, in a reply without calls.

    A mark of several tokens is not banned. What the model writes behind it is content in any case.
    """
    reply = template.reply
    if tokenizer is None or not reply.calls or reply.max_calls != 0:
        return ()
    mark_id = tokenizer.mark_id(TOOL_FORMATS[reply.calls].start)
    return () if mark_id is None else (mark_id,)


def _call_format(reply: ReplyFormat) -> ToolFormat | None:
    """Return how calls are read; None reads them as content."""
    return TOOL_FORMATS[reply.calls] if reply.calls and reply.max_calls != 0 else None


def call_id(turn: str, index: int, *, row: str = "", header: str = "") -> str:
    """Return the id of the call at position `index` of a turn's reply.

    It is "call_" and 24 hexadecimal digits, or what the templates of its format demand: nine letters and
    digits, or the header that the model wrote. `row` is the name of the format.
    """
    digits = hashlib.sha256(f"{turn}/{index}".encode()).hexdigest()
    form = TOOL_FORMATS[row].id_form if row else "call"
    if form == "header" and header:
        return header
    return digits[:9] if form == "short" else f"call_{digits[:24]}"
