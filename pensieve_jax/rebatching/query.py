"""A query: a prompt on its way to a reply, and where its KV state is meanwhile.

Owns: its counts (what was launched, what has come), its place, and its result.
Does not know: rings, budgets, or who is served next.
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
    """Where a query's KV state is."""

    NOWHERE = "nowhere"  # not computed, or given up
    DEVICE = "device"  # in a row of its own beside the ring
    LEAVING = "leaving"  # the same, and on its way to host memory
    HOST = "host"
    RING = "ring"
    GONE = "gone"  # it has all its tokens, or nobody waits for them


class Query(ReplyTokens):
    """What was submitted.

    Attributes:
      serial: numbers queries in the order of their arrival.
      prompt_token_ids, params, seed, priority: as submitted; higher priorities are served first.
      ending_ids: ids that end the reply.
      sampling_words: i32[5], how it is sampled, as bits; see `SAMPLING_WORDS`.
      max_num_tokens: of the reply, the context's limit included.
      num_sampled: tokens of the reply that were launched; those of them that have come are in `token_ids`.
      place: of its KV state.
      row: of the ring, while it is there.
      suspended: it has been in the ring, and had to leave it.
      num_failures: failed launches that it was in since a step gave it a token.
      output: the result.
      error: why there is none.
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
        """It waits; see the attributes."""
        self.max_num_tokens = min(params.max_tokens, max_context_tokens - len(prompt_token_ids))
        super().__init__(params, ending_ids, self.max_num_tokens, tokenizer)
        self.serial, self.prompt_token_ids, self.params = serial, prompt_token_ids, params
        self.seed, self.priority, self.ending_ids = seed, priority, ending_ids
        self.sampling_words = sampling_words(params, seed)
        self.num_sampled = 0
        self.place = KVLocation.NOWHERE
        self.row = -1
        self.suspended = False
        self.num_failures = 0
        self.output: Output | None = None
        self.error: PensieveError | None = None
        self._num_suspensions = self._num_copied_back = self._num_recomputed = 0

    @property
    def done(self) -> bool:
        """It has an output or an error."""
        return self.output is not None or self.error is not None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of its KV state, where it has any: all but the last that was sampled."""
        return len(self.prompt_token_ids) + self.num_sampled - 1

    @property
    def num_to_prefill(self) -> int:
        """Tokens that would have to be computed before the next can be sampled from nothing."""
        return len(self.prompt_token_ids) + self.num_sampled

    @property
    def is_launched(self) -> bool:
        """Its last token has been launched, by length; nothing is left to do but to wait for it."""
        return self.num_sampled >= self.max_num_tokens

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and reply so far."""
        return [*self.prompt_token_ids, *self.token_ids]

    def result(self) -> Output:
        """The output, once it is done; raises what it failed with, and PensieveError before its end."""
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise PensieveError("The query has not ended, so it has no output yet; step until it is done.")
        return self.output

    # For the scheduler and the engine

    def note_suspended(self) -> None:
        """It has left the ring, and goes on later."""
        self.suspended = True
        self._num_suspensions += 1

    def note_copied_back(self) -> None:
        """Its row comes back from host memory."""
        if self.suspended:
            self._num_copied_back += self.num_kv_tokens

    def note_prefilled(self) -> None:
        """Its KV state is computed, for the first time or once more; the next token is sampled with it."""
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
            prefilled_tokens=num_prompt if self.num_sampled else 0,  # it may have been cancelled before
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
        )
