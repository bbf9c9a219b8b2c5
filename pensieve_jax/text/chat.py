"""Chat messages to the token ids of a turn, by the model's own template.

Owns: rendering of chat templates, and which part of a rendering is new in a turn.
Does not know: where earlier turns are kept, sampling, KV state.

A conversation only ever grows, so a turn sends render(all messages, generation prompt) minus what stands in
the history already. The history holds the reply as it was sampled, and that is never tokenized again: the
reply is rendered as a placeholder word, and the text behind it is encoded. That text begins with what closes
a reply (an end marker, as a rule), of which the part that the reply's last ids spell already is left out. So
a reply that was cut by its length gets its end marker now, and one that ended by it does not get a second
one.

- A template that writes earlier messages differently once others follow cannot be used: ChatTemplateError.
- The beginning-of-sequence token is put at a conversation's start, whether the template writes it or not. One
  that the template itself writes at the start of later turns (as Llama 2's does) is part of its format and
  stays.
- Messages that conversations share as their beginning are a rendering of their own, without a generation
  prompt, cut where its last ids would be others with a message behind it.
- Turns without messages (sent as text or ids, or cut within the prompt by `truncate`) have no rendering. They
  stay as they are, before everything: the template starts over behind the last of them, without a
  beginning-of-sequence token, so the model reads them as text that came before the chat.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pensieve_jax.core.errors import ChatTemplateError, TokenizerMissingError
from pensieve_jax.text.messages import Message, check_messages
from pensieve_jax.text.tokenizer import Tokenizer

_PLACEHOLDER: Final = "ReplyStandsHere"
# What an expression of a template may raise beside Jinja's own errors (None + "x", missing["key"], 1 / 0).
_EXPRESSION_ERRORS: Final = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class EarlierTurn(NamedTuple):
    """What `chat` needs to know of a finished turn; the fields are those of `history.Turn`."""

    messages: Sequence[Message] | None
    output_text: str | None
    output_token_ids: Sequence[int]
    finish_reason: str


class ChatFormat:
    """The chat template of one tokenizer. Keeps nothing of what is written; safe to share by threads."""

    def __init__(self, tokenizer: Tokenizer | None, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Compile the template; `now` is what its `strftime_now` reads, once per turn.

        Raises TokenizerMissingError, and ChatTemplateError if there is no template or it is broken.
        """
        if tokenizer is None:
            raise TokenizerMissingError()
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "The tokenizer has no chat template, so chat cannot tell how messages are written for this "
                "model",
                "add chat_template.jinja to the model directory, or send text with generate",
            )
        self._tokenizer = tokenizer
        self._now = now
        try:
            self._template = _environment().from_string(tokenizer.chat_template)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The chat template is not valid Jinja ({error})",
                "correct chat_template in the model directory",
            ) from error

    def turn_token_ids(
        self,
        earlier: Sequence[EarlierTurn | tuple[Sequence[Message] | None, str | None, Sequence[int], str]],
        new_messages: Sequence[Message],
        *,
        as_told: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """The prompt ids of a turn, to be appended to the ids of the earlier ones.

        Args:
          earlier: the conversation's finished turns in order; the tuples' items are `EarlierTurn`'s.
          new_messages: the messages of this turn only.
          as_told: refuse to go on from a reply whose last ids say more than its text and what closes it:
            from one that a stop string or a stop id ended.
          most: as of `Tokenizer.encode`.

        Raises InvalidRequestError for malformed messages, ChatTemplateError if the template refuses them or
        has no prefix property, or the last reply is not as it was told; ContextLengthError.
        """
        messages = check_messages(new_messages)
        turns = [EarlierTurn(*turn) for turn in earlier]
        without_messages = [index for index, turn in enumerate(turns) if turn.messages is None]
        chat_turns = turns[without_messages[-1] + 1 :] if without_messages else turns
        if chat_turns:
            return self._later_turn(chat_turns, messages, as_told, most)
        text = self._render(messages, self._now(), generation_prompt=True)
        if not turns:
            return self._tokenizer.encode(text, add_bos=True, most=most)
        text = text.removeprefix(self._tokenizer.bos_token or "")
        return self._tokenizer.encode_after(_last_id(turns), text, most=most)

    def may_follow(
        self, turn: EarlierTurn | tuple[Sequence[Message] | None, str | None, Sequence[int], str]
    ) -> bool:
        """Whether a turn may follow this one `as_told`: asked of its ids alone, before a path is rendered.

        False where the reply ends with none of what the template closes replies with in short conversations.
        """
        turn = EarlierTurn(*turn)
        closings = self._short_closings
        told = (self._is_as_told(turn, self._spelled_closing(turn, closing)) for closing in closings)
        return not closings or any(told)

    @functools.cached_property
    def _short_closings(self) -> frozenset[str]:
        """What stands behind a reply in conversations that most templates write; empty where none is."""
        word = {"role": "user", "content": "x"}
        past = EarlierTurn([word], "x", (), "stop")
        found = set()
        for turns in ([past], [EarlierTurn([{**word, "role": "system"}, word], "x", (), "stop")], [past] * 2):
            with contextlib.suppress(ChatTemplateError):
                found.add(self._split_rendering(turns, [word]).closing)
        return frozenset(found)

    def prefix_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids that every conversation begins with whose first messages are these.

        Args:
          messages: what conversations share, such as a system message.

        Raises InvalidRequestError for malformed messages, ChatTemplateError if the template refuses them, or
        does not write them before, and apart from, what follows.
        """
        shared, now = check_messages(messages), self._now()
        next_message = {"role": "user", "content": _placeholder(shared)}
        text = self._render(shared, now, generation_prompt=False)
        longer = self._render([*shared, next_message], now, generation_prompt=True)
        if not longer.startswith(text) or not text.removeprefix(self._tokenizer.bos_token or "").strip():
            raise ChatTemplateError(
                "The chat template cannot share these messages, since it does not write them before the "
                "first user message and apart from it",
                "share the text that it begins with, and send all messages in the first turn",
            )
        ids, longer_ids = (self._tokenizer.encode(each, add_bos=True) for each in (text, longer))
        # The last characters may be part of one token with what stands behind them.
        pairs = zip(ids, longer_ids, strict=False)
        return [token_id for token_id, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _later_turn(
        self, turns: Sequence[EarlierTurn], new_messages: Sequence[Message], as_told: bool, most: int | None
    ) -> list[int]:
        rendered = self._split_rendering(turns, new_messages)
        text = rendered.closing + rendered.behind
        spelled = self._spelled_closing(turns[-1], rendered.closing)
        if as_told and not self._is_as_told(turns[-1], spelled):
            raise ChatTemplateError(
                "The last reply's tokens say more than its text, since a stop string or a stop id ended it",
                "write the whole conversation anew",
            )
        return self._tokenizer.encode_after(_last_id(turns), text[len(spelled) :], most=most)

    def _split_rendering(self, turns: Sequence[EarlierTurn], new_messages: Sequence[Message]) -> _Rendering:
        """Render with placeholders for replies and take apart what stands behind the last of them."""
        past = [message for turn in turns for message in turn.messages or ()]
        placeholder = _placeholder([*past, *new_messages])
        reply = {"role": "assistant", "content": placeholder}
        past = []
        for turn in turns:
            past += [*(turn.messages or ()), reply]
        now = self._now()
        before_reply = self._render(past[:-1], now, generation_prompt=True)
        with_reply = self._render(past, now, generation_prompt=False)
        whole = self._render([*past, *new_messages], now, generation_prompt=True)
        lead, found, closing = with_reply[len(before_reply) :].partition(placeholder)
        # White space in between is the reply's own: where a template trims it, the sampled ids still have it.
        if not with_reply.startswith(before_reply) or not found or lead.strip():
            _no_prefix("a reply is not written right behind the generation prompt it answered")
        if not whole.startswith(with_reply):
            _no_prefix("earlier messages are written differently once new ones follow")
        behind = whole[len(with_reply) :]
        if placeholder in closing + behind:
            _no_prefix("an earlier reply is repeated behind itself")
        return _Rendering(closing, behind)

    def _spelled_closing(self, turn: EarlierTurn, closing: str) -> str:
        """The beginning of `closing` that the ids of the reply spell already."""
        token_ids = turn.output_token_ids
        if not token_ids:
            return ""
        written = self._tokenizer.decode_raw(token_ids)
        if turn.output_text is not None and written.startswith(turn.output_text):
            # All that is not shown: the end marker, or the stop string with what its token held beside it.
            ending = written[len(turn.output_text) :]
        else:
            # Special tokens within the reply, or a reply that was cut: only a marker at its very end counts.
            is_marker = token_ids[-1] in self._tokenizer.special_ids
            ending = self._tokenizer.decode_raw(token_ids[-1:]) if is_marker else ""
        # A template may write a space before its end marker, which a model does not say (Llama 2).
        for start in (0, len(closing) - len(closing.lstrip())):
            if closing.startswith(ending, start):
                return closing[: start + len(ending)] if ending else ""
        return closing if closing and ending.startswith(closing) else ""

    def _is_as_told(self, turn: EarlierTurn, spelled: str) -> bool:
        """Whether a reply's ids are its text, then an end of sequence or `spelled`, the closing's beginning.

        Control tokens within a reply are no text, and are not looked at.
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

    def _render(self, messages: Sequence[Message], now: datetime, *, generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=generation_prompt,
                bos_token=self._tokenizer.bos_token or "",
                eos_token=self._tokenizer.eos_token or "",
                strftime_now=now.strftime,
            )
        except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
            raise ChatTemplateError(
                f"The chat template cannot write these messages ({error})",
                "change their roles or order to what the template allows, or send text with generate",
            ) from error


class _Rendering(NamedTuple):
    """Text behind the last reply: what closes it, then the new messages and the generation prompt."""

    closing: str
    behind: str


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`, a mark for training that renders as its contents."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a set of the instance

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Take the block's contents for the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which `message.role` does not take an exception each time."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the base class, which looks for attributes before keys."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> jinja2.Environment:
    """Jinja as chat templates are written for; sandboxed, since a template comes with a download."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _no_prefix(reason: str) -> NoReturn:
    raise ChatTemplateError(
        f"The chat template cannot continue a conversation, since {reason}",
        "use a template under which a conversation only grows, or send text with generate",
    )


def _placeholder(messages: Sequence[Mapping[str, Any]]) -> str:
    """A word that no message holds, of letters only, so that trimming and quoting leave it alone."""
    word = _PLACEHOLDER
    texts = [str(part) for message in messages for part in (*message, *message.values())]
    while any(word in text for text in texts):
        word += "X"
    return word


def _last_id(turns: Sequence[EarlierTurn]) -> int | None:
    token_ids = turns[-1].output_token_ids
    return token_ids[-1] if token_ids else None
