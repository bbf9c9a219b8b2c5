"""The bucket lattice: the few padded step sizes for which a step is compiled.

Owns: which sizes exist, which one a step takes, how much a step computes so that it fills one, and what else
a plan of that size has room for. Only query tokens are bucketed; rows, pages and tiles have fixed maxima that
cost nothing where empty.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from pensieve_jax.config import EngineConfig, SchedulerConfig
from pensieve_jax.scheduler.plan import PlanLayout

_MIN_BUCKET_TOKENS = 16
_GRAIN_TOKENS = 16
# About where a GPU computes for longer than it reads the weights, whatever the model: from there on padding
# takes as long as tokens do, well below it nothing does.
_KNEE_TOKENS = 200
_FILLED_FROM_TOKENS = 256  # up to here tokens beside decodes cost less than in a step of their own
_NEARLY_FULL = 8  # but for an eighth
_LEAST_SHARE = 4  # a quarter of what is missing is computed at once, where less would fill a bucket
_ENOUGH_FOR_DECODES = 8


def token_buckets(config: SchedulerConfig) -> tuple[int, ...]:
    """The padded step sizes in tokens, ascending; the last is `max_num_batched_tokens`.

    Derived sizes are in multiples of 16. A step of decodes cannot choose how many tokens it has, so up to
    `max_num_running` sizes lie where each wastes about the same share of a step's time. Larger steps have
    prompts in them, of which they take as much as fills a size (`step_limit`): those sizes double. Fewer than
    eight sizes lie evenly in the logarithm instead. What padding costs: `lab/docs/steps.md`.
    """
    largest, limit = config.max_num_batched_tokens, config.bucket_limit
    if config.token_buckets is not None:
        return config.token_buckets
    if largest <= _MIN_BUCKET_TOKENS or limit == 1:
        return (largest,)
    if limit < _ENOUGH_FOR_DECODES:
        sizes = _geometric(_MIN_BUCKET_TOKENS, largest, limit - 1)
    else:
        decodes = min(max(_round_up(config.max_num_running), _MIN_BUCKET_TOKENS), largest)
        num_doublings = math.ceil(math.log2(largest / decodes))
        num_larger = min(num_doublings, max(limit // 2, limit - decodes // _GRAIN_TOKENS))
        first, last = _MIN_BUCKET_TOKENS + _KNEE_TOKENS, decodes + _KNEE_TOKENS
        sizes = [size - _KNEE_TOKENS for size in _geometric(first, last, limit - num_larger - 1)]
        sizes += _geometric(decodes, largest, num_larger)
    return (*sorted({size for size in map(_round_up, sizes) if size < largest}), largest)


def _geometric(first: float, last: float, num_steps: int) -> list[float]:
    """From `first` to `last` in `num_steps` steps of one factor; `last` alone where there are none."""
    return [last * (first / last) ** (1 - i / num_steps) for i in range(num_steps)] + [last]


def _round_up(num_tokens: float) -> int:
    """To a multiple of 16; a power that should be a whole number may be a little above it."""
    return _GRAIN_TOKENS * math.ceil(round(num_tokens / _GRAIN_TOKENS, 6))


def bucket_rows(config: SchedulerConfig, bucket: int) -> int:
    """The most sub-requests of a step of `bucket` tokens: none is without a token."""
    return min(config.row_limit, bucket)


def bucket_layout(
    config: EngineConfig, bucket: int, *, context_tokens: int, tiles_len: int = 0
) -> PlanLayout:
    """The shape of plans of `bucket` tokens, of which no more than so many are sampled after.

    Args:
      config: its limits.
      bucket: one of `token_buckets`.
      context_tokens: the longest context.
      tiles_len: of the attention kernel's tile list, if it has one.
    """
    return PlanLayout(
        num_tokens=bucket,
        max_num_rows=bucket_rows(config.scheduler, bucket),
        pages_per_row=-(-context_tokens // config.cache.chunk_tokens),
        max_num_samples=min(config.scheduler.max_num_running, bucket),
        max_num_banned=config.runner.max_banned_ids,
        tiles_len=tiles_len,
    )


def bucket_for(buckets: tuple[int, ...], num_tokens: int) -> int:
    """The smallest bucket that holds `num_tokens`; `IndexError` where none does."""
    return buckets[bisect_left(buckets, num_tokens)]


def step_limit(
    buckets: tuple[int, ...], num_decodes: int, num_others: int, *, chunk_tokens: int, prompt_steps: int
) -> int:
    """How many tokens a step computes at most, decodes included.

    As much as fills the largest bucket that it can, and beside decodes at least a quarter of what others
    miss: a lower limit would hold those up. With `prompt_steps`, beside decodes: what fills one of 256
    tokens, which costs next to nothing since a step of decodes reads all weights anyway, or that part of what
    others miss; the more that is, the larger are the steps. What either gains: `lab/docs/steps.md`.

    Never less than all that is missing, or the decodes and a chunk, or the largest bucket: so the oldest
    request advances, even where it recomputes.

    Args:
      buckets: as `token_buckets` returns them.
      num_decodes: requests that miss their last token alone.
      num_others: tokens that all others miss and could compute now.
      chunk_tokens: of a chunk.
      prompt_steps: as `SchedulerConfig` has it.
    """
    num_missing = num_decodes + num_others
    is_spread = num_decodes > 0 and prompt_steps > 0
    share = prompt_steps if is_spread else _LEAST_SHARE
    num_least = num_decodes + max(chunk_tokens, -(-num_others // share))
    if is_spread:
        return _holding(buckets, min(max(num_least, _FILLED_FROM_TOKENS), num_missing))
    return _filled(buckets, num_missing, num_least)


def _holding(buckets: tuple[int, ...], num_tokens: int) -> int:
    """The smallest bucket that holds `num_tokens`, or the largest."""
    return buckets[min(bisect_left(buckets, num_tokens), len(buckets) - 1)]


def _filled(buckets: tuple[int, ...], num_missing: int, num_least: int) -> int:
    """The largest bucket that `num_missing` tokens fill, if it holds `num_least`; else one that holds them.

    In a large step padding takes as long as tokens do. So what is left over goes with the next step, which
    comes the sooner for it; unless there is as good as a bucket more. A small step takes as long as the
    weights are read, and leaves nothing over.
    """
    filled = bisect_right(buckets, num_missing) - 1
    holds_all = _holding(buckets, num_missing)
    is_nearly_full = 0 <= holds_all - num_missing <= holds_all // _NEARLY_FULL
    if filled < 0 or is_nearly_full or buckets[filled] < max(num_least, _FILLED_FROM_TOKENS):
        return holds_all
    return buckets[filled]
