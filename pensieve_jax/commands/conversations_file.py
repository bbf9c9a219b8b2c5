"""Input formats of `generate`: conversations, requests and prompts, one on a line.

Owns: the formats, and the errors of a line.
Does not know: models; the caller checks ids against a vocabulary.

A line of JSON is an object of one of these forms. Without `conversation_id` or `id`, a conversation is named
"line-<number>".
  {"turns": [...]}     a conversation of at least one turn. A turn is {"prompt": "text"}, {"prompt": [ids]} or
                       {"messages": [{"role": ..., "content": ...}]}. It may have fields of SamplingParams,
                       which apply to this turn only. Or it is ["U", "text"]: a turn of recorded dialogues;
                       turns of other speakers are skipped.
  {"messages": [...]}  one turn, which answers the last message. If the assistant wrote that, as in data for
                       fine-tuning, it is left out.
  {"prompt": ...}      one turn without the chat template.
  {"custom_id": ...}   a request of OpenAI's batch format (`batch_format`).
The middle two take fields of SamplingParams, too. Other keys are errors, except `services`, which published
dialogues have.

In a file whose first line does not begin with { or [, and whose name does not end in .json or .jsonl, each
line is a user's message as plain text. Files named *.gz are decompressed. Blank lines are skipped.
"""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pensieve_jax import InvalidRequestError, SamplingParams
from pensieve_jax.commands.batch_format import is_request, read_request
from pensieve_jax.core.conversation import is_conversation_id
from pensieve_jax.text import Message, check_messages

_USER = "U"
_ABOUT = ("services",)  # metadata of a recorded dialogue in Schema-Guided Dialogue
_NAMES = ("conversation_id", "id")
_JSON_SUFFIXES = (".json", ".jsonl")
_OVERRIDES = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class InputTurn:
    """One turn to run: text, ids or messages.

    Attributes:
      text: the line of a plain text file, which a model without a chat template continues; None for others.
    """

    prompt: str | list[int] | tuple[Message, ...]
    params: SamplingParams
    text: str | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the prompt consists of messages for the model's chat template."""
        return isinstance(self.prompt, tuple)


@dataclass(frozen=True, slots=True)
class InputConversation:
    """Conversation of one line of the file.

    Attributes:
      url: route of a request of OpenAI's batch format; None for other lines.
      is_single: whether the line is one turn, without a list of turns.
    """

    conversation_id: str
    turns: tuple[InputTurn, ...]
    line_number: int
    url: str | None = None
    is_single: bool = False


class InputFileError(Exception):
    """A file has invalid lines, each given as (line number, reason)."""

    def __init__(self, path: str, problems: list[tuple[int, str]]) -> None:
        """Store all invalid lines. The message has the first 20."""
        self.problems = problems
        lines = [f"{path}:{number}: {reason}" for number, reason in problems[:20]]
        if len(problems) > 20:
            lines.append(f"... and {len(problems) - 20} more")
        super().__init__("\n".join(lines))


