"""Conversion of users' prompts to turns for the engine.

Owns: the accepted kinds of prompts (text, token ids, chat messages) and the placement of the
beginning-of-sequence token. It also chooses the messages that a chat turn is rendered from, and removes a
shared prefix from the rendering.
Does not know: jax, batches, how a turn runs or who waits for it. It changes and loads nothing.
Called by `LLM` and the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import InvalidRequestError, TokenizerMissingError, UnknownConversationError
from pensieve_jax.core.json_values import json_copy
from pensieve_jax.core.outputs import one_each
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.validation import check_prefix
from pensieve_jax.text import (
    ChatFormat,
    EarlierTurn,
    Message,
    ReplyReader,
    Tokenizer,
    check_messages,
    check_tools,
    num_messages_held,
)
from pensieve_jax.text.messages import call_ids, check_results, prefill_of
from pensieve_jax.text.reply_forms import form_with_calls, with_form, with_placed_form
from pensieve_jax.text.schema_errors import schema_error
from pensieve_jax.text.tool_formats import AUTOMATIC, Parsers

type Messages = Sequence[Message]
"""Chat messages: dicts with `role` and `content`; see `text.messages.Message`."""

type Prompt = str | Sequence[int] | Messages
"""The NEW turn only: text, token ids, or chat messages."""


class ChatOptions(NamedTuple):
    """How the messages of a chat turn are rendered.

    Attributes:
      tools: function tools in OpenAI's form; None for those of the turn before.
      chat_template_kwargs: further variables of the chat template; None for those of the turn before.
      continue_final_message: whether the last message, of the assistant, is the beginning of the reply.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False


_SAME_OPTIONS = ChatOptions()


