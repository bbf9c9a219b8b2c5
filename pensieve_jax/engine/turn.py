"""A turn: the reply state that the engine fills, and the handle that its caller keeps.

Owns: a turn's request, its result, and the position up to which its caller has read it. A turn runs only as
long as its caller keeps the handle, because the engine has just a weak reference to it.
Does not know: the runner, batches, pages, or the history store; `text.reply_tokens` handles each token.
Called by the engine, its ledger, and callers of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Delta, FinishReason, Output, TokenLogprob, Usage
from pensieve_jax.core.prompt_logprobs import PromptColumns, PromptLogprobs
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.decoding.prompt_rows import PromptScores
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.scheduler import Request
from pensieve_jax.text import Message, ReplyTokens, Tokenizer
from pensieve_jax.text.replies import num_reasoning_tokens


class Turn:
    """A caller's handle of one submitted turn.

    If the caller drops it before the turn ends, the engine cancels the turn at its next call. So a turn
    cannot run on without an owner if the submitting call is interrupted, and this needs no cleanup code.

    Attributes:
      reply: state of the reply, which the engine fills.
    """

    __slots__ = ("__weakref__", "_num_ids", "_num_pieces", "reply")

    def __init__(self, reply: ReplyState) -> None:
        """Start at the beginning of the reply."""
        self.reply = reply
        self._num_pieces = self._num_ids = 0

    @property
    def request(self) -> Request:
        """Request of the turn in the scheduler."""
        return self.reply.request

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """Chat messages that the prompt was rendered from; None for a prompt of text or ids."""
        return self.reply.messages

    @property
    def origin(self) -> TurnOrigin | None:
        """How a turn with a node continued from memory; None for a turn without a node."""
        return self.reply.origin

    @property
    def output(self) -> Output | None:
        """Result of the turn, after it ended."""
        return self.reply.output

    @property
    def error(self) -> PensieveError | None:
        """Error of a turn that ended without an output."""
        return self.reply.error

    @property
    def done(self) -> bool:
        """Whether the turn has an output or an error."""
        return self.reply.done

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of the reply so far."""
        return self.reply.token_ids

    @property
    def text(self) -> str:
        """Text of the reply so far, without characters that are still incomplete."""
        return self.reply.text

    def result(self) -> Output:
        """Return the output of a turn that is done; raises its error, or PensieveError before its end."""
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise PensieveError("The turn has not ended, so it has no output yet; step until it is done.")
        return self.output

    def take_delta(self) -> Delta | None:
        """Return the part of the reply since the last call, or None without a new token."""
        deltas = take_deltas([self])
        if not deltas.turns:
            return None
        (token_ids,) = deltas.token_ids
        return Delta(deltas.texts[0], (token_ids,) if isinstance(token_ids, int) else tuple(token_ids))


def cancelled_output(spec: TurnSpec, ended_at_s: float) -> Output:
    """Return the output of a turn that was cancelled before it was submitted to an engine."""
    num_tokens = spec.num_new_tokens
    return Output(
        conversation_id=spec.conversation_id if spec.node is None else None,
        token_ids=(),
        text="",
        finish_reason="cancelled",
        usage=Usage(num_tokens, 0, 0, 0, 0, 0),
        seed=spec.params.seed or 0,
        ended_at_s=ended_at_s,
    )


class Deltas(NamedTuple):
    """The new parts of many replies, as columns: turn i added `texts[i]` and `token_ids[i]`.

    Attributes:
      turns, texts: turns with new tokens, and their new text.
      token_ids: the id if there is exactly one, as in almost all cases, else a list of ids.
      logprobs: new log probabilities by turn, for turns that requested them.
    """

    turns: list[Turn]
    texts: list[str]
    token_ids: list[int | list[int]]
    logprobs: dict[Turn, list[TokenLogprob]]


def take_deltas(turns: Iterable[Turn]) -> Deltas:
    """Return the new part of each reply. This is a hot path: there may be 256 turns in every step."""
    deltas = said, texts, ids, logprobs = Deltas([], [], [], {})
    for turn in turns:
        reply, start = turn.reply, turn._num_ids
        token_ids, pieces = reply.token_ids, reply.pieces
        num_new = len(token_ids) - start
        if not num_new:
            continue
        first_piece, num_pieces = turn._num_pieces, len(pieces)
        texts.append(pieces[-1] if num_pieces == first_piece + 1 else "".join(pieces[first_piece:]))
        ids.append(token_ids[-1] if num_new == 1 else token_ids[start:])
        said.append(turn)
        if reply.logprobs is not None:
            logprobs[turn] = reply.logprobs[start:]
        turn._num_ids, turn._num_pieces = start + num_new, num_pieces
    return deltas


