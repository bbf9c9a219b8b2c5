"""Readers of chats as texts: ShareGPT, UltraChat, OpenAI-style messages (vLLM's benchmark too), dialogues.

Owns: these file formats (each as a JSON array or as JSON lines), and the conversion of messages to turns.
Does not know: tokenizers; the caller's `count_tokens` counts the tokens of texts.

A turn's prompt is everything between two answers: user, system and tool messages together. Tokens that a chat
template adds to a message are not counted unless `count_tokens` does. Public files hold conversations that
cannot be served (empty, or without an answer to a prompt). They are left out and reported to `on_skip`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pensieve_lab.workload.errors import TraceError
from pensieve_lab.workload.rows import Row, read_json
from pensieve_lab.workload.trace import ConversationTrace, TurnTrace, unused_id

_WORDS_AND_MARKS: Final = re.compile(r"\w+|[^\w\s]")

type CountTokens = Callable[[str], int]
type OnSkip = Callable[[TraceError], None]
type Conversations = Iterator[ConversationTrace]
type Message = tuple[bool, str]
"""Whether the message is an answer, and its text."""


def count_words(text: str) -> int:
    """Count words and punctuation marks without a tokenizer: 0.87 to 0.98 of GPT-2's tokens for English."""
    return len(_WORDS_AND_MARKS.findall(text))


# Whether a speaker gives the answers. ShareGPT's speakers are those of the public dumps.
_SHAREGPT_SPEAKERS: Final = {"human": False, "user": False, "system": False, "tool": False} | dict.fromkeys(
    ("gpt", "chatgpt", "assistant", "model", "bing", "bard"), True
)
_OPENAI_ROLES: Final = {
    "system": False,
    "developer": False,
    "user": False,
    "tool": False,
    "function": False,
} | {"assistant": True}
_DIALOGUE_SPEAKERS: Final = {"U": False, "A": True, "S": True}


def read_sharegpt(
    path: Path, count_tokens: CountTokens, on_skip: OnSkip | None
) -> Iterator[ConversationTrace]:
    """Read `{"id", "conversations": [{"from": "human" | "gpt" ..., "value": text}]}`."""
    return _read(read_json(path), _sharegpt_messages, count_tokens, on_skip)


def read_ultrachat(
    path: Path, count_tokens: CountTokens, on_skip: OnSkip | None
) -> Iterator[ConversationTrace]:
    """Read `{"id", "data": [prompt, answer, prompt, ...]}`."""
    return _read(read_json(path), _ultrachat_messages, count_tokens, on_skip)


def read_openai(path: Path, count_tokens: CountTokens, on_skip: OnSkip | None) -> Conversations:
    """Read `{"messages": [{"role", "content"}]}`, with an optional `id`."""
    return _read(read_json(path), _openai_messages, count_tokens, on_skip)


def read_dialogues(
    path: Path, count_tokens: CountTokens, on_skip: OnSkip | None
) -> Iterator[ConversationTrace]:
    """Read `{"id", "turns": [["U", text], ["A" | "S", text], ...]}`."""
    return _read(read_json(path), _dialogue_messages, count_tokens, on_skip)


def _read(
    rows: Iterable[Row],
    messages_of: Callable[[Row], Iterable[Message]],
    count_tokens: CountTokens,
    on_skip: OnSkip | None,
) -> Conversations:
    num_uses: dict[str, int] = {}
    names: set[str] = set()
    for row in rows:
        turns = _turns(messages_of(row), count_tokens)
        if not turns:
            if on_skip is not None:
                on_skip(TraceError(row.path, row.line, "has no prompt with an answer to it"))
            continue
        # Public files repeat or omit some ids: a missing id becomes the line, and repeats are numbered.
        conversation_id = row.identifier("id") if row.has("id") else f"line {row.line}"
        num_uses[conversation_id] = uses = num_uses.get(conversation_id, 0) + 1
        # The name may already exist as a generated name, or as an id that looks like one.
        name = unused_id(conversation_id if uses == 1 else f"{conversation_id}#{uses}", names, "#")
        names.add(name)
        yield ConversationTrace(name, turns)


def _turns(messages: Iterable[Message], count_tokens: CountTokens) -> tuple[TurnTrace, ...]:
    """Convert messages to turns; a leading answer without a prompt and unanswered prompts are dropped."""
    lengths: list[tuple[int, int]] = []
    prompt_tokens = 0
    for is_answer, text in messages:
        num_tokens = count_tokens(text)
        if not is_answer:
            prompt_tokens += num_tokens
        elif num_tokens and prompt_tokens:
            lengths.append((prompt_tokens, num_tokens))
            prompt_tokens = 0
        elif lengths:  # the answer continues in a second message, or this one is empty
            lengths[-1] = (lengths[-1][0], lengths[-1][1] + num_tokens)
    return tuple(TurnTrace(prompt, output) for prompt, output in lengths)


def _sharegpt_messages(row: Row) -> Iterator[Message]:
    for message in row.rows("conversations"):
        yield _is_answer(message, "from", _SHAREGPT_SPEAKERS), message.text("value")


def _ultrachat_messages(row: Row) -> Iterator[Message]:
    for index, text in enumerate(row.items("data")):
        if not isinstance(text, str):
            raise row.error("data", f"a list of strings; item {index} is not a string")
        yield index % 2 == 1, text


def _openai_messages(row: Row) -> Iterator[Message]:
    for message in row.rows("messages"):
        yield _is_answer(message, "role", _OPENAI_ROLES), _openai_text(message)


def _openai_text(message: Row) -> str:
    """Return the content as text: a string, a list of parts, or null beside tool calls (counted as JSON)."""
    calls = json.dumps(message.values["tool_calls"]) if message.has("tool_calls") else ""
    content = message.values.get("content")
    if isinstance(content, list):
        parts = message.rows("content")
        return "".join(part.text("text") for part in parts if part.values.get("type") == "text") + calls
    if content is None and calls:
        return calls
    return message.text("content") + calls


def _dialogue_messages(row: Row) -> Iterator[Message]:
    limit = 'a list of ["U" | "A" | "S", text]'
    for index, pair in enumerate(row.items("turns")):
        match pair:
            case [str(speaker), str(text)] if speaker in _DIALOGUE_SPEAKERS:
                yield _DIALOGUE_SPEAKERS[speaker], text
            case _:
                raise row.error("turns", f"{limit}; item {index} is not")


def _is_answer(message: Row, field: str, speakers: Mapping[str, bool]) -> bool:
    is_answer = speakers.get(message.text(field))
    if is_answer is None:
        raise message.error(field, f"one of {', '.join(speakers)}")
    return is_answer
