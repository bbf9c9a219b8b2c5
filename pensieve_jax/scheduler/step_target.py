"""Steps that are small or large as running replies miss or keep a target of time per later token.

Owns: the mean time per later token of the running replies, and the size of a step beside decodes that follows
from it.
Does not know: the order of prompts, or how tokens are granted.
Called by the order of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pensieve_jax.config import SMALL_STEP_TOKENS, USUAL_STEP_TOKENS
from pensieve_jax.core.clock import Clock
from pensieve_jax.scheduler.prompt_work import PromptWork
from pensieve_jax.scheduler.request import Request

_LEAST_TOKENS: Final = 8  # later tokens from which on a reply counts
_MIN_WAITING: Final = 4.0  # times the time of a grown step that must wait
_LONGEST_S: Final = 0.08  # of the prompts in a grown step
_LEAST_FULL: Final = 0.8  # of a grown step
_SMALL_WORK_S: Final = 0.25  # while more waits, no step is small: those cost a third more per token


class StepTarget:
    """The size of steps beside decodes: small over the target, else the usual one or a larger one."""

    def __init__(self, target_tpot_ms: float, work: PromptWork, clock: Clock, chunk_tokens: int) -> None:
        """Keep a mean of `target_tpot_ms` for the later tokens of running replies, by times of `clock`."""
        self._target_s = target_tpot_ms / 1e3
        self._work = work
        self._clock = clock
        self._chunk_tokens = chunk_tokens

    def on_decoding(self, request: Request) -> None:
        """Count a request's later tokens and their time from the step being scheduled on."""
        request.decoding_since = (self._clock.now(), len(request.token_ids))

    def limit(
        self,
        buckets: Sequence[int],
        num_decodes: int,
        prompts: Sequence[Request],
        *,
        running: Iterable[Request],
        waiting: Iterable[Request],
    ) -> int:
        """Return the most tokens of a step beside decodes: one of `buckets`, in ascending order.

        Over the target it is a small one, in which tokens of prompts hardly cost time, but the usual one
        while prompts of over a quarter of a second wait. Within the target it is the usual one, or the
        largest that prompts fill by four fifths in at most 80 ms, if their work and that of waiting requests
        is four times as much.

        Args:
          buckets: sizes up to the limit of the order.
          num_decodes: rows of one token.
          prompts: prompts in their order.
          running: requests of the batch.
          waiting: requests of the queue.
        """
        is_over = self.mean_s(running) > self._target_s
        is_small = is_over and not self._waits(_SMALL_WORK_S, prompts, waiting)
        least = max(SMALL_STEP_TOKENS if is_small else USUAL_STEP_TOKENS, num_decodes + self._chunk_tokens)
        usual = next((size for size in buckets if size >= least), buckets[-1])
        if is_over or usual == buckets[-1]:
            return usual
        missing = [
            (request.num_missing(self._chunk_tokens)[0], self._work.left(request)) for request in prompts
        ]
        num_missing = sum(count for count, _ in missing)
        for size in reversed(buckets):
            if size <= usual:
                break
            num_tokens = size - num_decodes
            seconds = _first_s(missing, num_tokens)
            if (
                num_missing >= _LEAST_FULL * num_tokens
                and seconds <= _LONGEST_S
                and self._waits(_MIN_WAITING * seconds, prompts, waiting)
            ):
                return size
        return usual

    def mean_s(self, running: Iterable[Request]) -> float:
        """Return the mean seconds per later token of running replies; 0 while none has enough tokens."""
        now_s, means = self._clock.now(), []
        for request in running:
            since_s, since_tokens = request.decoding_since
            num_later = len(request.token_ids) - since_tokens
            if request.is_decoding and num_later >= _LEAST_TOKENS:
                means.append((now_s - since_s) / num_later)
        return sum(means) / len(means) if means else 0.0

    def _waits(self, seconds: float, prompts: Iterable[Request], waiting: Iterable[Request]) -> bool:
        """Return whether prompts and waiting requests have this much work."""
        for requests in (prompts, waiting):
            for request in requests:
                seconds -= self._work.left(request)
                if seconds <= 0:
                    return True
        return False


def _first_s(missing: Iterable[tuple[int, float]], num_tokens: int) -> float:
    """Return the seconds of the first `num_tokens` of prompts that miss (tokens, seconds)."""
    total_s = 0.0
    for count, seconds in missing:
        taken = min(count, num_tokens)
        total_s += seconds * taken / count if count else 0.0
        num_tokens -= taken
    return total_s
