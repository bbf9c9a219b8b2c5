"""Query: a prompt with its reply so far, and the location of its KV cache.

Owns: the counts of launched and fetched tokens, the location, and the result.
Does not know: rings, budgets, or the order of service.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import FinishReason, Output, Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.sampling_rows import sampling_words
from pensieve_jax.text import ReplyTokens, Tokenizer


class KVLocation(enum.Enum):
    """Location of a query's KV cache."""

    NOT_COMPUTED = "nowhere"  # not computed, or dropped
    DEVICE = "device"  # in a parked row on the device
    LEAVING = "leaving"  # in a parked row that is being copied to host memory
    HOST = "host"
    RING = "ring"
    RELEASED = "gone"  # all tokens were launched, or the query was cancelled


class Query(ReplyTokens):
    """Submitted query.

    Attributes:
      serial: number of the query, in the order of arrival.
      prompt_token_ids, params, seed, priority: as submitted; higher priorities are served first.
      ending_ids: ids that end the reply.
      sampling_words: i32[W], sampling parameters as bits, a word for each of `SAMPLING_WORDS`.
      max_num_tokens: most tokens of the reply, within the context limit.
      num_sampled: launched tokens of the reply; `token_ids` holds those that were fetched.
      location: location of the KV cache.
      row: row of the ring, while the query is there.
      suspended: whether the query ever had to leave the ring.
      num_failures: failed launches that the query was in since a step gave it a token.
      output: the result.
      error: the failure of a query without a result.
    """

    def __init__(
        self,
        serial: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int,
        ending_ids: tuple[int, ...],
        max_context_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Create a waiting query; see the attributes."""
        self.max_num_tokens = min(params.max_tokens, max_context_tokens - len(prompt_token_ids))
        super().__init__(params, ending_ids, self.max_num_tokens, tokenizer)
        self.serial, self.prompt_token_ids, self.params = serial, prompt_token_ids, params
        self.seed, self.priority, self.ending_ids = seed, priority, ending_ids
        self.sampling_words = sampling_words(params, seed)
        self.num_sampled = 0
        self.location = KVLocation.NOT_COMPUTED
        self.row = -1
        self.suspended = False
        self.num_failures = 0
        self.output: Output | None = None
        self.error: PensieveError | None = None
        self._num_suspensions = self._num_copied_back = self._num_recomputed = 0

    @property
    def done(self) -> bool:
        """Whether the query has an output or an error."""
        return self.output is not None or self.error is not None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the KV cache, if it exists: all but the last sampled token."""
        return len(self.prompt_token_ids) + self.num_sampled - 1

    @property
    def num_to_prefill(self) -> int:
        """Tokens to prefill if the KV cache does not exist."""
        return len(self.prompt_token_ids) + self.num_sampled

    @property
    def is_launched(self) -> bool:
        """Whether the last token, by length, was launched and only has to be fetched."""
        return self.num_sampled >= self.max_num_tokens

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of the prompt and of the reply so far."""
        return [*self.prompt_token_ids, *self.token_ids]

    def result(self) -> Output:
        """Return the output of a finished query.

        Raises:
          PensieveError: the query failed, or has not finished.
        """
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise PensieveError("The query has not finished, so it has no output yet. Step until it is done.")
        return self.output

    # For the scheduler and the engine

    def note_suspended(self) -> None:
        """Record that the query left the ring and will resume later."""
        self.suspended = True
        self._num_suspensions += 1

    def note_copied_back(self) -> None:
        """Record that the row is copied back from host memory."""
        if self.suspended:
            self._num_copied_back += self.num_kv_tokens

    def note_prefilled(self) -> None:
        """Record a prefill, or a repeated one, which also samples the next token."""
        if self.num_sampled:
            self._num_recomputed += self.num_to_prefill
        self.num_sampled += 1

    def finish(self, reason: FinishReason) -> None:
        """Set `output` from the tokens that were sampled, with `reason` as its finish reason."""
        num_prompt = len(self.prompt_token_ids)
        usage = Usage(
            prompt_tokens=num_prompt,
            reused_gpu_tokens=0,
            swapped_in_tokens=0,
            recomputed_tokens=0,
            prefilled_tokens=num_prompt if self.num_sampled else 0,  # 0 if cancelled before the prefill
            output_tokens=len(self.token_ids),
            num_suspensions=self._num_suspensions,
            resume_recomputed_tokens=self._num_recomputed,
            resume_swapped_in_tokens=self._num_copied_back,
        )
        self.output = Output(
            conversation_id=None,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=reason,
            usage=usage,
            seed=self.seed,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            stop_string=self.stop_string,
        )
