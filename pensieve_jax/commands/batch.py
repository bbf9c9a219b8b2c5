"""Order of turns in a batch run: begun conversations continue before others begin.

Owns: the order of turns, the number of conversations in progress, and the handling of failed ones.
Does not know: files, or printed output.

A conversation's next turn is submitted when its previous one has finished, while its KV cache is in device
memory. Another conversation begins when all of it fits beside those in progress, so that they do not evict
each other. Running all first turns, then all second turns, would find every history evicted when the
conversations exceed the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pensieve_jax import Output, PensieveError
from pensieve_jax.commands.conversations_file import InputConversation, InputTurn
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.messages import text_with_calls

if TYPE_CHECKING:  # these import JAX
    from pensieve_jax import LLM, Stream

MARKUP_TOKENS = 8
"""Approximate tokens that a chat template adds to a message."""
REPLY_TOKENS = 256
"""Assumed tokens of a reply, until a reply has finished."""


class Interruptible(Protocol):
    """Source of interrupts, such as Ctrl-C."""

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""


class BatchRun:
    """Run of all remaining turns.

    Attributes:
      failures: (conversation, turn, error) of conversations that failed.
      outputs: outputs of the finished turns.
    """

    def __init__(
        self,
        llm: LLM,
        conversations: Sequence[InputConversation],
        num_done: Mapping[str, int],
        *,
        concurrency: int,
    ) -> None:
        """Prepare to run at most `concurrency` conversations at a time.

        `num_done` maps conversations to the number of their turns that need not run; the default is 0.
        """
        self.failures: list[tuple[InputConversation, int, PensieveError]] = []
        self.outputs: list[Output] = []
        self._llm = llm
        self._concurrency = concurrency
        self._next = {c.conversation_id: num_done.get(c.conversation_id, 0) for c in conversations}
        self._waiting = deque(c for c in conversations if self._next[c.conversation_id] < len(c.turns))
        self._active: dict[str, tuple[InputConversation, Stream]] = {}
        described = llm.describe()["cache"]
        self._room_pages, self._page_tokens = described["gpu_pages"], described["chunk_tokens"]
        self._prompt_tokens: dict[str, int] = {}  # by conversation, over all its turns
        self._reply_tokens = (0, 0)  # tokens of all finished replies, and their number

    @property
    def num_left(self) -> int:
        """Remaining turns of the conversations that have not begun."""
        return sum(len(c.turns) - self._next[c.conversation_id] for c in self._waiting)

    def run(
        self,
        *,
        ended: Callable[[InputConversation, int, Output], object],
        after_step: Callable[[], object],
        interrupt: Interruptible,
    ) -> None:
        """Run until all turns have finished. An interrupt cancels the unfinished turns.

        `ended` is called with the conversation and the index of each finished turn, and the output.
        """
        try:
            self._begin_what_fits()
            while self._active and not interrupt.requested:
                turns = self._llm.step()
                after_step()
                for turn in turns:
                    conversation_id = turn.request.conversation.conversation_id
                    conversation, _ = self._active.pop(conversation_id)
                    if turn.error is not None:
                        self._fail(conversation, turn.error)
                        continue
                    self._end(conversation, turn.result(), ended)
                if turns and not interrupt.requested:
                    self._begin_what_fits()
        finally:
            for _, stream in self._active.values():
                stream.close()

    def _end(
        self,
        conversation: InputConversation,
        output: Output,
        ended: Callable[[InputConversation, int, Output], object],
    ) -> None:
        """Record a finished turn, and submit the next one at once."""
        index = self._next[conversation.conversation_id]
        ended(conversation, index, output)
        self.outputs.append(output)
        total, count = self._reply_tokens
        self._reply_tokens = total + output.usage.output_tokens, count + 1
        self._next[conversation.conversation_id] += 1
        if index + 1 < len(conversation.turns):
            self._submit(conversation)

    def _begin_what_fits(self) -> None:
        """Begin conversations in order while the next one fits. A single conversation always fits."""
        active = (conversation for conversation, _ in self._active.values())
        room = self._room_pages - sum(map(self._num_pages, active))
        while self._waiting and len(self._active) < self._concurrency:
            room -= self._num_pages(self._waiting[0])
            if self._active and room < 0:
                return
            self._submit(self._waiting.popleft())

    def _submit(self, conversation: InputConversation) -> None:
        turn = conversation.turns[self._next[conversation.conversation_id]]
        try:
            stream = self._llm.stream(turn.prompt, turn.params, conversation_id=conversation.conversation_id)
        except PensieveError as error:
            self._fail(conversation, error)
        else:
            self._active[conversation.conversation_id] = (conversation, stream)

    def _fail(self, conversation: InputConversation, error: PensieveError) -> None:
        index = self._next[conversation.conversation_id]
        self.failures.append((conversation, index, error))

    def _num_pages(self, conversation: InputConversation) -> int:
        """Estimate the pages of a whole conversation from the average length of the replies so far."""
        name = conversation.conversation_id
        if name not in self._prompt_tokens:
            lengths = (num_prompt_tokens(turn, self._llm.tokenizer) for turn in conversation.turns)
            self._prompt_tokens[name] = sum(lengths)
        total, count = self._reply_tokens
        reply = -(-total // count) if count else REPLY_TOKENS
        replies = sum(min(reply, turn.params.max_tokens) for turn in conversation.turns)
        return -(-(self._prompt_tokens[name] + replies) // self._page_tokens)


def num_prompt_tokens(turn: InputTurn, tokenizer: Tokenizer | None) -> int:
    """Return the tokens of a turn's prompt; for messages, an estimate."""
    if isinstance(turn.prompt, list):
        return len(turn.prompt)
    assert tokenizer is not None  # checked before anything runs
    if isinstance(turn.prompt, str):
        return len(tokenizer.encode(turn.prompt, add_bos=False))
    texts = map(text_with_calls, turn.prompt)
    return sum(len(tokenizer.encode(text, add_bos=False)) + MARKUP_TOKENS for text in texts)
