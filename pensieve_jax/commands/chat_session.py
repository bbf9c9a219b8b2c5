"""Chat session of one user: the current conversation, and the effect of each line.

Owns: the commands that begin with /, the output after a turn, and the system prompt of new conversations.
Does not know: the source of lines, flags, or how a model is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from pensieve_jax import (
    ChatTemplateError,
    ContextLengthError,
    Output,
    PensieveError,
    SamplingParams,
    SharedPrefix,
    TokenizerMissingError,
    UnknownConversationError,
)
from pensieve_jax.commands.launch import Interrupt, one_line, printable
from pensieve_jax.commands.report import table
from pensieve_jax.commands.words import describe_usage, device_memory, format_count
from pensieve_jax.history import TurnRecord
from pensieve_jax.text.messages import text_with_calls

if TYPE_CHECKING:  # these import JAX
    from pensieve_jax import LLM, Stream, Turn

CUT: Final = "--max_tokens, or the context is full"
NO_TURNS: Final = "this conversation has no turns yet"
FULL: Final = "/truncate N keeps the first N turns, /end begins again, /switch ID begins another conversation"
_USAGES: Final = {
    "/help": "this text",
    "/history": "the turns of this conversation",
    "/truncate N": "keep its first N turns",
    "/regenerate": "answer its last turn once more",
    "/where": "where its KV cache is, and why parts of it are missing",
    "/list": "all conversations",
    "/switch ID": "continue with another conversation, or begin it",
    "/batch ID,ID TEXT": "send TEXT to several conversations, answered together",
    "/end [ID]": "forget this conversation, or another",
    "/stats": "the last turn, and all so far; /stats all: every counter",
    "/quit": "leave (so does the end of the input)",
}
COMMANDS: Final = tuple(usage.split()[0] for usage in _USAGES)
_WIDTH: Final = max(map(len, _USAGES))
HELP: Final = "\n".join(
    [
        *(f"{usage:{_WIDTH}}  {text}" for usage, text in _USAGES.items()),
        "A line that begins with // is sent with one / less. Ctrl-C cancels a reply.",
    ]
)
_TOTALS: Final = (("num_turns_finished", "turn"), ("history_tokens", "token"))


class Chat:
    """Chat session. `HELP` describes its commands."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        conversation_id: str,
        out: TextIO,
        *,
        system: str | None = None,
        tells_accounts: bool = False,
    ) -> None:
        """Begin a session in `conversation_id`.

        Args:
          llm: the model.
          params: sampling parameters of every turn.
          conversation_id: the first conversation, which may be new.
          out: output stream.
          system: system prompt of new conversations.
          tells_accounts: after each reply, print where the KV cache of its history was.

        Raises:
          TokenizerMissingError: the model has no tokenizer.
          PensieveError: `system` cannot be used; see `LLM.share_prefix`.
        """
        if llm.tokenizer is None:
            raise TokenizerMissingError
        self.conversation_id = conversation_id
        self._llm = llm
        self._has_template = llm.tokenizer.chat_template is not None
        self._params = params
        self._out = out
        self._tells_accounts = tells_accounts
        self._memory = device_memory(llm.describe()["device"]["platform"])
        self._last: tuple[Output, float | None] | None = None
        self._first_messages: list[dict[str, str]] = []
        self._prefix: SharedPrefix | None = None
        if system:
            self._begin_with(system)
        self._commands: dict[str, Callable[[str], None]] = {
            "/truncate": self._truncate,
            "/switch": self._switch,
            "/batch": self._batch,
            "/end": self._end,
            "/stats": self._stats,
        }
        self._plain_commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._say(HELP),
            "/history": self._show_history,
            "/regenerate": self._regenerate,
            "/where": self._where,
            "/list": self._list,
        }

    def handle(self, line: str) -> bool:
        """Execute a line; return False for `/quit`. A PensieveError is printed, not raised."""
        if not line.strip():
            return True
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, argument = line.strip().partition(" ")
                if name == "/quit" and not argument:
                    return False
                self._command(name, argument.strip())
            else:
                self._reply(self._prompt(line.removeprefix("/")), begins=not self._turns())
        except ContextLengthError as error:
            self._say(f"error: {error}")
            if self._turns():
                self._say(FULL)
        except PensieveError as error:
            self._say(f"error: {error}")
        return True

    def _command(self, name: str, argument: str) -> None:
        """Run a command. An argument of a command that takes none is an error."""
        if name in self._commands:
            self._commands[name](argument)
        elif name not in COMMANDS:
            self._say(f"unknown command {printable(name)}; /help lists them")
        elif argument:
            self._say(f"{name} takes no argument")
        else:
            self._plain_commands[name]()

    # Turns

    def _begin_with(self, system: str) -> None:
        """Set the system prompt of new conversations, which share its KV cache if the template allows it."""
        if not self._has_template:
            self._prefix = self._llm.share_prefix(f"{system}\n")
            return
        message = {"role": "system", "content": system}
        try:
            self._prefix = self._llm.share_prefix([message])
        except ChatTemplateError:  # the template merges it with the first message, so it cannot be shared
            self._first_messages = [message]

    def _prompt(self, text: str) -> Any:
        return [{"role": "user", "content": text}] if self._has_template else text

    def _reply(self, prompt: Any, *, begins: bool, cancelled: str = "(cancelled)") -> None:
        """Send a turn and stream its reply; Ctrl-C cancels it."""
        start_s = time.perf_counter()
        first_token_s = None
        with Interrupt() as interrupt, self._stream(prompt, begins) as stream:
            for delta in stream:
                if first_token_s is None:
                    first_token_s = time.perf_counter() - start_s
                print(printable(delta.text), end="", file=self._out, flush=True)
                if interrupt.requested:
                    break
        output = stream.output
        if output is None or output.finish_reason == "cancelled":
            self._say(f"\n{cancelled}")
            return
        self._say("")
        self._end_turn(output, first_token_s)

    def _stream(self, prompt: Any, begins: bool) -> Stream:
        prefix = self._prefix if begins else None
        if begins and self._first_messages:
            prompt = [*self._first_messages, *prompt]
        return self._llm.stream(prompt, self._params, conversation_id=self.conversation_id, prefix=prefix)

    def _end_turn(self, output: Output, first_token_s: float | None) -> None:
        """Print the lines after a reply."""
        self._last = output, first_token_s
        if output.finish_reason == "length":
            self._say(f"(cut after {format_count(output.usage.output_tokens, 'token')}: {CUT})")
        if self._tells_accounts:
            self._say(f"[{describe_usage(output.usage, first_token_s, self._memory)}]")

    def _regenerate(self) -> None:
        turns = self._turns()
        if not turns:
            self._say(NO_TURNS)
            return
        last = turns[-1]
        self._truncate(str(len(turns) - 1))
        # The messages or ids of the turn include its system prompt, if any.
        prompt = last.prompt_token_ids if last.messages is None else last.messages
        self._reply(prompt, begins=False, cancelled="(cancelled; the turn is removed: send the line again)")

    def _batch(self, argument: str) -> None:
        """Send the same text to several conversations; new ones begin with the system prompt."""
        names, _, text = argument.partition(" ")
        ids = [name for name in names.split(",") if name]
        if not ids or not text.strip():
            self._say("/batch takes conversation ids, separated by commas, and the text to send")
            return
        waiting: dict[Turn, str] = {}
        try:
            with Interrupt() as interrupt:
                for begins in (True, False):
                    chosen = [name for name in ids if begins is not bool(self._turns(name))]
                    waiting |= zip(self._submit(text.strip(), chosen, begins), chosen, strict=True)
                while waiting and not interrupt.requested:
                    for turn in self._llm.step():
                        if turn in waiting:
                            self._tell(waiting.pop(turn), turn)
        finally:
            for turn in waiting:
                self._llm.cancel(turn)
        if waiting:
            self._say(f"(cancelled: {', '.join(map(printable, waiting.values()))})")

    def _submit(self, text: str, ids: Sequence[str], begins: bool) -> list[Turn]:
        prompt = self._prompt(text)
        if begins and self._first_messages:
            prompt = [*self._first_messages, *prompt]
        prefix = self._prefix if begins else None
        return self._llm.submit([prompt] * len(ids), self._params, conversation_ids=ids, prefix=prefix)

    def _tell(self, name: str, turn: Turn) -> None:
        if turn.error is not None:
            self._say(f"{printable(name)}: error: {turn.error}")
            return
        output = turn.result()
        self._say(printable(f"{name}: {output.text}"))
        self._end_turn(output, None)

    # Conversations

    def _turns(self, conversation_id: str | None = None) -> tuple[TurnRecord, ...]:
        """Return the turns of a conversation (default: the current one); none if it does not exist."""
        try:
            return self._llm.history(conversation_id or self.conversation_id).turns
        except UnknownConversationError:
            return ()

    def _show_history(self) -> None:
        turns = self._turns()
        if not turns:
            self._say(NO_TURNS)
        for turn in turns:
            assert self._llm.tokenizer is not None
            prompts = [f"{message['role']}: {text_with_calls(message)}" for message in turn.messages or ()]
            prompts = prompts or [f"text: {self._llm.tokenizer.decode(turn.prompt_token_ids)}"]
            for prompt in prompts:
                self._say(printable(f"[{turn.turn_index + 1}] {prompt}"))
            self._say(printable(f"[{turn.turn_index + 1}] reply: {turn.output_text or ''}"))

    def _truncate(self, argument: str) -> None:
        turns = self._turns()
        if not turns:
            self._say(NO_TURNS)
            return
        # At most 20 digits, since Python refuses to parse 5,000.
        if not argument.isdecimal() or len(argument) > 20 or int(argument) > len(turns):
            self._say(f"/truncate takes the number of turns to keep, from 0 to {len(turns)}")
            return
        self._llm.truncate(self.conversation_id, num_turns=int(argument))
        num_tokens = len(self._llm.history(self.conversation_id).token_ids)
        self._say(f"kept {format_count(int(argument), 'turn')}, {format_count(num_tokens, 'token')}")

    def _where(self) -> None:
        try:
            self._say(printable(str(self._llm.explain(self.conversation_id))))
        except UnknownConversationError:
            self._say(NO_TURNS)

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
        turns = self._turns()
        what = format_count(len(turns), "turn") if turns else "a new conversation"
        self._say(f"in {printable(argument)}, {what}")

    def _end(self, argument: str) -> None:
        if not argument and not self._turns():
            self._say(NO_TURNS)
            return
        name = argument or self.conversation_id
        self._llm.end(name)
        self._say(f"forgot {printable(name)}")

    # The rest

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _stats(self, argument: str) -> None:
        if argument not in ("", "all"):
            self._say('/stats takes no argument, or "all"')
            return
        if self._last is not None:
            output, first_token_s = self._last
            told = describe_usage(output.usage, first_token_s, self._memory)
            replied = f"{format_count(output.usage.output_tokens, 'token')} of reply, seed {output.seed}"
            self._say(f"last turn: {told}; {replied}")
        stats = self._llm.stats()
        if argument == "all":
            self._say(table(["counter", "value"], list(stats.items())))
            return
        turns, history = (format_count(int(stats[name]), noun) for name, noun in _TOTALS)
        on_gpu, on_cpu = (f"{stats[name]:.0%}" for name in ("gpu_hit_rate", "cpu_hit_rate"))
        self._say(
            f"this session: {turns}; of {history} of history {on_gpu} found in {self._memory}, {on_cpu} in "
            f"host memory, {int(stats['recomputed_tokens']):,} recomputed"
        )
        used = stats["num_gpu_pages"] - stats["num_free_gpu_pages"]
        self._say(f"{self._memory}: {int(used):,} of {int(stats['num_gpu_pages']):,} pages in use")