class PromptEncoder:
    """The encoder of one model's prompts. Only one thread at a time may use it, as for the engine."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        conversations: Callable[[], ConversationTable],
        parsers: Parsers = AUTOMATIC,
    ) -> None:
        """Encode for a model with or without a tokenizer.

        Args:
          tokenizer: the model's tokenizer; None supports token ids only.
          conversations: returns the current table of conversations; an engine makes a new one after an
            interrupt.
          parsers: how replies are read; see `ChatFormat`.
        """
        self._parsers = parsers
        self._tokenizer = tokenizer
        self._conversations = conversations
        self._chat_format: ChatFormat | None = None
        self._replies = ReplyReader(tokenizer)

    def turn(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        conversation_id: str | None = None,
        *,
        prefix: SharedPrefix | None = None,
        field: str = "prompt",
    ) -> TurnSpec:
        """Make a turn of text, token ids or chat messages.

        Args:
          prompt: the new turn only.
          sampling_params: sampling parameters; None for the defaults.
          conversation_id: conversation of the turn; None for a one-off request.
          prefix: shared prefix before the prompt; for first turns only.
          field: name of the prompt in errors.

        Raises InvalidRequestError, TokenizerMissingError, and for messages ChatTemplateError.
        `Engine.submit` makes the checks that need the model's limits.
        """
        if is_messages(prompt):
            return self.chat_turn(prompt, sampling_params, conversation_id, prefix=prefix, field=field)
        if prefix is not None:
            check_prefix(prefix, conversation_id, self._conversations())
        is_start = prefix is None and self._conversations().num_tokens(conversation_id) == 0
        token_ids = self._encode(prompt, field, add_bos=is_start)
        return TurnSpec(token_ids, sampling_params or SamplingParams(), conversation_id, prefix=prefix)

    def chat_turn(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        conversation_id: str | None = None,
        *,
        prefix: SharedPrefix | None = None,
        options: ChatOptions = _SAME_OPTIONS,
        field: str = "messages",
    ) -> TurnSpec:
        """Make a turn of the NEW messages with the model's chat template; see `turn` for the arguments.

        The rendering must begin with the prefix. The prefix's own messages go before the new ones, and are
        stored with the turn. Raises InvalidRequestError also for a tool message that answers no call, and for
        tools or template arguments that the template does not read.
        """
        new_messages = check_messages(messages, field)
        params = sampling_params or SamplingParams()
        new_messages, prefill = _divided(new_messages, field, options.continue_final_message)
        if prefix is not None:
            template_input = self._template_input(options, prefix.template_input, prefill, params)
            params = self._with_calls(params, template_input, options)
            return self._chat_after(prefix, new_messages, params, conversation_id, field, template_input)
        earlier, known, last_input = self._earlier_turns(conversation_id)
        num_held = num_messages_held(earlier, new_messages)
        if num_held:
            _refuse_resent(field, new_messages, num_held, f"conversation {conversation_id!r}")
        check_results(new_messages, _call_ids(earlier), field)
        template_input = self._template_input(options, last_input, prefill, params)
        params = self._with_calls(params, template_input, options)
        keep, token_ids = self._format().turn_prompt(
            earlier, known, new_messages, template_input=template_input
        )
        return self._chat_spec(token_ids, params, conversation_id, new_messages, template_input, keep=keep)

    def turns(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        conversation_ids: Sequence[str | None] | None = None,
        *,
        prefix: SharedPrefix | None = None,
    ) -> list[TurnSpec]:
        """Call `turn` for each prompt, with one set of parameters for all or one for each."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidRequestError("prompts", prompts, "a list of prompts", "put the prompt into a list")
        params, ids = _for_each(len(prompts), sampling_params, conversation_ids)
        return [
            self.turn(prompt, params[i], ids[i], prefix=prefix, field=f"prompts[{i}]")
            for i, prompt in enumerate(prompts)
        ]

    def chat_turns(
        self,
        conversations: Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        conversation_ids: Sequence[str | None] | None = None,
        *,
        prefix: SharedPrefix | None = None,
        options: ChatOptions = _SAME_OPTIONS,
    ) -> list[TurnSpec]:
        """Call `chat_turn` for each conversation, with one set of parameters for all or one for each."""
        params, ids = _for_each(len(conversations), sampling_params, conversation_ids)
        return [
            self.chat_turn(
                messages, params[i], ids[i], prefix=prefix, options=options, field=f"messages[{i}]"
            )
            for i, messages in enumerate(conversations)
        ]

    def prefix(
        self, beginning: Prompt, options: ChatOptions = _SAME_OPTIONS
    ) -> tuple[Sequence[int], tuple[Message, ...] | None, TemplateInput]:
        """Return the token ids of a shared prefix, and what they were rendered from, if from messages.

        Raises InvalidRequestError naming `prefix`, TokenizerMissingError, and for messages
        ChatTemplateError.
        """
        if not is_messages(beginning):
            for name in ("tools", "chat_template_kwargs"):
                if getattr(options, name):
                    raise InvalidRequestError(
                        name, getattr(options, name), "None for a prefix without messages"
                    )
            return self._encode(beginning, "prefix", add_bos=True), None, NO_INPUT
        messages = check_messages(beginning, "prefix")
        check_results(messages, field="prefix")
        template_input = self._template_input(options, NO_INPUT, None)
        return (
            self._format().prefix_token_ids(messages, template_input=template_input),
            messages,
            template_input,
        )

    # Private methods

    def _encode(self, prompt: object, field: str, *, add_bos: bool) -> Sequence[int]:
        if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str | bytes):
            return list(prompt)
        if not isinstance(prompt, str):
            raise InvalidRequestError(field, prompt, "text, a list of token ids, or a list of messages")
        if self._tokenizer is None:
            raise TokenizerMissingError
        if not prompt:
            raise InvalidRequestError(field, prompt, "at least one token")
        return self._tokenizer.encode(prompt, add_bos=add_bos)

    def _chat_after(
        self,
        prefix: SharedPrefix,
        new_messages: tuple[Message, ...],
        params: SamplingParams,
        conversation_id: str | None,
        field: str,
        template_input: TemplateInput,
    ) -> TurnSpec:
        """Make the first turn of a chat that begins with a prefix.

        All messages are rendered and encoded together, so that the tokens are the same as without a prefix.
        """
        check_prefix(prefix, conversation_id, self._conversations())
        shared = prefix.messages or ()
        if shared and new_messages[: len(shared)] == shared:
            _refuse_resent(field, new_messages, len(shared), "the prefix")
        check_results(new_messages, call_ids(shared), field)
        messages = (*shared, *new_messages)
        token_ids = self._format().token_ids(messages, template_input=template_input)
        num_shared = len(prefix.token_ids)
        if len(token_ids) <= num_shared or tuple(token_ids[:num_shared]) != prefix.token_ids:
            raise InvalidRequestError(
                "prefix",
                prefix,
                "what the chat template writes first for these messages",
                # Templates may write the date, or merge a system message into the first user message.
                "share the messages once more, since the template renders them differently now or here"
                if shared
                else "share the first messages instead of text or ids, as in "
                'share_prefix([{"role": "system", "content": "..."}]), and send only the later messages',
            )
        return self._chat_spec(
            token_ids[num_shared:], params, conversation_id, messages, template_input, prefix=prefix
        )

    def _chat_spec(
        self,
        token_ids: list[int],
        params: SamplingParams,
        conversation_id: str | None,
        messages: tuple[Message, ...],
        template_input: TemplateInput,
        *,
        prefix: SharedPrefix | None = None,
        keep: int | None = None,
    ) -> TurnSpec:
        """Return a turn of messages, with how its reply is read."""
        template_input = self._format().with_reasoning(template_input, token_ids)
        if isinstance(params, SamplingParams):  # the engine names parameters of another type
            params = with_placed_form(params, template_input, token_ids, self._tokenizer)
        return TurnSpec(
            token_ids,
            params,
            conversation_id,
            messages,
            prefix,
            keep=keep,
            template_input=template_input,
        )

    def _template_input(
        self,
        options: ChatOptions,
        earlier: TemplateInput,
        prefill: str | None,
        params: SamplingParams | None = None,
    ) -> TemplateInput:
        """Return the input of a turn's rendering; `earlier` is that of the turn before."""
        tools, arguments = earlier.tools, earlier.arguments
        if options.tools is not None:
            tools = check_tools(options.tools)
        if options.chat_template_kwargs is not None:
            if not isinstance(options.chat_template_kwargs, Mapping):
                raise InvalidRequestError("chat_template_kwargs", options.chat_template_kwargs, "a dict")
            arguments = json_copy(options.chat_template_kwargs, "chat_template_kwargs")
        template_input = TemplateInput(tools, arguments, prefill)
        if template_input != NO_INPUT:
            self._format().check_input(template_input, arguments_field="chat_template_kwargs")
        if tools:
            template_input = self._format().with_calls(template_input)
        # The engine names parameters of another type.
        return with_form(template_input, params.structured if isinstance(params, SamplingParams) else None)

    def _with_calls(
        self, params: SamplingParams, template_input: TemplateInput, options: ChatOptions
    ) -> SamplingParams:
        """Return the parameters of a turn whose reply may be calls, or a text of its form."""
        tokenizer = self._tokenizer
        # The engine names parameters of another type.
        if not isinstance(params, SamplingParams) or not template_input.reply.calls or tokenizer is None:
            return params
        form = form_with_calls(
            params.structured, template_input.tools, template_input, tokenizer, strict=_strict_names(options)
        )
        return replace(params, structured=form)

    @contextmanager
    def named_tools(self, options: ChatOptions) -> Iterator[None]:
        """Name the tool in errors about the grammar of calls that are raised in the block."""
        try:
            yield
        except InvalidRequestError as error:
            if error.field != "structured.frame" or not _strict_names(options):
                raise
            raise schema_error(error, check_tools(options.tools), _strict_names(options)) from error

    def _format(self) -> ChatFormat:
        if self._chat_format is None:
            self._chat_format = ChatFormat(self._tokenizer, parsers=self._parsers)
        return self._chat_format

    def _earlier_turns(
        self, conversation_id: str | None
    ) -> tuple[list[EarlierTurn], list[int], TemplateInput]:
        """Return the turns of a conversation, its tokens, and what its last messages were rendered from."""
        turns: list[EarlierTurn] = []
        last_input, num_tokens = NO_INPUT, 0
        if conversation_id is None:
            return [], [], last_input
        try:
            record = self._conversations().record(conversation_id)
        except UnknownConversationError:
            return [], [], last_input
        for turn in record.turns:
            num_kept = num_tokens if turn.keep is None else turn.keep
            num_tokens = num_kept + len(turn.prompt_token_ids) + len(turn.output_token_ids)
            reply = self._replies.message(
                turn.output_text,
                turn.output_token_ids,
                turn.template_input,
                turn=str(num_tokens - len(turn.output_token_ids)),
            )
            turns.append(
                EarlierTurn(turn.messages, turn.output_text, turn.output_token_ids, num_tokens, reply)
            )
            if turn.messages is not None:
                last_input = turn.template_input
        return turns, record.token_ids.tolist(), last_input


