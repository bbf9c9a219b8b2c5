"""A reply while its tokens arrive: ids, the text that can be shown, log-probabilities, and how it ends.

Owns: which token ends a reply, and why: an ending id, a stop string, the last call that it may have, or
length.
Does not know: the client, batches, or KV state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from pensieve_jax.core.outputs import FinishReason, TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.text.detokenizer import IncrementalDetokenizer
from pensieve_jax.text.replies import new_parser, shown_marks
from pensieve_jax.text.tokenizer import Tokenizer

_NO_TOP: Final = np.empty(0)


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
        self._max_num_tokens = max_num_tokens
        self._ending_ids = frozenset(ending_ids)  # a set, since every token is looked up
        # What each token asks of the parameters.
        self._is_empty = params.max_tokens == 0
        self._min_tokens = params.min_tokens
        self._num_top = params.logprobs or 0
        # The mask of a structured reply forbids ending ids before `min_tokens`, unless nothing else fits.
        self._may_end_by_id = params.structured is not None
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
        self, token_id: int, logprob: float, top_ids: np.ndarray = _NO_TOP, top_logprobs: np.ndarray = _NO_TOP
    ) -> FinishReason | None:
        """Add the next sampled id; return how the reply ends with it, or None.

        `top_ids` and `top_logprobs` are i32[K] and f32[K], read only if alternatives were requested. This is
        a hot path: there may be 256 replies in every step.
        """
        if self._is_empty:
            return "length"  # the id that was sampled is not part of the reply
        token_ids, detokenizer = self.token_ids, self._detokenizer
        token_ids.append(token_id)
        if self.logprobs is not None:
            k = self._num_top
            top = dict(zip(top_ids[:k].tolist(), top_logprobs[:k].tolist(), strict=True)) if k else {}
            self.logprobs.append(TokenLogprob(token_id, logprob, top))
        num_tokens = len(token_ids)
        may_end = num_tokens > self._min_tokens
        ends_by_id = token_id in self._ending_ids and (may_end or self._may_end_by_id)
        ends_by_length = num_tokens >= self._max_num_tokens
        ends_by_call = ends_by_string = False
        if detokenizer is not None:
            if not ends_by_id:  # the id that ends a reply is not text, special or not
                self.pieces.append(detokenizer.push(token_id, may_stop=may_end))
                if self._parser is not None:
                    self._parser.feed(self.pieces[-1])
                    ends_by_call = self._parser.is_over and may_end
            if ends_by_id or ends_by_call or ends_by_length:
                self.pieces.append(detokenizer.flush(may_stop=may_end))
            ends_by_string = detokenizer.stop_string is not None
        if ends_by_id or ends_by_call or ends_by_string:
            return "stop"
        return "length" if ends_by_length else None
