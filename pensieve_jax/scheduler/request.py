"""A request: one turn of one conversation, from submission until its last token is known.

Owns: the intervals of tokens that still lack KV, the turn's maximum length, and the accounting of how its
history was obtained (reused, swapped in, recomputed).
Does not know: text, the device, or other requests.
Called by the scheduler, the planner and the engine.

Length invariant between steps: the tokens without KV are those in `holes` and in
[sequence.num_kv_tokens, len(token_ids)), apart from chunks that are being copied in. A request that is not
exhausted always misses at least its last token.
"""

from __future__ import annotations

from enum import Enum

from pensieve_jax.cache import CachedSequence, EvictionClass
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.adjustments import bias_words, penalty_words
from pensieve_jax.decoding.sampling_rows import pack_sampling

type Intervals = list[tuple[int, int]]
"""Half-open intervals of token positions, ascending and disjoint."""


class RequestStatus(Enum):
    """The lifecycle of a request."""

    WAITING = "waiting"  # new or suspended
    RUNNING = "running"  # in the batch
    FINISHING = "finishing"  # its last token was granted: the id is not known, or the turn not stored yet
    FINISHED = "finished"  # stopped, cancelled or failed: results of steps in flight are ignored


class Request:
    """One turn of one conversation.

    Attributes:
      request_id: its arrival number; requests are admitted in this order.
      arrival_s: time of its arrival; set by an order of prompts that needs it.
      decoding_since: time from which its later tokens count, and its length then; set if steps have a target.
      seed: 64-bit seed of the turn's samples.
      sampling: `params` and `seed`, packed for a plan by `pack_sampling`.
      bias: biases of `params`, by `bias_words`; None without any.
      penalties: penalties of `params`, by `penalty_words`; None without any.
      ending_ids: ids that end the reply; they are banned before `min_tokens`.
      num_history_tokens: length of the history.
      num_prompt_end: length of history + prompt.
      num_unending: length up to which the last granted token may not end the reply, because of `min_tokens`;
        the plan bans its ending ids there.
      max_total_tokens: length at which the turn ends with "length".
      scored_end: prompt tokens before this position need no more log-probabilities: dispatched steps compute
        them, or they were not requested.
      is_scoring: whether prompt tokens still need a step that computes their log-probabilities; `scored_end`
        is before `num_prompt_end`. It is stored, since every row of every step is asked.
      holes: token intervals of the history to recompute, ascending.
      is_decoding: whether it sampled a token and was not suspended since. If so, it misses only its last
        token and waits for no copy.
      sample_row: its row among the samples of the last step that sampled for it.
    """

    __slots__ = (
        "_holes_before",
        "_num_kv_before",
        "_recomputed_tokens",
        "_reused_tokens",
        "_swapped_in_tokens",
        "_uncomputed",
        "_was_admitted",
        "arrival_s",
        "bias",
        "conversation",
        "decoding_since",
        "ending_ids",
        "holes",
        "is_decoding",
        "is_scoring",
        "max_total_tokens",
        "num_history_tokens",
        "num_prompt_end",
        "num_suspensions",
        "num_unending",
        "params",
        "penalties",
        "request_id",
        "resume_recomputed_tokens",
        "resume_swapped_in_tokens",
        "sample_row",
        "sampling",
        "scored_end",
        "seed",
        "sequence",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        conversation: Conversation,
        sequence: CachedSequence,
        params: SamplingParams,
        *,
        seed: int,
        ending_ids: tuple[int, ...],
        max_context_tokens: int,
    ) -> None:
        """Start waiting; the conversation's `token_ids` must already end with the prompt."""
        self.request_id = request_id
        self.arrival_s = 0.0
        self.decoding_since = (0.0, 0)
        self.conversation = conversation
        self.sequence = sequence
        self.params = params
        self.seed = seed
        self.ending_ids = ending_ids
        self.sampling = pack_sampling(params, seed)
        self.bias = bias_words(params) if params.logit_bias else None
        self.penalties = penalty_words(params) if params.has_penalties else None
        self.token_ids = conversation.token_ids
        self.num_history_tokens = conversation.num_history_tokens
        self.num_prompt_end = len(conversation.token_ids)
        # The masks of a structured reply forbid ending ids themselves.
        min_tokens = 0 if params.structured is not None else params.min_tokens
        self.num_unending = self.num_prompt_end + min_tokens
        # A turn without a reply samples a token as well: its end is noticed like that of any other turn.
        self.max_total_tokens = min(self.num_prompt_end + max(params.max_tokens, 1), max_context_tokens)
        is_scored = params.prompt_logprobs is not None
        self.scored_end = max(self.num_history_tokens, 1) if is_scored else self.num_prompt_end
        self.is_scoring = self.scored_end < self.num_prompt_end
        self.status = RequestStatus.WAITING
        self.holes: Intervals = []
        self.is_decoding = False
        self.sample_row = -1
        self.num_suspensions = 0
        self.resume_recomputed_tokens = 0
        self.resume_swapped_in_tokens = 0
        self._reused_tokens = 0
        self._swapped_in_tokens = 0
        self._recomputed_tokens = 0
        self._was_admitted = False
        self._num_kv_before = 0
        self._uncomputed: Intervals = []  # tokens missing at its first admission and not computed since
        self._holes_before: Intervals = []  # holes at its last suspension

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, including the one in flight."""
        return len(self.token_ids) - self.num_prompt_end

    @property
    def exhausted(self) -> bool:
        """Whether its last token by length has been granted."""
        return len(self.token_ids) >= self.max_total_tokens

    def reach(self, chunk_tokens: int) -> int:
        """Return the position up to which it can be computed now.

        This is the start of the first chunk that is being copied in, or the end of its tokens.
        """
        arriving = self.sequence.first_arriving
        return len(self.token_ids) if arriving is None else arriving * chunk_tokens

    def num_missing(self, chunk_tokens: int) -> tuple[int, int]:
        """Return the number of missing tokens within its reach, and of their intervals (rows of a step).

        This overestimates its work if other requests compute a prefix that it shares.
        """
        reach = self.reach(chunk_tokens)
        missing = (*self.holes, (self.sequence.num_kv_tokens, reach))
        lengths = [min(end, reach) - start for start, end in missing if start < reach]
        return sum(lengths), len(lengths)

    def on_admitted(self, chunk_tokens: int) -> None:
        """Account for the reused, swapped-in and missing tokens of the sequence, which is now pinned."""
        sequence = self.sequence
        self.holes = sequence.holes(chunk_tokens)
        held = sequence.num_kv_tokens - sum(end - start for start, end in self.holes)
        swapped_in = sum(
            sequence.num_tokens_of(index, chunk_tokens)
            for index, chunk in enumerate(sequence.chunks)
            if chunk.eviction_class is EvictionClass.ARRIVING
            or (index in sequence.fetched and chunk.readable)
        )
        if self._was_admitted:
            had = _outside(self._holes_before, self._num_kv_before)
            has = _outside(self.holes, sequence.num_kv_tokens)
            self.resume_recomputed_tokens += _num_in(had) - _num_in(_in_both(had, has))
            self.resume_swapped_in_tokens += swapped_in
            lacked = [*self._holes_before, (self._num_kv_before, sequence.num_kv_tokens)]
            # Another request has computed these tokens of a shared prefix.
            self._count_as_reused(_in_both(has, lacked))
            return
        self._was_admitted = True
        self._uncomputed = list(self.holes)
        self._reused_tokens = held - swapped_in
        self._swapped_in_tokens = swapped_in
        missing = [*self.holes, (sequence.num_kv_tokens, self.num_prompt_end)]
        self._recomputed_tokens = sum(self._num_computed_before(start, end) for start, end in missing)

    def on_suspended(self) -> None:
        """Record which tokens have KV, before other requests evict pages."""
        self.num_suspensions += 1
        self.is_decoding = False
        self._num_kv_before = self.sequence.num_kv_tokens
        # Tokens lost in an earlier suspension and not recomputed since count as computed before.
        self._uncomputed = _in_both(self._uncomputed, self.holes)
        self._holes_before, self.holes = self.holes, []

    def take_scored(self, start: int, end: int) -> range:
        """Return the positions in [start, end), to be computed now, that predict prompt tokens to be scored.

        These tokens count as scored from now on. A position predicts the token after it.
        """
        first, last = max(start, self.scored_end - 1), min(end, self.num_prompt_end - 1)
        if first >= last:
            return range(0)
        assert first == self.scored_end - 1, "a position was computed without its score"
        self.scored_end = last + 1
        self.is_scoring = self.scored_end < self.num_prompt_end
        return range(first, last)

    def skip_filled(self, chunk_tokens: int) -> None:
        """Remove leading holes in a shared prefix that another request has filled since."""
        sequence = self.sequence
        while self.holes:
            start, end = self.holes[0]
            index = start // chunk_tokens
            if index >= sequence.num_shared or not sequence.chunks[index].readable:
                return
            next_start = min((index + 1) * chunk_tokens, end)
            self.holes[:1] = [(next_start, end)] if next_start < end else []
            self._count_as_reused([(start, next_start)])

    def _count_as_reused(self, intervals: Intervals) -> None:
        """Move tokens from "recomputed" to "reused": another request computed them."""
        new = _in_both(intervals, self._uncomputed)
        self.resume_recomputed_tokens -= _num_in(intervals) - _num_in(new)  # these had KV at its suspension
        self._reused_tokens += _num_in(new)
        self._recomputed_tokens -= sum(self._num_computed_before(start, end) for start, end in new)

    def _num_computed_before(self, start: int, end: int) -> int:
        """Return how many of the tokens in [start, end) an earlier turn computed.

        A shared chunk can contain the last token of the history, which no turn of this conversation computed.
        """
        return max(min(end, self.conversation.num_computed_tokens) - start, 0)

    def usage(self, num_output_tokens: int) -> Usage:
        """Return the usage record of a reply of `num_output_tokens`."""
        known = self._reused_tokens + self._swapped_in_tokens + self._recomputed_tokens
        return Usage(
            prompt_tokens=self.num_prompt_end - self.num_history_tokens,
            reused_gpu_tokens=self._reused_tokens,
            swapped_in_tokens=self._swapped_in_tokens,
            recomputed_tokens=self._recomputed_tokens,
            prefilled_tokens=self.num_prompt_end - known if self._was_admitted else 0,
            output_tokens=num_output_tokens,
            num_suspensions=self.num_suspensions,
            resume_recomputed_tokens=self.resume_recomputed_tokens,
            resume_swapped_in_tokens=self.resume_swapped_in_tokens,
        )


def _num_in(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


def _outside(holes: Intervals, num_tokens: int) -> Intervals:
    """Return the parts of the first `num_tokens` tokens outside all holes."""
    starts = [0, *(end for _, end in holes)]
    ends = [*(start for start, _ in holes), num_tokens]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _in_both(ones: Intervals, others: Intervals) -> Intervals:
    """Intersect two lists of intervals in linear time; a long history can have thousands of them."""
    found, i, j = [], 0, 0
    while i < len(ones) and j < len(others):
        start, end = max(ones[i][0], others[j][0]), min(ones[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if ones[i][1] == end:
            i += 1
        else:
            j += 1
    return found