def _strict_names(options: ChatOptions) -> list[str]:
    """Return the names of the given tools whose calls follow their schemas."""
    functions = (tool.get("function", {}) for tool in options.tools or ())
    return [function["name"] for function in functions if function.get("strict")]


def parsers_of(config: EngineConfig | None) -> Parsers:
    """Return how the replies of an engine with this configuration are read; None is the default one."""
    config = config or EngineConfig()
    return Parsers(config.tool_call_parser, config.reasoning_parser)


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Return whether a prompt is a list of messages; its first item distinguishes it from token ids."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _divided(
    messages: tuple[Message, ...], field: str, continues: bool
) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages before the reply, and the beginning of the reply if the last one is that."""
    if not continues:
        return messages, None
    prefill = prefill_of(messages)
    if prefill is None:
        limit = "messages that end with a text of the assistant alone, after another message"
        raise InvalidRequestError(field, messages, f"{limit}, with continue_final_message")
    return messages[:-1], prefill


def _call_ids(earlier: Sequence[EarlierTurn]) -> list[str]:
    """Return the ids of all calls of a conversation."""
    return call_ids(
        message
        for turn in earlier
        for message in (*(turn.messages or ()), *(() if turn.reply is None else (turn.reply,)))
    )


def _refuse_resent(field: str, messages: Messages, num_held: int, owner: str) -> NoReturn:
    rest = "send a new message" if num_held == len(messages) else f"send the messages from [{num_held}] on"
    raise InvalidRequestError(
        field,
        messages,
        f"new messages only: {owner} holds the first {num_held} of these {len(messages)} already",
        f"{rest}, or use another conversation_id to start a new conversation",
    )


def _for_each(
    count: int, sampling_params: object, conversation_ids: object
) -> tuple[list[SamplingParams], list[str | None]]:
    """Return the parameters and conversation id of each of `count` prompts."""
    params: list[SamplingParams] = one_each("sampling_params", sampling_params, SamplingParams(), count)
    for i, one in enumerate(params):
        if one is None:  # the default applies only if the whole argument is missing
            raise InvalidRequestError(f"sampling_params[{i}]", one, "SamplingParams")
    ids: list[str | None] = one_each("conversation_ids", conversation_ids, None, count, None)
    return params, ids
