"""Chat in the terminal, with streamed replies.

    pensieve chat
    pensieve chat path/to/model --history=chats.sqlite --temperature=0.7
    pensieve chat --system="You are a friendly assistant who answers in short sentences."

Without a model it uses the small model that comes with the library, which talks about restaurants, music,
flights and the like, and remembers facts from earlier turns. Compiled steps are stored for the next start of
any command in `--compilation_cache_dir` (empty: not stored).

Messages use the model's chat template if it has one, otherwise plain text. On a terminal, lines of any length
are edited and recalled as in a shell; pasted text is one message, and a line that ends in \\ continues on the
next line. What is typed during a reply begins the next line, and is sent only then. After each reply stands
where the KV cache of its history was: in device memory, in host memory, or recomputed. Ctrl-C cancels a reply
as if its line had never been sent; at the prompt it drops the line, and a second Ctrl-C leaves. `/help` lists
the commands. Input may be a pipe: then each line is a message, and only replies are written.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from absl import flags

from pensieve_jax import InvalidRequestError
from pensieve_jax.commands.chat_session import COMMANDS, Chat
from pensieve_jax.commands.engine_flags import (
    check_engine_flags,
    define_engine_flags,
    define_history_flag,
    define_sampling_flags,
    open_llm,
    sampling_params,
    set_command_defaults,
    shows_progress,
    take_model_word,
)
from pensieve_jax.commands.interrupts import EXIT_INTERRUPTED, exiting_on_interrupt
from pensieve_jax.commands.launch import Interrupt, printable
from pensieve_jax.commands.line_input import LineInput
from pensieve_jax.commands.words import SMALL_MODEL
from pensieve_jax.engine.conversations import check_conversation_id
from pensieve_jax.model_source import DEFAULT_MODEL

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
STATE_DIR = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve_jax"
INTRODUCTION = f"""\
{SMALL_MODEL}
Ask it for a restaurant, music, a flight, a movie, a hotel or the weather, as in "Hi! My name is Ada. I am
looking for a place to eat in San Jose." Some turns later, ask: "What is my name?"\
"""
LEAVING = "(Ctrl-C again, Ctrl-D or /quit leaves)"


def main() -> int:
    """Chat until the end of input; return the exit status."""
    params = sampling_params()
    check_conversation_id(FLAGS.conversation_id, "--conversation_id")
    check_engine_flags()
    lines = open_lines()
    tells = lines.is_terminal if FLAGS.accounts is None else FLAGS.accounts
    if not shows_progress() and FLAGS.progress is None:
        print("loading; the first start compiles for a minute or more", file=sys.stderr)
    with exiting_on_interrupt():
        opened = open_llm(history=FLAGS.history)
    with opened as llm, lines:
        chat = Chat(llm, params, FLAGS.conversation_id, sys.stdout, system=FLAGS.system, tells_accounts=tells)
        if lines.is_terminal:
            print(f"model {FLAGS.model}, conversation {chat.conversation_id}; /help lists commands")
            if FLAGS.model == DEFAULT_MODEL:
                print(INTRODUCTION)
        return converse(chat, lines)


def open_lines() -> LineInput:
    """Open the line input. If the default history file cannot be used, warn and continue without it.

    Raises:
      InvalidRequestError: the file of `--line_history` cannot be used.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 must not end a session
    try:
        return LineInput(Path(FLAGS.line_history) if FLAGS.line_history else None, COMMANDS)
    except InvalidRequestError as error:
        if not FLAGS["line_history"].using_default_value:
            raise
        print(f"your lines are not stored for the next session: {error}", file=sys.stderr)
        return LineInput(None, COMMANDS)


def converse(chat: Chat, lines: LineInput) -> int:
    """Handle messages until `/quit` or the end of input, and return the exit status."""
    interrupted = False
    while True:
        try:
            line = lines.read(f"{printable(chat.conversation_id)}> ")
        except InvalidRequestError as error:
            print(f"error: {error}")
            continue
        except (EOFError, KeyboardInterrupt) as end:
            print()
            if isinstance(end, EOFError):
                return 0
            if interrupted or not lines.is_terminal:
                return EXIT_INTERRUPTED
            interrupted = True
            print(LEAVING)
            continue
        interrupted = False
        with Interrupt():  # a Ctrl-C between two replies must not end the session
            if not chat.handle(line):
                return 0


def define_flags() -> None:
    """Define the command-line flags of `pensieve chat`."""
    flags.DEFINE_string("conversation_id", "default", "The conversation to begin with.")
    flags.DEFINE_string("system", None, "System prompt of new conversations, which share its KV cache.")
    flags.DEFINE_bool(
        "accounts",
        None,
        "After each reply, show where the KV cache of its history was; default: on a terminal.",
    )
    flags.DEFINE_string(
        "line_history",
        str(STATE_DIR / "chat_lines.jsonl"),
        "File that stores your lines for the next session, readable only by you; empty: none.",
    )
    define_engine_flags()
    set_command_defaults()
    take_model_word()
    define_history_flag()
    define_sampling_flags(max_tokens=512)