def read_conversations(
    path: str, defaults: SamplingParams, model: str | None = None
) -> list[InputConversation]:
    """Read the whole file; raise InputFileError, which names every invalid line, or OSError.

    `model` is the name that requests of OpenAI's batch format must have; None accepts any.
    """
    conversations: list[InputConversation] = []
    problems: list[tuple[int, str]] = []
    seen: dict[str, int] = {}
    lines = _lines(path)
    first_line = list(itertools.islice(lines, 1))
    is_text = bool(first_line) and _is_text(path, first_line[0][1])
    for number, line in itertools.chain(first_line, lines):
        try:
            if is_text:
                one = _text_line(line.decode("utf-8"), number, defaults)
            else:
                one = _conversation(json.loads(line), number, defaults, model)
            first = seen.setdefault(one.conversation_id, number)
            if first != number:
                raise InvalidRequestError(
                    "conversation_id", one.conversation_id, f"unlike that of line {first}"
                )
            conversations.append(one)
        except (InvalidRequestError, UnicodeDecodeError) as error:
            problems.append((number, str(error)))
        except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, or 1,000 brackets
            problems.append((number, f"not JSON: {error}"))
    if not conversations and not problems:
        problems.append((1, "the file has no conversations"))
    if problems:
        raise InputFileError(path, problems)
    return conversations


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    opener = gzip.open if path.endswith(".gz") else Path.open
    try:
        with opener(Path(path), "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error) as error:  # other invalid archives raise OSError
        raise OSError(f"it is not a complete gzip archive: {error}") from error


def _is_text(path: str, first: bytes) -> bool:
    """Return whether a file is plain text, by its name and its first line."""
    is_json = path.removesuffix(".gz").endswith(_JSON_SUFFIXES)
    return not is_json and first.lstrip(b"\xef\xbb\xbf \t")[:1] not in (b"{", b"[")


def _text_line(line: str, number: int, defaults: SamplingParams) -> InputConversation:
    text = line.removeprefix("\ufeff").rstrip("\r\n")
    messages = check_messages([{"role": "user", "content": text}])
    return InputConversation(f"line-{number}", (InputTurn(messages, defaults, text),), number, is_single=True)


def _conversation(value: Any, number: int, defaults: SamplingParams, model: str | None) -> InputConversation:
    if not isinstance(value, dict):
        raise InvalidRequestError("line", value, "a JSON object with the key turns, messages or prompt")
    if is_request(value):

        def parse(field: str, prompt: Any, params: dict[str, Any]) -> InputTurn:
            return _single({field: prompt, **params}, defaults)

        url, turn = read_request(value, model, parse)
        custom_id = _checked_name("custom_id", value.get("custom_id"))
        return InputConversation(custom_id, (turn,), number, url, is_single=True)
    named = value.get("conversation_id", value.get("id", f"line-{number}"))
    conversation_id = _checked_name("conversation_id", named)
    if "turns" not in value and ("messages" in value or "prompt" in value):
        turn = _single({name: field for name, field in value.items() if name not in _NAMES}, defaults)
        return InputConversation(conversation_id, (turn,), number, is_single=True)
    _check_keys(value, {"conversation_id", "id", "turns", *_ABOUT}, "")
    given = value.get("turns")
    if not isinstance(given, list):
        raise InvalidRequestError("turns", given, "a list of turns")
    turns = [_turn(turn, f"turns[{i}]", defaults) for i, turn in enumerate(given) if not _is_reply(turn)]
    if not turns:
        raise InvalidRequestError("turns", given, "a list with at least one turn of a user")
    return InputConversation(conversation_id, tuple(turns), number)


def _checked_name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not is_conversation_id(name):
        limit = "a non-empty string that UTF-8 can hold, without NUL"
        raise InvalidRequestError(field, name, limit)
    return name


def _single(value: dict[str, Any], defaults: SamplingParams) -> InputTurn:
    """Return the turn of a line that has only one, without recorded replies at the end of its messages."""
    messages = value.get("messages")
    if isinstance(messages, list):
        while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        value = {**value, "messages": messages}
    return _turn(value, "", defaults)


def _check_keys(value: dict[str, Any], known: set[str], where: str) -> None:
    """Raise InvalidRequestError for an unknown key."""
    for name in value:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"perhaps {similar[0]} is meant" if similar else f"known are {', '.join(sorted(known))}"
            if not where and name in _OVERRIDES | {"prompt", "messages"}:
                hint = 'it belongs to a turn, as in {"turns": [{"messages": [...], "max_tokens": 9}]}'
            raise InvalidRequestError(f"unknown key {where}{name}", value[name], "left out", hint)


def _is_reply(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and isinstance(turn[0], str) and turn[0] != _USER


def _turn(turn: Any, field: str, defaults: SamplingParams) -> InputTurn:
    if isinstance(turn, list) and len(turn) == 2 and turn[0] == _USER:
        turn = {"prompt": turn[1]}
    if not isinstance(turn, dict) or ("prompt" in turn) == ("messages" in turn):
        limit = 'an object with either prompt or messages, or ["U", text]'
        raise InvalidRequestError(field or "line", turn, limit)
    where = f"{field}." if field else ""
    _check_keys(turn, {*_OVERRIDES, "prompt", "messages"}, where)
    for name in ("stop", "stop_token_ids"):
        if not isinstance(turn.get(name, []), list):
            raise InvalidRequestError(f"{where}{name}", turn[name], "a list")
    try:
        params = dataclasses.replace(defaults, **{key: turn[key] for key in turn.keys() & _OVERRIDES})
        prompt = check_messages(turn["messages"]) if "messages" in turn else _prompt(turn["prompt"])
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}{error.field}", error.value, error.limit, error.hint) from error
    return InputTurn(prompt, params)


def _prompt(prompt: Any) -> str | list[int]:
    is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise InvalidRequestError("prompt", prompt, "text or a list of token ids, not empty")
    result: str | list[int] = prompt
    return result