class ReplyState(ReplyTokens):
    """The state of one submitted turn's reply.

    Attributes:
      request: request of the turn in the scheduler.
      messages: chat messages that the prompt was rendered from; None for a prompt of text or ids.
      template_input: what it was rendered from beside them.
      node: position in a tree of turns, if the caller placed the turn.
      origin: how a turn with a node continued from memory.
      scored: log-probabilities of the first prompt tokens, a part for each step, if requested, else None.
      output: result of the turn, after it ended.
      error: error of a turn that ended without an output.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        messages: tuple[Message, ...] | None,
        node: TurnNode | None = None,
        origin: TurnOrigin | None = None,
        template_input: TemplateInput = NO_INPUT,
    ) -> None:
        """Start without tokens; the reply has no text without a tokenizer."""
        num_tokens = request.max_total_tokens - request.num_prompt_end
        super().__init__(request.params, request.ending_ids, num_tokens, tokenizer, template_input)
        self.request = request
        self.messages = messages
        self.node = node
        self.origin = origin
        self.template_input = template_input
        self.scored: list[PromptColumns] | None = None if request.params.prompt_logprobs is None else []
        # A conversation's first token has no log-probability, since nothing predicts it.
        self._num_scored = 0 if request.num_history_tokens else 1
        self.output: Output | None = None
        self.error: PensieveError | None = None

    @property
    def done(self) -> bool:
        """Whether the turn has an output or an error."""
        return self.output is not None or self.error is not None

    @property
    def durable(self) -> bool:
        """Whether the turn is to be stored in the history."""
        return not self.request.conversation.one_off if self.node is None else self.node.durable

    @property
    def lacks_scores(self) -> bool:
        """Whether a dispatched step computes log-probabilities of its prompt that have not arrived."""
        request = self.request
        return self.scored is not None and request.num_history_tokens + self._num_scored < request.scored_end

    @property
    def is_transient(self) -> bool:
        """Whether its conversation leaves memory with it.

        No later turn of a one-off request exists. A turn that scores a whole context is not for continuing
        either, unless it is stored: many such prompts would only evict conversations that return.
        """
        node = self.node
        if node is None:
            return self.request.conversation.one_off
        return self.scored is not None and node.parent_id is None and not node.durable

    def accept_prompt(self, scores: PromptScores, rows: slice) -> bool:
        """Add the next prompt tokens' log-probabilities from these rows; returns whether all are finite."""
        request, scored = self.request, self.scored
        assert scored is not None
        logprobs = scores.logprobs[rows]
        if not np.isfinite(logprobs).all():
            return False
        start = request.num_history_tokens + self._num_scored
        self._num_scored += len(logprobs)
        k = request.params.prompt_logprobs or 0
        token_ids = np.array(request.token_ids[start : start + len(logprobs)], np.int32)
        tops = scores.top_ids[rows, :k], scores.top_logprobs[rows, :k]
        # Copies, since the step's arrays hold the rows of other turns as well.
        scored.append(
            PromptColumns(token_ids, *(one.copy() for one in (logprobs, scores.ranks[rows], *tops)))
        )
        return True

    def usage(self) -> Usage:
        """Return where the tokens of the turn came from, as far as it has run."""
        usage = self.request.usage(num_output_tokens=len(self.token_ids))
        if not self.template_input.reply.reasoning:
            return usage
        num_reasoning = num_reasoning_tokens(self.pieces, self.template_input)
        return replace(usage, reasoning_tokens=min(num_reasoning, len(self.token_ids)))

    def finish(self, reason: FinishReason, ended_at_s: float) -> Usage:
        """Make the output of a turn that ended at `ended_at_s`; returns its usage record."""
        conversation = self.request.conversation
        usage = self.usage()
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
            prompt_logprobs=None
            if self.scored is None
            else PromptLogprobs.joined(self.scored, has_first=not self.request.num_history_tokens),
            ended_at_s=ended_at_s,
            stop_string=self.stop_string,
        )
        return usage
