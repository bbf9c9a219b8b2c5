"""Recorded dialogues for training.

Owns: the file format and its errors.
Does not know: tokens, templates or facts.
Called by `programs.train_chat_model`.

A line is a JSON object whose `turns` are ["U", text] for a user and [another letter, text] for the other
side: "S" for the system of a task, say, or "A" for an assistant. A name that ends in .gz is decompressed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_jax import ConfigError, InvalidRequestError

_USER = "U"


class Exchange(NamedTuple):
    """A user message and its reply."""

    user: str
    reply: str


class Conversation(NamedTuple):
    """Exchanges in order, with an optional system message before them."""

    exchanges: tuple[Exchange, ...]
    system: str | None = None


def read_dialogues(flag: str, path: str) -> list[Conversation]:
    """Return every dialogue of the file that has an exchange; raises ConfigError naming the flag.

    Consecutive messages of one speaker are joined with a line break. A last user message without a reply, and
    messages of the other side before the first user message, are left out.
    """
    opener = gzip.open if path.endswith(".gz") else Path.open
    dialogues = []
    try:
        with opener(Path(path), "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    dialogues.append(_conversation(json.loads(line), number))
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(flag, path, "a readable file of dialogues", str(error)) from error
    kept = [dialogue for dialogue in dialogues if dialogue.exchanges]
    if not kept:
        raise ConfigError(flag, path, "a file with at least one dialogue")
    return kept


def _conversation(value: Any, number: int) -> Conversation:
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not all(_is_turn(turn) for turn in turns):
        limit = 'an object whose "turns" are pairs of a speaker and a text'
        raise InvalidRequestError(f"line {number}", value, limit)
    merged: list[tuple[bool, str]] = []
    for speaker, text in turns:
        is_user = speaker == _USER
        if merged and merged[-1][0] == is_user:
            merged[-1] = (is_user, f"{merged[-1][1]}\n{text.strip()}")
        elif merged or is_user:
            merged.append((is_user, text.strip()))
    texts = [text for _, text in merged]
    return Conversation(tuple(map(Exchange, texts[::2], texts[1::2])))


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)
