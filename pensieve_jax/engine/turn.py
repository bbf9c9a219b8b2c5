"""A turn: the reply that the engine fills, and the handle that its caller holds.

Owns: what a turn's tokens belong to, its result, and what its caller has read of it. That somebody holds the
handle is what keeps a turn running; the engine refers to it weakly only.
Does not know: who runs a turn, batches, pages, or the history store. What comes of each token is
`text.reply_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Delta, FinishReason, Output, TokenLogprob, Usage
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.scheduler import Request
from pensieve_jax.text import Message, ReplyTokens, Tokenizer


class Turn:
    """One submitted turn. It belongs to whoever holds it: dropped before its end, it is cancelled.

    The engine sees that at its next call. So a turn is somebody's from the moment of its acceptance on,
    however the call that submitted it ends, and no code has to run for that.

    Attributes:
      reply: what the engine fills.
    """

    __slots__ = ("__weakref__", "_num_ids", "_num_pieces", "reply")

    def __init__(self, reply: ReplyState) -> None:
        """Nothing of it was read."""
        self.reply = reply
        self._num_pieces = self._num_ids = 0

    @property
    def request(self) -> Request:
        """What the scheduler holds."""
        return self.reply.request

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The chat messages that the prompt was rendered from; None for text or ids."""
        return self.reply.messages

    @property
    def origin(self) -> TurnOrigin | None:
        """What a turn with a node was found to go on from in memory; None for one without."""
        return self.reply.origin

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended."""
        return self.reply.output

    @property
    def error(self) -> PensieveError | None:
        """Why there is no output, if a step failed."""
        return self.reply.error

    @property
    def done(self) -> bool:
        """It has an output or an error."""
        return self.reply.done

    @property
    def token_ids(self) -> Sequence[int]:
        """The reply so far."""
        return self.reply.token_ids

    @property
    def text(self) -> str:
        """The reply so far, as far as it can be shown."""
        return self.reply.text

    def result(self) -> Output:
        """The output of a turn that is done; raises what it failed with, and PensieveError before its end."""
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise PensieveError("The turn has not ended, so it has no output yet; step until it is done.")
        return self.output

    def take_delta(self) -> Delta | None:
        """What came since the last call; None if nothing did."""
        deltas = take_deltas([self])
        if not deltas.turns:
            return None
        (token_ids,) = deltas.token_ids
        return Delta(deltas.texts[0], (token_ids,) if isinstance(token_ids, int) else tuple(token_ids))


class Deltas(NamedTuple):
    """What came of many turns, by columns: turn i said `texts[i]`, with `token_ids[i]`.

    Attributes:
      turns, texts: of those that said something.
      token_ids: an id where there is one, as almost always, else a list of them.
      logprobs: by turn, of those that asked for them.
    """

    turns: list[Turn]
    texts: list[str]
    token_ids: list[int | list[int]]
    logprobs: dict[Turn, list[TokenLogprob]]


def take_deltas(turns: Iterable[Turn]) -> Deltas:
    """What came of each turn since it was last taken. Its caller has 256 of them in every step."""
    deltas = said, texts, ids, logprobs = Deltas([], [], [], {})
    for turn in turns:
        reply, start = turn.reply, turn._num_ids
        token_ids, pieces = reply.token_ids, reply.pieces
        num_new = len(token_ids) - start
        if not num_new:
            continue
        first_piece = turn._num_pieces
        texts.append(pieces[-1] if len(pieces) == first_piece + 1 else "".join(pieces[first_piece:]))
        ids.append(token_ids[-1] if num_new == 1 else token_ids[start:])
        said.append(turn)
        if reply.logprobs is not None:
            logprobs[turn] = reply.logprobs[start:]
        turn._num_ids, turn._num_pieces = start + num_new, len(pieces)
    return deltas


class ReplyState(ReplyTokens):
    """What has come of one submitted turn.

    Attributes:
      request: what the scheduler holds.
      messages: the chat messages that the prompt was rendered from; None for text or ids.
      node: where it stands in a tree of turns, if its caller placed it.
      origin: what that was found to go on from in memory.
      output: the result, once the turn has ended.
      error: why there is none, if a step failed.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        messages: tuple[Message, ...] | None,
        node: TurnNode | None = None,
        origin: TurnOrigin | None = None,
    ) -> None:
        """No tokens yet; no text is made without a tokenizer."""
        num_tokens = request.max_total_tokens - request.num_prompt_end
        super().__init__(request.params, request.ending_ids, num_tokens, tokenizer)
        self.request = request
        self.messages = messages
        self.node = node
        self.origin = origin
        self.output: Output | None = None
        self.error: PensieveError | None = None

    @property
    def done(self) -> bool:
        """It has an output or an error."""
        return self.output is not None or self.error is not None

    @property
    def durable(self) -> bool:
        """The history is to keep it."""
        return not self.request.conversation.one_off if self.node is None else self.node.durable

    def finish(self, reason: FinishReason, ended_at_s: float) -> Usage:
        """Make the output of a turn that ended then; returns its accounting."""
        conversation = self.request.conversation
        usage = self.request.usage(num_output_tokens=len(self.token_ids))
        self.output = Output(
            conversation_id=None
            if conversation.one_off or self.node is not None
            else conversation.conversation_id,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=reason,
            usage=usage,
            seed=self.request.seed,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            ended_at_s=ended_at_s,
        )
        return usage
