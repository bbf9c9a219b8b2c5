"""A reply while its tokens arrive: ids, the text that can be shown, log-probabilities, and how it ends.

Owns: which token ends a reply, and why: an ending id, a stop string, the last call that it may have, or
length.
Does not know: the client, batches, or KV state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve_jax.core.outputs import FinishReason, TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.text.detokenizer import IncrementalDetokenizer
from pensieve_jax.text.replies import new_parser, shown_marks
from pensieve_jax.text.tokenizer import Tokenizer


class ReplyTokens:
    """The reply to one request.

    Attributes:
      token_ids: the ids so far.
      pieces: the pieces of text that can be shown so far.
      logprobs: one entry for each id so far if requested, else None.
    """

    def __init__(
        self,
        params: SamplingParams,
        ending_ids: Sequence[int],
        max_num_tokens: int,
        tokenizer: Tokenizer | None,
        template: TemplateInput = NO_INPUT,
    ) -> None:
        """Start without tokens.

        Args:
          params: sampling parameters, and when the reply ends.
          ending_ids: the ids that end the reply, of `SamplingParams.ending_ids`.
          max_num_tokens: number of tokens at which the reply ends by length, the context's limit included.
          tokenizer: None produces no text.
          template: how the reply is read: the control tokens that its text shows, and the limit of its calls.
        """
        self._params, self._max_num_tokens = params, max_num_tokens
        self._ending_ids = frozenset(ending_ids)  # a set, since every token is looked up
        includes_stop = params.include_stop_str_in_output
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer, params.stop, shown_marks(template), includes_stop=includes_stop
            )
        )
        # Only the parser knows where a call ends: its mark may stand in an argument or in the reasoning.
        self._parser = new_parser(template) if template.reply.max_calls else None
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer to produce text."""
        return self._detokenizer is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply, else None."""
        return None if self._detokenizer is None else self._detokenizer.stop_string

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def accept(
        self, token_id: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> FinishReason | None:
        """Add the next sampled id; return how the reply ends with it, or None.

        `top_ids` and `top_logprobs` are i32[K] and f32[K], read only if alternatives were requested.
        """
        params = self._params
        if params.max_tokens == 0:
            return "length"  # the id that was sampled is not part of the reply
        self.token_ids.append(token_id)
        if self.logprobs is not None:
            k = params.logprobs or 0
            top = dict(zip(top_ids[:k].tolist(), top_logprobs[:k].tolist(), strict=True)) if k else {}
            self.logprobs.append(TokenLogprob(token_id, logprob, top))
        may_end = len(self.token_ids) > params.min_tokens
        # The mask of a structured reply forbids ending ids before `min_tokens`, unless nothing else fits.
        may_end_by_id = may_end or params.structured is not None
        ends_by_id = may_end_by_id and token_id in self._ending_ids
        ends_by_length = len(self.token_ids) >= self._max_num_tokens
        ends_by_call = False
        if self._detokenizer is not None:
            if not ends_by_id:  # the id that ends a reply is not text, special or not
                self.pieces.append(self._detokenizer.push(token_id, may_stop=may_end))
                if self._parser is not None:
                    self._parser.feed(self.pieces[-1])
                    ends_by_call = self._parser.is_over and may_end
            if ends_by_id or ends_by_call or ends_by_length:
                self.pieces.append(self._detokenizer.flush(may_stop=may_end))
        if ends_by_id or ends_by_call or self.stop_string is not None:
            return "stop"
        return "length" if ends_by_length else None
