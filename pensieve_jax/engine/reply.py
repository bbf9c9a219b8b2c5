"""A turn as the engine fills it: tokens, an end, and an `Output`.

Owns: what a turn's tokens belong to, and its result. What comes of each token is `text.reply_tokens`.
Does not know: who waits for it (`Turn`), batches, pages, or the history store.
"""

from __future__ import annotations

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import FinishReason, Output, Usage
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.scheduler import Request
from pensieve_jax.text import Message, ReplyTokens, Tokenizer


class Reply(ReplyTokens):
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
