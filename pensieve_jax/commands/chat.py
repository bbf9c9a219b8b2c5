"""A chat in the terminal, with replies as they come.

    pensieve chat
    pensieve chat --model=path/to/model --history=chats.sqlite --temperature=0.7

Without a model it is the small one that comes with the library, which talks about restaurants, music, flights
and the like, and remembers what it is told. A step is one token of one conversation, or a part of a prompt:
there are `--token_buckets` for both. Compiled steps are kept for the next start in `--compilation_cache_dir`
(empty: nowhere).

Lines are sent in the model's chat template where it has one, else as plain text. Ctrl-C cancels a reply, as
if its line had never been sent; at the prompt it quits. `/help` lists the commands. Input may be a pipe.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from absl import flags

from pensieve_jax import (
    LLM,
    ContextLengthError,
    Output,
    PensieveError,
    SamplingParams,
    Stream,
    TokenizerMissingError,
)
from pensieve_jax import UnknownConversationError as UnknownConversation
from pensieve_jax.assembly import DEFAULT_MODEL
from pensieve_jax.commands.engine_flags import (
    define_engine_flags,
    define_history_flag,
    define_sampling_flags,
    open_llm,
    sampling_params,
)
from pensieve_jax.commands.launch import Interrupt, one_line, printable
from pensieve_jax.commands.report import table
from pensieve_jax.history import TurnRecord

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pensieve_jax"
DEFAULTS = {
    "max_num_running": 1,
    "token_buckets": "1,32,256",
    "num_layer_groups": 1,
    "compilation_cache_dir": str(CACHE_DIR),
}
CUT = "--max_tokens, or the context is full"
NO_TURNS = "this conversation has no turns yet"
FULL = "/truncate N keeps the first N turns, /end begins again, /switch ID begins another conversation"
INTRODUCTION = """\
A small model. Ask it for a restaurant, music, a flight, a movie, a hotel or the weather, as in "Hi! My name
is Ada. I am looking for a place to eat in San Jose." Some turns later, ask: "What is my name?"\
"""
HELP = """\
/help            this text
/history         the turns of this conversation
/truncate N      keep its first N turns
/regenerate      answer its last turn once more
/list            all conversations
/switch ID       go on with another conversation, or begin it
/end             forget this conversation
/stats           counters of the engine, and the last turn's tokens
/quit            leave (so does the end of the input)
A line that begins with // is sent with one / less."""


