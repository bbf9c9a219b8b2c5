"""A chat in the terminal, with replies as they come.

    pensieve chat
    pensieve chat --model=path/to/model --history=chats.sqlite --temperature=0.7
    pensieve chat --system="You are a friendly assistant who answers in short sentences."

Without a model it is the small one that comes with the library, which talks about restaurants, music, flights
and the like, and remembers what it is told. A step is one token of a conversation, or a part of a prompt:
there are `--token_buckets` for both. Compiled steps are kept for the next start in `--compilation_cache_dir`
(empty: nowhere).

Lines are sent in the model's chat template where it has one, else as plain text. On a terminal they are
edited and recalled as in a shell, of any length; what is pasted is one message, and a line that ends in \\
goes on in the next. Behind each reply stands where its history was: in device memory, in host memory, or
recomputed. Ctrl-C cancels a reply, as if its line had never been sent; at the prompt it drops the line, and a
second one leaves. `/help` lists the commands. Input may be a pipe: then a line is a message, and only replies
are written.
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
    CACHE_DIR,
    define_engine_flags,
    define_history_flag,
    define_sampling_flags,
    open_llm,
    sampling_params,
    shows_progress,
)
from pensieve_jax.commands.launch import Interrupt, printable
from pensieve_jax.commands.line_input import LineInput
from pensieve_jax.commands.words import SMALL_MODEL
from pensieve_jax.engine.conversations import check_conversation_id
from pensieve_jax.model_source import DEFAULT_MODEL

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
STATE_DIR = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve_jax"
DEFAULTS = {
    "max_num_running": 8,
    "token_buckets": "1,32,256",
    "num_layer_groups": 1,
    "compilation_cache_dir": str(CACHE_DIR),
}
INTRODUCTION = f"""\
{SMALL_MODEL}
Ask it for a restaurant, music, a flight, a movie, a hotel or the weather, as in "Hi! My name is Ada. I am
looking for a place to eat in San Jose." Some turns later, ask: "What is my name?"\
"""
LEAVING = "(Ctrl-C again, Ctrl-D or /quit leaves)"


def main() -> int:
    """Chat until end of input; the exit status."""
    params = sampling_params()
    check_conversation_id(FLAGS.conversation_id, "--conversation_id")
    lines = open_lines()
    tells = lines.is_terminal if FLAGS.accounts is None else FLAGS.accounts
    if not shows_progress() and FLAGS.progress is None:
        print("loading; a first start compiles, which takes a minute or more, once", file=sys.stderr)
    with open_llm(history=FLAGS.history) as llm:
        chat = Chat(llm, params, FLAGS.conversation_id, sys.stdout, system=FLAGS.system, tells_accounts=tells)
        if lines.is_terminal:
            print(f"model {FLAGS.model}, conversation {chat.conversation_id}; /help lists commands")
            if FLAGS.model == DEFAULT_MODEL:
                print(INTRODUCTION)
        converse(chat, lines)
    return 0


def open_lines() -> LineInput:
    """What is typed; raises InvalidRequestError for a named file that cannot keep it.

    A default one that cannot is told, and done without.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text must not end a session
    try:
        return LineInput(Path(FLAGS.line_history) if FLAGS.line_history else None, COMMANDS)
    except InvalidRequestError as error:
        if not FLAGS["line_history"].using_default_value:
            raise
        print(f"what you type is not kept for the next time: {error}", file=sys.stderr)
        return LineInput(None, COMMANDS)


def converse(chat: Chat, lines: LineInput) -> None:
    """Handle messages until one says to leave, or there are no more."""
    interrupted = False
    while True:
        try:
            line = lines.read(f"{printable(chat.conversation_id)}> ")
        except InvalidRequestError as error:
            print(f"error: {error}")
            continue
        except (EOFError, KeyboardInterrupt) as end:
            print()
            if isinstance(end, EOFError) or interrupted or not lines.is_terminal:
                return
            interrupted = True
            print(LEAVING)
            continue
        interrupted = False
        with Interrupt():  # one that falls between two replies must not end the session
            if not chat.handle(line):
                return


def define_flags() -> None:
    """Define the command-line flags of `pensieve chat`."""
    flags.DEFINE_string("conversation_id", "default", "The conversation to begin with.")
    flags.DEFINE_string(
        "system", None, "System prompt that new conversations begin with; its state is shared by all of them."
    )
    flags.DEFINE_bool(
        "accounts", None, "Say behind each reply where its history was; default: on a terminal."
    )
    flags.DEFINE_string(
        "line_history",
        str(STATE_DIR / "chat_lines.jsonl"),
        "File that keeps what you type for the next session, for your eyes only; empty: none.",
    )
    define_engine_flags()
    for name, value in DEFAULTS.items():
        FLAGS.set_default(name, value)
    define_history_flag()
    define_sampling_flags(max_tokens=512)
