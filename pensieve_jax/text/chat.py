"""From chat messages to the token ids of a turn, by the model's own template.

Owns: rendering of whole conversations, and which part of the result is new in a turn.
Does not know: where earlier turns are stored, sampling, or KV state.

The context of a turn is what the template writes for all messages of the conversation, encoded as one text.
That is what transformers' `apply_chat_template` returns. The conversation has most of it already: its tokens
stay as far as they spell the beginning of that text, and the rest is the turn's prompt. So most templates
only append to a conversation. One that writes earlier messages differently, for example a reply without its
reasoning, replaces the end of the conversation from there on.

- Sampled ids stay where their text is what the template writes, even if the tokenizer would divide the text
  differently. A stop string, or white space that the template trims, is replaced.
- A template writes the arguments of the model's own tool calls as the model spelled them, and those of a
  client's messages as transformers does. So a loop of calls and results keeps its tokens.
- A prefill opens the reply: the template writes it as the last message of the assistant, without its end.
  That reply begins with it in later turns.
- A template that writes no beginning-of-sequence token gets none.
- The current date counts: a template that writes it begins anew on the next day.
- Messages that several conversations share as their beginning have a rendering of their own, without a
  generation prompt. It is cut where its last ids would differ if a message followed.
- Turns without messages (sent as text or ids, or cut within the prompt by `truncate`) have no rendering. They
  stay as they are, before all messages: the template starts again after the last such turn, without a
  beginning-of-sequence token, so the model reads these turns as text before the chat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from pensieve_jax.core.errors import ChatTemplateError, InvalidRequestError, TokenizerMissingError
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.token_ids import num_equal
from pensieve_jax.text.call_arguments import CallArguments
from pensieve_jax.text.chat_template import ChatTemplate
from pensieve_jax.text.messages import Message, check_messages
from pensieve_jax.text.shared_text import shared_text
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tool_formats import AUTOMATIC, Parsers, ToolFormat, reasoning_format, tool_format
from pensieve_jax.text.tools import Tool

_PLACEHOLDER: Final = "MessageStandsHere"


class EarlierTurn(NamedTuple):
    """A finished turn of a conversation.

    Attributes:
      messages: its new messages; None for a turn of text or ids.
      output_text: its reply; None if only the ids are known.
      output_token_ids: the ids of its reply.
      num_tokens: number of tokens of the conversation at its end.
      reply: its reply as a message, if it has parts beside the text; see `replies.ReplyReader`.
    """

    messages: Sequence[Message] | None
    output_text: str | None
    output_token_ids: Sequence[int]
    num_tokens: int
    reply: Message | None = None


class TurnPrompt(NamedTuple):
    """The new part of a turn's context.

    Attributes:
      keep: number of leading tokens of the conversation that the prompt follows.
      token_ids: the prompt.
    """

    keep: int
    token_ids: list[int]


class ChatFormat:
    """The chat template of one tokenizer. It stores nothing between calls; threads may share it.

    Attributes:
      tokenizer: the tokenizer.
      tool_format, reasoning_format: how the model writes calls and reasoning; None if that is not known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        parsers: Parsers = AUTOMATIC,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template; its `strftime_now` uses `now`, which is read once per turn.

        `parsers` names the formats of calls and of reasoning; the template says which "auto" stands for.

        Raises TokenizerMissingError, and ChatTemplateError for a missing or broken template.
        """
        if tokenizer is None:
            raise TokenizerMissingError()
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "The tokenizer has no chat template, so chat does not know how messages are formatted for "
                "this model",
                "add chat_template.jinja to the model directory, or send text with generate",
                refuses_all=True,
            )
        self.tokenizer = self._tokenizer = tokenizer
        self._now = now
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self.tool_format = tool_format(parsers.calls, tokenizer.chat_template)
        self.reasoning_format = reasoning_format(parsers.reasoning, tokenizer.chat_template)

    def turn_prompt(
        self,
        earlier: Sequence[EarlierTurn],
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        template_input: TemplateInput = NO_INPUT,
        token_limit: int | None = None,
    ) -> TurnPrompt:
        """Return the prompt of a turn, and how much of the conversation it follows.

        Args:
          earlier: the conversation's finished turns in order.
          token_ids: all tokens of the conversation.
          new_messages: the messages of this turn only.
          template_input: what the template gets beside the messages of all turns.
          token_limit: as in `Tokenizer.encode`, for the whole context.

        Raises InvalidRequestError for malformed messages, ChatTemplateError if the template refuses the
        messages of the conversation, and ContextLengthError.
        """
        messages = list(check_messages(new_messages))
        without_messages = [index for index, turn in enumerate(earlier) if turn.messages is None]
        chat_turns = earlier[without_messages[-1] + 1 :] if without_messages else earlier
        num_raw = earlier[without_messages[-1]].num_tokens if without_messages else 0
        past = [message for turn in chat_turns for message in (*(turn.messages or ()), self._reply(turn))]
        text = self._opened([*past, *messages], template_input)
        start, wanted = num_raw, []
        if num_raw:
            text = text.removeprefix(self._tokenizer.bos_token or "")
        elif chat_turns:
            num_before_reply = len(token_ids) - len(chat_turns[-1].output_token_ids)
            start, num_characters = self._beginning(text, token_ids, (len(token_ids), num_before_reply))
            text = text[num_characters:]
        if start:
            wanted = self._tokenizer.encode_after(token_ids[start - 1], text, token_limit=token_limit)
        else:
            wanted = self._tokenizer.encode(text, add_bos=False, token_limit=token_limit)
        if start == len(token_ids):
            return TurnPrompt(start, wanted)
        # An id before both shows how the first ones are spelled within a text. A step must compute at least
        # the last token, to sample the next one.
        before = list(token_ids[max(start - 1, 0) : start])
        shared = shared_text(
            [*before, *token_ids[start:]], [*before, *wanted[:-1]], self._tokenizer.decode_raw
        )
        num_known, num_wanted = (number - len(before) for number in shared)
        return TurnPrompt(start + num_known, wanted[num_wanted:])

    def _beginning(self, text: str, token_ids: Sequence[int], ends: Sequence[int]) -> tuple[int, int]:
        """Return how many ids spell the beginning of a text, and its length; 0 and 0 if that is not known.

        The text behind it can be encoded alone, since the last of the ids is a control token. Decoding takes
        a tenth of the time of encoding. Only the ids before each of `ends` are tried, in this order. Some
        tokenizers (SentencePiece) do not spell a text exactly, so this finds nothing.
        """
        for end in ends:
            num_ids = self._tokenizer.end_of_last_anchor(token_ids, end)
            spelled = self._tokenizer.decode_raw(token_ids[:num_ids])
            if spelled and text.startswith(spelled) and len(spelled) < len(text):
                return num_ids, len(spelled)
        return 0, 0

    def _opened(self, messages: Sequence[Message], template_input: TemplateInput) -> str:
        """Return the text of messages up to where the reply begins or goes on."""
        prefill = template_input.prefill
        if prefill is None:
            opens = template_input.generation_prompt
            return self._template.render(
                messages, self._now(), generation_prompt=opens, template_input=template_input
            )
        # A word behind the prefill marks its end, and keeps its white space from being trimmed.
        opening = {"role": "assistant", "content": prefill}
        word = _placeholder([*messages, opening])
        written = self._template.render(
            [*messages, {**opening, "content": prefill + word}],
            self._now(),
            generation_prompt=False,
            template_input=template_input,
        )
        text, found, _ = written.rpartition(word)
        if not found:
            raise ChatTemplateError(
                "The chat template cannot continue a message of the assistant, since it does not write its "
                "content last",
                "send the conversation without continue_final_message",
            )
        return text

    def token_ids(
        self,
        messages: Sequence[Message],
        *,
        template_input: TemplateInput = NO_INPUT,
        token_limit: int | None = None,
    ) -> list[int]:
        """Return the ids of the first turn of a conversation; see `turn_prompt`."""
        return self.turn_prompt(
            [], [], messages, template_input=template_input, token_limit=token_limit
        ).token_ids

    def prefix_token_ids(
        self, messages: Sequence[Message], *, template_input: TemplateInput = NO_INPUT
    ) -> list[int]:
        """Return the ids that begin every conversation whose first messages are these.

        Args:
          messages: messages that conversations share, such as a system message.
          template_input: the tools and arguments that they share.

        Raises InvalidRequestError for malformed messages; ChatTemplateError if the template refuses them or
        does not render them before the following messages and separately from them.
        """
        shared, now = check_messages(messages), self._now()
        next_message = {"role": "user", "content": _placeholder(shared)}
        text = self._template.render(shared, now, generation_prompt=False, template_input=template_input)
        longer = self._template.render(
            [*shared, next_message], now, generation_prompt=True, template_input=template_input
        )
        if not longer.startswith(text) or not text.removeprefix(self._tokenizer.bos_token or "").strip():
            raise ChatTemplateError(
                "The chat template cannot share these messages, since it does not render them before the "
                "first user message and separately from it",
                "share the text at its beginning, and send all messages in the first turn",
            )
        ids, longer_ids = (self._tokenizer.encode(each, add_bos=False) for each in (text, longer))
        # The last characters may share a token with the text after them.
        return ids[: num_equal(ids, longer_ids)]

    def check_input(
        self, template_input: TemplateInput, *, tools_field: str = "tools", arguments_field: str
    ) -> None:
        """Raise InvalidRequestError for tools or arguments that the template does not read."""
        if template_input.tools and "tools" not in self._template.variables:
            raise InvalidRequestError(
                tools_field,
                f"{len(template_input.tools)} tools",
                "left out, since the model's chat template takes no tools",
            )
        self._template.check_arguments(template_input.arguments, arguments_field)

    def with_calls(self, template_input: TemplateInput, *, max_calls: int | None = None) -> TemplateInput:
        """Return the input of a turn whose reply may call its tools.

        Without tools, or if it is not known how the model writes calls, it is returned unchanged.

        Args:
          template_input: what the template gets.
          max_calls: see `ReplyFormat`.

        Raises InvalidRequestError for arguments whose names no call can have in the model's format.
        """
        if not template_input.tools or self.tool_format is None:
            return template_input
        if max_calls != 0 and self.tool_format.argument_name:
            _check_arguments(template_input.tools, self.tool_format)
        reply = replace(template_input.reply, calls=self.tool_format.name, max_calls=max_calls)
        return replace(template_input, reply=reply)

    def with_reasoning(self, template_input: TemplateInput, prompt_token_ids: Sequence[int]) -> TemplateInput:
        """Return the input of a turn with how its reply marks reasoning.

        The prompt may end with the mark that begins it.
        """
        if self.reasoning_format is None:
            return template_input
        mark, is_open = self.reasoning_format.start, False
        if mark and template_input.prefill is None:
            is_open = self._tokenizer.ends_with(prompt_token_ids, mark)
        reply = replace(template_input.reply, reasoning=self.reasoning_format.name, is_open=is_open)
        return replace(template_input, reply=reply)

    def reads(self, variable: str) -> bool:
        """Return whether the template reads a variable of this name."""
        return variable in self._template.variables

    def mentions(self, words: Iterable[str]) -> bool:
        """Return whether any of these words stands in the template's source."""
        source = self._tokenizer.chat_template or ""
        return any(word in source for word in words)

    def _reply(self, turn: EarlierTurn) -> Message:
        if turn.reply is not None:
            return _as_sampled(turn.reply)
        text = turn.output_text
        if text is None:
            text = self._tokenizer.decode(turn.output_token_ids)
        return {"role": "assistant", "content": text}


def _check_arguments(tools: Sequence[Tool], row: ToolFormat) -> None:
    """Raise InvalidRequestError for a tool with an argument that no call can name."""
    for index, tool in enumerate(tools):
        for name in tool["function"].get("parameters", {}).get("properties", {}):
            if not re.fullmatch(row.argument_name, name):
                raise InvalidRequestError(
                    f"tools[{index}].function.parameters.properties",
                    name,
                    f"names that match {row.argument_name}, since the model writes calls as {row.name}",
                )


def _as_sampled(reply: Message) -> Message:
    """Return a reply whose calls are written with the arguments as the model spelled them."""
    calls = reply.get("tool_calls")
    if not calls:
        return reply
    sampled = []
    for call in calls:
        function = call["function"]
        arguments = CallArguments.sampled(function["arguments"])
        sampled.append({**call, "function": {**function, "arguments": arguments}})
    return {**reply, "tool_calls": sampled}


def _placeholder(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a word that no message contains, of letters only, so that trimming and quoting keep it."""
    word = _PLACEHOLDER
    texts = [str(part) for message in messages for part in (*message, *message.values())]
    while any(word in text for text in texts):
        word += "X"
    return word