class Chat:
    """One person's session: which conversation it is in, and what each line does."""

    def __init__(self, llm: LLM, params: SamplingParams, conversation_id: str, out: TextIO) -> None:
        """`out` gets replies and answers; raises TokenizerMissingError for a model of ids only."""
        if llm.tokenizer is None:
            raise TokenizerMissingError
        self.conversation_id = conversation_id
        self._llm = llm
        self._has_template = llm.tokenizer.chat_template is not None
        self._params = params
        self._out = out
        self._last: Output | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(HELP),
            "/history": lambda _: self._show_history(),
            "/truncate": self._truncate,
            "/regenerate": lambda _: self._regenerate(),
            "/list": lambda _: self._list(),
            "/switch": self._switch,
            "/end": lambda _: self._end(),
            "/stats": lambda _: self._stats(),
        }

    def handle(self, line: str) -> bool:
        """Do what a line says; False once it says to leave. Typed errors are told, not raised."""
        if not line.strip():
            return True
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, argument = line.strip().partition(" ")
                if name == "/quit":
                    return False
                command = self._commands.get(name)
                if command is None:
                    self._say(f"unknown command {name}; /help lists them")
                else:
                    command(argument.strip())
            else:
                self._send(line.removeprefix("/"))
        except ContextLengthError as error:
            self._say(f"error: {error}")
            if self._turns():
                self._say(FULL)
        except PensieveError as error:
            self._say(f"error: {error}")
        return True

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _send(self, text: str) -> None:
        if self._has_template:
            messages = [{"role": "user", "content": text}]
            self._reply(self._llm.stream_chat(messages, self._params, conversation_id=self.conversation_id))
        else:
            self._reply(self._llm.stream(text, self._params, conversation_id=self.conversation_id))

    def _reply(self, stream: Stream) -> None:
        """Print a reply as it comes; Ctrl-C cancels it."""
        with Interrupt() as interrupt, stream:
            for delta in stream:
                print(printable(delta.text), end="", file=self._out, flush=True)
                if interrupt.requested:
                    break
        output = stream.output
        if output is None or output.finish_reason == "cancelled":
            self._say("\n(cancelled)")
            return
        self._last = output
        self._say("")
        if output.finish_reason == "length":
            self._say(f"(cut after {output.usage.output_tokens} tokens: {CUT})")

    def _turns(self) -> tuple[TurnRecord, ...]:
        """Those of this conversation; none before its first one."""
        try:
            return self._llm.history(self.conversation_id).turns
        except UnknownConversation:
            return ()

    def _show_history(self) -> None:
        turns = self._turns()
        if not turns:
            self._say(NO_TURNS)
        for turn in turns:
            assert self._llm.tokenizer is not None
            prompts = [f"{message['role']}: {message['content']}" for message in turn.messages or ()]
            prompts = prompts or [f"text: {self._llm.tokenizer.decode(turn.prompt_token_ids)}"]
            for prompt in prompts:
                self._say(printable(f"[{turn.turn_index + 1}] {prompt}"))
            self._say(printable(f"[{turn.turn_index + 1}] reply: {turn.output_text or ''}"))

    def _truncate(self, argument: str) -> None:
        turns = self._turns()
        if not turns:
            self._say(NO_TURNS)
            return
        if not argument.isdecimal() or int(argument) > len(turns):
            self._say(f"/truncate takes the number of turns to keep, from 0 to {len(turns)}")
            return
        kept = turns[: int(argument)]
        num_tokens = sum(len(turn.prompt_token_ids) + len(turn.output_token_ids) for turn in kept)
        self._llm.truncate(self.conversation_id, num_tokens)
        self._say(f"kept {len(kept)} turns, {num_tokens} tokens")

    def _regenerate(self) -> None:
        turns = self._turns()
        if not turns:
            self._say(NO_TURNS)
            return
        last = turns[-1]
        self._truncate(str(len(turns) - 1))
        if last.messages is not None:
            self._reply(
                self._llm.stream_chat(last.messages, self._params, conversation_id=self.conversation_id)
            )
        else:
            prompt = last.prompt_token_ids
            self._reply(self._llm.stream(prompt, self._params, conversation_id=self.conversation_id))

    def _list(self) -> None:
        rows = [
            [
                "*" if info.conversation_id == self.conversation_id else "",
                one_line(info.conversation_id, 40),
                info.num_turns,
                info.num_tokens,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.last_active_s)),
            ]
            for info in self._llm.conversations()
        ]
        if not rows:
            self._say("there are no conversations yet; the first line that you send begins one")
            return
        self._say(table(["", "conversation", "turns", "tokens", "last active"], rows))

    def _switch(self, argument: str) -> None:
        if not argument:
            self._say("/switch takes a conversation's id")
            return
        self.conversation_id = argument
        try:
            self._say(f"in {argument}, {len(self._llm.history(argument).turns)} turns")
        except UnknownConversation:
            self._say(f"in {argument}, a new conversation")

    def _end(self) -> None:
        try:
            self._llm.end(self.conversation_id)
        except UnknownConversation:
            self._say(NO_TURNS)
            return
        self._say(f"forgot {self.conversation_id}")

    def _stats(self) -> None:
        if self._last is not None:
            usage = self._last.usage
            self._say(
                f"last turn: {usage.reused_gpu_tokens} tokens reused, {usage.swapped_in_tokens} swapped in, "
                f"{usage.recomputed_tokens} recomputed, {usage.prefilled_tokens} prefilled, "
                f"{usage.output_tokens} output, seed {self._last.seed}"
            )
        self._say(table(["counter", "value"], list(self._llm.stats().items())))


def main() -> int:
    """Chat until end of input; the exit status."""
    params = sampling_params()
    with open_llm(history=FLAGS.history) as llm:
        chat = Chat(llm, params, FLAGS.conversation_id, sys.stdout)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"model {FLAGS.model}, conversation {chat.conversation_id}; /help lists commands")
            if FLAGS.model == DEFAULT_MODEL:
                print(INTRODUCTION)
        while True:
            try:
                line = input(f"{chat.conversation_id}> " if is_terminal else "")
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if not chat.handle(line):
                return 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_string("conversation_id", "default", "The conversation to begin with.")
    define_engine_flags()
    for name, value in DEFAULTS.items():
        FLAGS.set_default(name, value)
    define_history_flag()
    define_sampling_flags(max_tokens=512)
