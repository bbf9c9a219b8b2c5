"""From chat messages to the token ids of a turn, by the model's own template.

Owns: rendering of chat templates, and which part of a rendering is new in a turn.
Does not know: where earlier turns are stored, sampling, or KV state.

A conversation only grows. So a turn sends render(all messages, generation prompt) minus the part that is in
the history. The history holds each reply as it was sampled, and a reply is never tokenized again: it is
rendered as a placeholder word, and only the text after it is encoded. That text begins with what closes a
reply, usually an end marker. If the last ids of the reply already spell part of the closing text, that part
is left out. So a reply that was cut by its length gets its end marker now, and one that ended with the marker
does not get a second one.

- A template that renders earlier messages differently when others follow cannot be used: ChatTemplateError.
- The beginning-of-sequence token starts every conversation, whether or not the template writes it. If the
  template itself writes it at the start of later turns (as Llama 2's does), it is part of the format and
  stays.
- Messages that several conversations share as their beginning have a rendering of their own, without a
  generation prompt. It is cut where its last ids would differ if a message followed.
- Turns without messages (sent as text or ids, or cut within the prompt by `truncate`) have no rendering. They
  stay as they are, before all messages: the template starts again after the last such turn, without a
  beginning-of-sequence token, so the model reads these turns as text before the chat.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, NoReturn

from pensieve_jax.core.errors import ChatTemplateError, TokenizerMissingError
from pensieve_jax.text.chat_template import ChatTemplate
from pensieve_jax.text.messages import Message, check_messages
from pensieve_jax.text.tokenizer import Tokenizer

_PLACEHOLDER: Final = "ReplyStandsHere"


class EarlierTurn(NamedTuple):
    """The parts of a finished turn that `chat` needs; the fields are those of `history.TurnRecord`."""

    messages: Sequence[Message] | None
    output_text: str | None
    output_token_ids: Sequence[int]
    finish_reason: str


class ChatFormat:
    """The chat template of one tokenizer. It stores nothing between calls; threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Compile the template; its `strftime_now` uses `now`, which is read once per turn.

        Raises TokenizerMissingError, and ChatTemplateError for a missing or broken template.
        """
        if tokenizer is None:
            raise TokenizerMissingError()
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "The tokenizer has no chat template, so chat does not know how messages are formatted for "
                "this model",
                "add chat_template.jinja to the model directory, or send text with generate",
            )
        self._tokenizer = tokenizer
        self._now = now
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)

    def turn_token_ids(
        self,
        earlier: Sequence[EarlierTurn | tuple[Sequence[Message] | None, str | None, Sequence[int], str]],
        new_messages: Sequence[Message],
        *,
        exact_only: bool = False,
        token_limit: int | None = None,
    ) -> list[int]:
        """Return the prompt ids of a turn, to be appended to the ids of the earlier turns.

        Args:
          earlier: the conversation's finished turns in order; the tuples' items are those of `EarlierTurn`.
          new_messages: the messages of this turn only.
          exact_only: refuse to continue a reply whose ids contain more than its text and the closing text,
            which happens if a stop string or a stop id ended the reply.
          token_limit: as in `Tokenizer.encode`.

        Raises InvalidRequestError for malformed messages; ChatTemplateError if the template refuses them or
        renders earlier ones differently, or if `exact_only` refuses the last reply; ContextLengthError.
        """
        messages = check_messages(new_messages)
        turns = [EarlierTurn(*turn) for turn in earlier]
        without_messages = [index for index, turn in enumerate(turns) if turn.messages is None]
        chat_turns = turns[without_messages[-1] + 1 :] if without_messages else turns
        if chat_turns:
            return self._later_turn(chat_turns, messages, exact_only, token_limit)
        text = self._template.render(messages, self._now(), generation_prompt=True)
        if not turns:
            return self._tokenizer.encode(text, add_bos=True, token_limit=token_limit)
        text = text.removeprefix(self._tokenizer.bos_token or "")
        return self._tokenizer.encode_after(_last_id(turns), text, token_limit=token_limit)

    def may_follow(
        self, turn: EarlierTurn | tuple[Sequence[Message] | None, str | None, Sequence[int], str]
    ) -> bool:
        """Return whether a turn may follow this one `exact_only`, judged by its ids without rendering.

        False if the reply does not end with any of the texts that close replies in short conversations.
        """
        turn = EarlierTurn(*turn)
        closings = self._short_closings
        exact = (self._is_exact(turn, self._spelled_closing(turn, closing)) for closing in closings)
        return not closings or any(exact)

    @functools.cached_property
    def _short_closings(self) -> frozenset[str]:
        """The texts that close a reply in short conversations; empty if the template refuses all of them."""
        word = {"role": "user", "content": "x"}
        past = EarlierTurn([word], "x", (), "stop")
        found = set()
        for turns in ([past], [EarlierTurn([{**word, "role": "system"}, word], "x", (), "stop")], [past] * 2):
            with contextlib.suppress(ChatTemplateError):
                found.add(self._split_rendering(turns, [word]).closing)
        return frozenset(found)

    def prefix_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that begin every conversation whose first messages are these.

        Args:
          messages: messages that conversations share, such as a system message.

        Raises InvalidRequestError for malformed messages; ChatTemplateError if the template refuses them or
        does not render them before the following messages and separately from them.
        """
        shared, now = check_messages(messages), self._now()
        next_message = {"role": "user", "content": _placeholder(shared)}
        text = self._template.render(shared, now, generation_prompt=False)
        longer = self._template.render([*shared, next_message], now, generation_prompt=True)
        if not longer.startswith(text) or not text.removeprefix(self._tokenizer.bos_token or "").strip():
            raise ChatTemplateError(
                "The chat template cannot share these messages, since it does not render them before the "
                "first user message and separately from it",
                "share the text at its beginning, and send all messages in the first turn",
            )
        ids, longer_ids = (self._tokenizer.encode(each, add_bos=True) for each in (text, longer))
        # The last characters may share a token with the text after them.
        pairs = zip(ids, longer_ids, strict=False)
        return [token_id for token_id, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _later_turn(
        self,
        turns: Sequence[EarlierTurn],
        new_messages: Sequence[Message],
        exact_only: bool,
        token_limit: int | None,
    ) -> list[int]:
        rendered = self._split_rendering(turns, new_messages)
        text = rendered.closing + rendered.behind
        spelled = self._spelled_closing(turns[-1], rendered.closing)
        if exact_only and not self._is_exact(turns[-1], spelled):
            raise ChatTemplateError(
                "The last reply's tokens contain more than its text, since a stop string or stop id ended it",
                "send the whole conversation again",
            )
        return self._tokenizer.encode_after(_last_id(turns), text[len(spelled) :], token_limit=token_limit)

    def _split_rendering(self, turns: Sequence[EarlierTurn], new_messages: Sequence[Message]) -> _Rendering:
        """Render with placeholders for replies and split the text after the last reply."""
        past = [message for turn in turns for message in turn.messages or ()]
        placeholder = _placeholder([*past, *new_messages])
        reply = {"role": "assistant", "content": placeholder}
        past = []
        for turn in turns:
            past += [*(turn.messages or ()), reply]
        now = self._now()
        before_reply = self._template.render(past[:-1], now, generation_prompt=True)
        with_reply = self._template.render(past, now, generation_prompt=False)
        whole = self._template.render([*past, *new_messages], now, generation_prompt=True)
        lead, found, closing = with_reply[len(before_reply) :].partition(placeholder)
        # White space in between belongs to the reply: a template may trim it, but the sampled ids have it.
        if not with_reply.startswith(before_reply) or not found or lead.strip():
            _no_prefix("a reply does not follow its generation prompt directly")
        if not whole.startswith(with_reply):
            _no_prefix("earlier messages are rendered differently when new ones follow")
        behind = whole[len(with_reply) :]
        if placeholder in closing + behind:
            _no_prefix("an earlier reply is repeated after itself")
        return _Rendering(closing, behind)

    def _spelled_closing(self, turn: EarlierTurn, closing: str) -> str:
        """Return the beginning of `closing` that the ids of the reply already spell."""
        token_ids = turn.output_token_ids
        if not token_ids:
            return ""
        written = self._tokenizer.decode_raw(token_ids)
        if turn.output_text is not None and written.startswith(turn.output_text):
            # All that is not shown: the end marker, or the stop string and the rest of its token.
            ending = written[len(turn.output_text) :]
        else:
            # The reply contains special tokens or was cut: only a marker at its very end counts.
            is_marker = token_ids[-1] in self._tokenizer.special_ids
            ending = self._tokenizer.decode_raw(token_ids[-1:]) if is_marker else ""
        # A template may write a space before its end marker that a model does not generate (Llama 2).
        for start in (0, len(closing) - len(closing.lstrip())):
            if closing.startswith(ending, start):
                return closing[: start + len(ending)] if ending else ""
        return closing if closing and ending.startswith(closing) else ""

    def _is_exact(self, turn: EarlierTurn, spelled: str) -> bool:
        """Return whether the reply's ids are exactly its text and an end of sequence, or `spelled`.

        `spelled` is the beginning of the closing text. Control tokens within a reply are not text and are
        ignored.
        """
        if turn.finish_reason != "stop" or not turn.output_token_ids or turn.output_text is None:
            return True
        if self._tokenizer.decode(turn.output_token_ids) == turn.output_text:
            last_id = turn.output_token_ids[-1]
            return (
                bool(spelled)
                or last_id not in self._tokenizer.special_ids
                or last_id == self._tokenizer.eos_id
            )
        written = self._tokenizer.decode_raw(turn.output_token_ids)
        # A template may write a space before its end marker, which the reply then lacks.
        return bool(spelled) and written in (turn.output_text + spelled, turn.output_text + spelled.lstrip())


class _Rendering(NamedTuple):
    """Text after the last reply: its closing text, then the new messages and the generation prompt."""

    closing: str
    behind: str


def _no_prefix(reason: str) -> NoReturn:
    raise ChatTemplateError(
        f"The chat template cannot continue a conversation, since {reason}",
        "use a template that only appends to a conversation, or send text with generate",
    )


def _placeholder(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a word that no message contains, of letters only, so that trimming and quoting keep it."""
    word = _PLACEHOLDER
    texts = [str(part) for message in messages for part in (*message, *message.values())]
    while any(word in text for text in texts):
        word += "X"
    return word


def _last_id(turns: Sequence[EarlierTurn]) -> int | None:
    token_ids = turns[-1].output_token_ids
    return token_ids[-1] if token_ids else None
