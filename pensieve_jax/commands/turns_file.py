"""Output formats of `generate`: turns in JSON lines, each written at once.

A request of OpenAI's batch format is answered in that format (`batch_format`).

Owns: the fields of other lines, and the continuation of an interrupted run's file from the history.
Does not know: how turns are run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve_jax import InvalidRequestError, Output, UnknownConversationError
from pensieve_jax.commands.batch_format import reply_of, stored_line
from pensieve_jax.commands.conversations_file import InputConversation, InputTurn

if TYPE_CHECKING:  # it imports JAX
    from pensieve_jax import LLM

type OutputLine = dict[str, Any]


def finished_turns(
    llm: LLM, conversations: Sequence[InputConversation], model: str
) -> dict[tuple[str, int], OutputLine]:
    """Return the lines of turns in the history; raise InvalidRequestError if it holds different turns.

    `model` is its name in results of OpenAI's batch format.
    """
    lines = {}
    for conversation in conversations:
        try:
            stored = llm.history(conversation.conversation_id).turns
        except UnknownConversationError:
            continue
        for index, (turn, past) in enumerate(zip(conversation.turns, stored, strict=False)):
            prompt: Any = turn.prompt
            if isinstance(prompt, str):
                assert llm.tokenizer is not None
                prompt = llm.tokenizer.encode(prompt, add_bos=index == 0)
            if prompt != (past.messages if turn.is_chat else list(past.prompt_token_ids)):
                name = f"line {conversation.line_number}"
                name += "" if conversation.is_single else f", turns[{index}]"
                limit = f"what the history has as turn {index} of {conversation.conversation_id!r}"
                raise InvalidRequestError(name, turn.prompt, limit, "take another history or conversation_id")
            if conversation.url is not None:
                name, text = conversation.conversation_id, past.output_text or ""
                lines[name, index] = stored_line(name, conversation.url, model, text, past.finish_reason)
                continue
            lines[conversation.conversation_id, index] = {
                "conversation_id": conversation.conversation_id,
                "turn": index,
                "prompt": turn.prompt,
                "token_ids": past.output_token_ids,
                "text": past.output_text or "",
                "finish_reason": past.finish_reason,
                "usage": None,
                "seed": past.seed,
            }
    return lines


def read_output(path: Path) -> Iterator[OutputLine]:
    """Yield the lines of an earlier run; skip others, such as one that was cut."""
    if not path.exists():
        return
    kinds = {"conversation_id": str, "turn": int, "token_ids": list}
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and (
            reply_of(line) is not None or all(isinstance(line.get(key), kind) for key, kind in kinds.items())
        ):
            yield line


def _key(line: OutputLine) -> tuple[str, int]:
    """Return the conversation and the turn of a line."""
    return (line["custom_id"], 0) if "custom_id" in line else (line["conversation_id"], line["turn"])


def _says_the_same(line: OutputLine, other: OutputLine) -> bool:
    """Return whether two lines of the same turn have the same reply, in the same format."""
    if "custom_id" in line or "custom_id" in other:
        return reply_of(line) == reply_of(other) is not None
    return bool(line["token_ids"] == list(other["token_ids"]))


def partial_path(path: Path) -> Path:
    """Return the path that `start_output` writes before it renames the file."""
    return path.with_name(f"{path.name}.partial")


def start_output(path: Path, done: Mapping[tuple[str, int], OutputLine]) -> None:
    """Atomically replace the file by the lines of finished turns; keep old lines of the same turns."""
    old = {_key(line): line for line in read_output(path)} if done else {}
    lines = []
    for key, line in done.items():
        kept = old.get(key)
        lines.append(kept if kept is not None and _says_the_same(kept, line) else line)
    partial = partial_path(path)
    try:
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # name the user's path


def output_line(turn: InputTurn, index: int, output: Output) -> OutputLine:
    """Return the output line of a turn."""
    line: OutputLine = {
        "conversation_id": output.conversation_id,
        "turn": index,
        "prompt": turn.prompt,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "usage": dataclasses.asdict(output.usage),
        "seed": output.seed,
    }
    if output.logprobs is not None:
        line["logprobs"] = [entry._asdict() for entry in output.logprobs]
    if output.prompt_logprobs is not None:
        entries = output.prompt_logprobs
        line["prompt_logprobs"] = [None if entry is None else entry._asdict() for entry in entries]
    return line
