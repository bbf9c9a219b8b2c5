"""A turn as the engine fills it: ids become text, an end, and an `Output`.

Owns: one request's detokenizer, logprobs, stop decision and result.
Does not know: who waits for it (`Turn`), batches, pages, or the history store.
Called by: the engine for every fetched token, and `Turn`, which callers read it through.
"""

from __future__ import annotations

import numpy as np

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import FinishReason, Output, TokenLogprob, Usage
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.scheduler import Request
from pensieve_jax.text import IncrementalDetokenizer, Message, Tokenizer


class Reply:
    """What has come of one submitted turn.

    Attributes:
      request: what the scheduler holds.
      messages: the chat messages that the prompt was rendered from; None for text or ids.
      node: where it stands in a tree of turns, if its caller placed it.
      origin: what that was found to go on from in memory.
      output: the result, once the turn has ended.
      error: why there is none, if a step failed.
      token_ids: the ids so far.
      pieces: their text so far, as far as it can be shown.
      logprobs: one entry for each id so far where asked for, else None.
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
        self.request = request
        self.messages = messages
        self.node = node
        self.origin = origin
        self.output: Output | None = None
        self.error: PensieveError | None = None
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, request.params.stop)
        )
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []

    @property
    def done(self) -> bool:
        """It has an output or an error."""
        return self.output is not None or self.error is not None

    @property
    def durable(self) -> bool:
        """The history is to keep it."""
        return not self.request.conversation.one_off if self.node is None else self.node.durable

    @property
    def has_text(self) -> bool:
        """There is a tokenizer to make text with."""
        return self._detokenizer is not None

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.pieces)

    def accept(
        self, token_id: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> FinishReason | None:
        """Take the next sampled id; returns how the turn ends with it, or None.

        `top_ids` and `top_logprobs` are i32[K] and f32[K], read only where the turn wants alternatives.
        """
        params = self.request.params
        self.token_ids.append(token_id)
        if self.logprobs is not None:
            k = params.logprobs or 0
            top = dict(zip(top_ids[:k].tolist(), top_logprobs[:k].tolist(), strict=True)) if k else {}
            self.logprobs.append(TokenLogprob(token_id, logprob, top))
        may_end = len(self.token_ids) > params.min_tokens
        ends_by_id = may_end and token_id in self.request.ending_ids
        ends_by_length = self.request.num_prompt_end + len(self.token_ids) >= self.request.max_total_tokens
        if self._detokenizer is not None:
            if not ends_by_id:  # the id that ends a reply is no part of its text, special or not
                self.pieces.append(self._detokenizer.push(token_id, may_stop=may_end))
            if ends_by_id or ends_by_length:
                self.pieces.append(self._detokenizer.flush())
        if ends_by_id or (self._detokenizer is not None and self._detokenizer.stop_string is not None):
            return "stop"
        return "length" if ends_by_length else None

    def finish(self, reason: FinishReason) -> Usage:
        """Make the output; returns its accounting."""
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
        )
        return usage
