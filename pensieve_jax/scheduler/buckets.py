"""Buckets: the few padded step sizes for which a step is compiled.

Owns: the list of sizes, the choice of a step's bucket, the token limit of a step that fills a bucket, and the
plan layout of each bucket. Only query tokens are bucketed; rows, pages and tiles have fixed maxima that cost
nothing where empty.
Does not know: requests or the cache.
Called by the scheduler, the planner and `device.step_programs`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from pensieve_jax.config import EngineConfig, SchedulerConfig
from pensieve_jax.scheduler.plan import PlanLayout

_MIN_BUCKET_TOKENS = 16
_GRAIN_TOKENS = 16
# About the step size at which a GPU turns from memory-bound (reading weights) to compute-bound, for any
# model. Above it padding costs as much time as tokens do; well below it neither costs time.
_KNEE_TOKENS = 200
_FILLED_FROM_TOKENS = 256  # up to this size, other tokens cost less beside decodes than in a separate step
_NEARLY_FULL = 8  # a bucket with at most 1/8 padding counts as full
_MIN_SHARE = 4  # a step computes at least 1/4 of the missing tokens, even if fewer would fill a bucket
_ENOUGH_FOR_DECODES = 8
_SCORING_TOKENS = 512  # enough for nearly the full speed of a GPU; more would only delay other requests


def token_buckets(config: SchedulerConfig) -> tuple[int, ...]:
    """Return the padded step sizes in tokens, ascending; the last is `max_num_batched_tokens`.

    Derived sizes are multiples of 16. A step of decodes cannot choose its number of tokens, so sizes up to
    `max_num_running` are spaced so that each wastes about the same share of a step's time. Larger steps
    contain prompts and are filled up to a size (`step_limit`), so those sizes double. Fewer than eight sizes
    are spaced evenly in the logarithm instead. `lab/docs/step_sizes.md` has the cost of padding.
    """
    largest, limit = config.max_num_batched_tokens, config.bucket_limit
    if config.token_buckets is not None:
        return config.token_buckets
    if largest <= _MIN_BUCKET_TOKENS or limit == 1:
        return (largest,)
    if limit < _ENOUGH_FOR_DECODES:
        sizes = _geometric(_MIN_BUCKET_TOKENS, largest, limit - 1)
    else:
        decodes = min(max(_round_up(config.running_limit), _MIN_BUCKET_TOKENS), largest)
        num_doublings = math.ceil(math.log2(largest / decodes))
        num_larger = min(num_doublings, max(limit // 2, limit - decodes // _GRAIN_TOKENS))
        first, last = _MIN_BUCKET_TOKENS + _KNEE_TOKENS, decodes + _KNEE_TOKENS
        sizes = [size - _KNEE_TOKENS for size in _geometric(first, last, limit - num_larger - 1)]
        sizes += _geometric(decodes, largest, num_larger)
    return (*sorted({size for size in map(_round_up, sizes) if size < largest}), largest)


def _geometric(first: float, last: float, num_steps: int) -> list[float]:
    """Return `first` to `last` in `num_steps` steps of a constant factor; only `last` for 0 steps."""
    return [last * (first / last) ** (1 - i / num_steps) for i in range(num_steps)] + [last]


def _round_up(num_tokens: float) -> int:
    """Round up to a multiple of 16, but tolerate rounding errors slightly above a multiple."""
    return _GRAIN_TOKENS * math.ceil(round(num_tokens / _GRAIN_TOKENS, 6))


def scoring_bucket(config: SchedulerConfig, chunk_tokens: int) -> int:
    """Return the bucket of every step that scores prompts.

    Products of different sizes are rounded differently. With one size, the same prompt gets the same
    log-probabilities in any company and however it is divided into steps. Decodes and one chunk fit it.
    """
    least = max(_SCORING_TOKENS, config.running_limit + chunk_tokens)
    return _smallest_bucket_for(token_buckets(config), least)


def bucket_rows(config: SchedulerConfig, bucket: int) -> int:
    """Return the most sub-requests of a step of `bucket` tokens; each has at least one token."""
    return min(config.row_limit, bucket)


def bucket_layout(
    config: EngineConfig, bucket: int, *, context_tokens: int, tiles_lens: tuple[int, ...] = ()
) -> PlanLayout:
    """Return the layout of plans of `bucket` tokens.

    Args:
      config: limits of the engine.
      bucket: one of `token_buckets`.
      context_tokens: length of the longest context.
      tiles_lens: lengths of the attention kernel's tile lists, one for each distinct window.
    """
    return PlanLayout(
        num_tokens=bucket,
        max_num_rows=bucket_rows(config.scheduler, bucket),
        pages_per_row=-(-context_tokens // config.cache.chunk_tokens),
        max_num_samples=min(config.scheduler.sample_limit, bucket),
        max_num_banned=config.runner.max_banned_ids,
        tiles_lens=tiles_lens,
    )


def bucket_for(buckets: tuple[int, ...], num_tokens: int) -> int:
    """Return the smallest bucket of at least `num_tokens`; raises IndexError if all are smaller."""
    return buckets[bisect_left(buckets, num_tokens)]


def step_limit(
    buckets: tuple[int, ...], num_decodes: int, num_others: int, *, chunk_tokens: int, prompt_steps: int
) -> int:
    """Return the maximum number of tokens of a step, decodes included.

    By default, a step fills the largest bucket that it can, and beside decodes it computes at least 1/4 of
    the tokens that other requests miss; a lower limit would delay those. With `prompt_steps` and decodes, it
    fills a bucket of 256 tokens, or computes 1/prompt_steps of the tokens that others miss if that is more.
    Tokens up to 256 cost almost nothing there, because a step of decodes reads all weights anyway.
    `lab/docs/step_sizes.md` has the gains of both rules.

    The limit is at least the minimum of: all missing tokens; the decodes and one chunk; the largest bucket.
    So the oldest request advances even where it recomputes.

    Args:
      buckets: sizes from `token_buckets`.
      num_decodes: number of requests that miss only their last token.
      num_others: tokens that the other requests miss and could compute now.
      chunk_tokens: tokens per chunk.
      prompt_steps: `SchedulerConfig.prompt_steps`.
    """
    num_missing = num_decodes + num_others
    is_spread = num_decodes > 0 and prompt_steps > 0
    share = prompt_steps if is_spread else _MIN_SHARE
    num_least = num_decodes + max(chunk_tokens, -(-num_others // share))
    if is_spread:
        return _smallest_bucket_for(buckets, min(max(num_least, _FILLED_FROM_TOKENS), num_missing))
    return _largest_filled(buckets, num_missing, num_least)


def _smallest_bucket_for(buckets: tuple[int, ...], num_tokens: int) -> int:
    """Return the smallest bucket of at least `num_tokens`, or the largest bucket."""
    return buckets[min(bisect_left(buckets, num_tokens), len(buckets) - 1)]


def _largest_filled(buckets: tuple[int, ...], num_missing: int, num_least: int) -> int:
    """Return the largest bucket that `num_missing` tokens fill, or the smallest one that holds them all.

    In a large step padding takes as long as tokens do, so the step computes a full bucket and leaves the rest
    to the next step, which then starts sooner. A bucket that holds all missing tokens is used if it is nearly
    full, or if the filled one is below `num_least` or 256 tokens: a small step takes the time to read the
    weights, so it should leave nothing over.
    """
    filled = bisect_right(buckets, num_missing) - 1
    holds_all = _smallest_bucket_for(buckets, num_missing)
    is_nearly_full = 0 <= holds_all - num_missing <= holds_all // _NEARLY_FULL
    if filled < 0 or is_nearly_full or buckets[filled] < max(num_least, _FILLED_FROM_TOKENS):
        return holds_all
    return buckets[filled]
