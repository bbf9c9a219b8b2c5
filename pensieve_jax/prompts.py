"""Conversion of users' prompts to turns for the engine.

Owns: the accepted kinds of prompts (text, token ids, chat messages) and the placement of the
beginning-of-sequence token. It also chooses the messages that a chat turn is rendered from, and removes a
shared prefix from the rendering.
Does not know: jax, batches, how a turn runs or who waits for it. It changes and loads nothing.
Called by `LLM` and the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeGuard

import numpy as np

from pensieve_jax.core.errors import InvalidRequestError, TokenizerMissingError, UnknownConversationError
from pensieve_jax.core.outputs import one_each
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.validation import check_prefix
from pensieve_jax.text import ChatFormat, EarlierTurn, Message, Tokenizer, check_messages, num_messages_held

type Messages = Sequence[Message]
"""Chat messages: dicts with `role` and `content`."""

type Prompt = str | Sequence[int] | Messages
"""The NEW turn only: text, token ids, or chat messages."""


class PromptEncoder:
    """The encoder of one model's prompts. Only one thread at a time may use it, as for the engine."""

    def __init__(self, tokenizer: Tokenizer | None, conversations: Callable[[], ConversationTable]) -> None:
        """Encode for a model with or without a tokenizer.

        Args:
          tokenizer: the model's tokenizer; None supports token ids only.
          conversations: returns the current table of conversations; an engine makes a new one after an
            interrupt.
        """
        self._tokenizer = tokenizer
        self._conversations = conversations
        self._chat_format: ChatFormat | None = None

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
        field: str = "messages",
    ) -> TurnSpec:
        """Make a turn of the NEW messages with the model's chat template; see `turn` for the arguments.

        The rendering must begin with the prefix. The prefix's own messages go before the new ones, and are
        stored with the turn.
        """
        new_messages = check_messages(messages, field)
        params = sampling_params or SamplingParams()
        if prefix is not None:
            return self._chat_after(prefix, new_messages, params, conversation_id, field)
        earlier, known = self._earlier_turns(conversation_id)
        num_held = num_messages_held(earlier, new_messages)
        if num_held:
            _refuse_resent(field, new_messages, num_held, f"conversation {conversation_id!r}")
        keep, token_ids = self._format().turn_prompt(earlier, known, new_messages)
        return TurnSpec(token_ids, params, conversation_id, new_messages, keep=keep)

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
    ) -> list[TurnSpec]:
        """Call `chat_turn` for each conversation, with one set of parameters for all or one for each."""
        params, ids = _for_each(len(conversations), sampling_params, conversation_ids)
        return [
            self.chat_turn(messages, params[i], ids[i], prefix=prefix, field=f"messages[{i}]")
            for i, messages in enumerate(conversations)
        ]

    def prefix(self, beginning: Prompt) -> tuple[Sequence[int], tuple[Message, ...] | None]:
        """Return the token ids of a shared prefix, and the messages that they were rendered from, if any.

        Raises InvalidRequestError naming `prefix`, TokenizerMissingError, and for messages
        ChatTemplateError.
        """
        if not is_messages(beginning):
            return self._encode(beginning, "prefix", add_bos=True), None
        messages = check_messages(beginning, "prefix")
        return self._format().prefix_token_ids(messages), messages

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
    ) -> TurnSpec:
        """Make the first turn of a chat that begins with a prefix.

        All messages are rendered and encoded together, so that the tokens are the same as without a prefix.
        """
        check_prefix(prefix, conversation_id, self._conversations())
        shared = prefix.messages or ()
        if shared and new_messages[: len(shared)] == shared:
            _refuse_resent(field, new_messages, len(shared), "the prefix")
        messages = (*shared, *new_messages)
        token_ids = self._format().token_ids(messages)
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
        return TurnSpec(token_ids[num_shared:], params, conversation_id, messages, prefix)

    def _format(self) -> ChatFormat:
        if self._chat_format is None:
            self._chat_format = ChatFormat(self._tokenizer)
        return self._chat_format

    def _earlier_turns(self, conversation_id: str | None) -> tuple[list[EarlierTurn], list[int]]:
        """Return the turns of a conversation and its tokens."""
        if conversation_id is None:
            return [], []
        try:
            record = self._conversations().record(conversation_id)
        except UnknownConversationError:
            return [], []
        turns, num_tokens = [], 0
        for turn in record.turns:
            num_kept = num_tokens if turn.keep is None else turn.keep
            num_tokens = num_kept + len(turn.prompt_token_ids) + len(turn.output_token_ids)
            turns.append(EarlierTurn(turn.messages, turn.output_text, turn.output_token_ids, num_tokens))
        return turns, record.token_ids.tolist()


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Return whether a prompt is a list of messages; its first item distinguishes it from token ids."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


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
