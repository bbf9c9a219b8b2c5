"""The time of a step on the device.

Owns: the model of a step's time, and of the heat from matrix products. Three parts run in sequence in each
layer, so they add up:
  dense      reading all weights, or arithmetic for every padded token, whichever is longer (a smooth
             maximum); arithmetic takes longer on a device that is hot from it. Of experts, it reads as many
             as its tokens are expected to choose.
  attention  Per row, reading its KV cache or arithmetic for its query-key pairs, whichever is longer. All
             rows together take at least the serial time of the longest context. Profiles with tiles have the
             time of the kernel's fullest program instead of arithmetic. Layers with a window read and compute
             at most the window;
  the rest   a constant, and a share for every padded token: norms, rotations, writing KV, sampling.
Does not know: requests, pages, or what precedes and follows a step.
"""

from __future__ import annotations

import math

from pensieve_jax.scheduler import bucket_for
from pensieve_lab.common.attention_work import reads_and_pairs
from pensieve_lab.simulator.profile import StepCosts


class StepLoad:
    """Load of a step, as far as its time depends on it.

    Attributes:
      num_tokens: query tokens of all rows.
      num_single_kv: total context tokens of all rows with one query token.
      rows: (query tokens, context tokens) of the other rows.
      longest_kv: context tokens of the longest row.
      num_rows: rows of both kinds.
    """

    __slots__ = ("_lengthened", "_single_kv", "longest_kv", "num_rows", "num_single_kv", "num_tokens", "rows")

    def __init__(self) -> None:
        self.num_tokens = self.num_single_kv = self.longest_kv = self.num_rows = 0
        self.rows: list[tuple[int, int]] = []
        self._single_kv: list[int] = []
        self._lengthened = 0

    def add(self, q_len: int, kv_len: int) -> None:
        """Add a row with its query tokens, and the context tokens at its end."""
        self.num_rows += 1
        self.num_tokens += q_len
        if kv_len > self.longest_kv:
            self.longest_kv = kv_len
        if q_len == 1:
            self.num_single_kv += kv_len
            self._single_kv.append(kv_len - self._lengthened)
        else:
            self.rows.append((q_len, kv_len))

    def lengthen(self) -> None:
        """Advance all rows, which must have one query token each, by one token."""
        self.num_single_kv += self.num_tokens
        self.longest_kv += 1
        self._lengthened += 1

    def num_single_kv_within(self, window: int | None) -> int:
        """Return the context tokens of all rows with one query token that a layer with this window reads."""
        if window is None:
            return self.num_single_kv
        shorter = window - self._lengthened
        return sum(min(kv_len, shorter) for kv_len in self._single_kv) + self._lengthened * len(
            self._single_kv
        )


class ThermalModel:
    """Heat of a device from matrix products, between 0 and 1, which follows the load with time constant
    `hot_s`."""

    def __init__(self, hot_s: float) -> None:
        """Start rested; with `hot_s` 0 the heat stays 0."""
        self._hot_s = hot_s
        self._heat = 0.0

    def rest(self, seconds: float) -> None:
        """Cool while the device is idle."""
        self._follow(0.0, seconds)

    def step(self, seconds: float, *, is_heating: bool) -> float:
        """Follow a step of about this duration; return the mean heat during it."""
        return self._follow(float(is_heating), seconds)

    def _follow(self, target: float, seconds: float) -> float:
        if not self._hot_s or seconds <= 0:
            return self._heat
        left = math.exp(-seconds / self._hot_s)
        away = self._heat - target
        self._heat = target + away * left
        return target + away * (1 - left) * self._hot_s / seconds


class StepTime:
    """Duration of a step as a function of its load."""

    def __init__(self, costs: StepCosts, buckets: tuple[int, ...]) -> None:
        """Keep the costs. `buckets` are the padded step sizes in ascending order."""
        self._costs = costs
        self._buckets = buckets
        self._by_size: dict[tuple[int, int], tuple[float, float]] = {}
        self._padding_s: dict[int, float] = {}

    def seconds(self, load: StepLoad, heat: float | None = None) -> float:
        """Return the time on the device; raises IndexError if the load exceeds the largest bucket.

        `heat` is 0 for a rested device and 1 for one that runs such steps continuously. None assumes many
        such steps in a row.
        """
        bucket = bucket_for(self._buckets, load.num_tokens)
        if heat is None:
            heat = float(self.is_heating(bucket, load.num_tokens))
        return self.dense_and_rest_s(bucket, load.num_tokens, heat) + self.attention_s(load, bucket)

    def dense_and_rest_s(self, bucket: int, num_tokens: int, heat: float) -> float:
        """Return the time of all but attention, for `num_tokens` in a bucket."""
        rested_s, hot_s = self._rested_and_hot_s(bucket, num_tokens)
        return rested_s + heat * hot_s

    def is_heating(self, bucket: int, num_tokens: int) -> bool:
        """Return whether arithmetic, not reading weights, limits a step of `num_tokens` in a bucket.

        Padding is multiplied, too, but chooses no experts to read.
        """
        return self._costs.token_s * bucket > self._read_s(num_tokens)

    def padding_s(self, num_tokens: int) -> float:
        """Return the time that a step of `num_tokens` would save in a bucket of exactly that size.

        The device is assumed to be rested. Attention does not change: unused rows, pages and tiles cost
        nothing.
        """
        seconds = self._padding_s.get(num_tokens)
        if seconds is None:
            of_bucket, exact = (
                self._rested_and_hot_s(size, num_tokens)[0]
                for size in (bucket_for(self._buckets, num_tokens), num_tokens)
            )
            seconds = self._padding_s[num_tokens] = of_bucket - exact
        return seconds

    def _rested_and_hot_s(self, bucket: int, num_tokens: int) -> tuple[float, float]:
        """Return the time on a rested device, and what a hot one takes more, for `num_tokens` in a bucket."""
        size = bucket, 0 if self._costs.experts is None else num_tokens
        found = self._by_size.get(size)
        if found is None:
            rested_s, hot_s = (self._of_bucket(bucket, num_tokens, heat) for heat in (0.0, 1.0))
            found = self._by_size[size] = rested_s, hot_s - rested_s
        return found

    def _of_bucket(self, bucket: int, num_tokens: int, heat: float) -> float:
        costs = self._costs
        token_s = costs.token_s * (1 + costs.hot_share * heat)
        read_s, compute_s, power = self._read_s(num_tokens), token_s * bucket, costs.overlap
        dense_s: float = (read_s**power + compute_s**power) ** (1 / power)
        return dense_s + costs.step_s + costs.padded_token_s * bucket

    def _read_s(self, num_tokens: int) -> float:
        """Return the time to read the weights that a step of `num_tokens`, without padding, needs."""
        experts = self._costs.experts
        return self._costs.weight_read_s + (0.0 if experts is None else experts.step_read_s(num_tokens))

    def attention_s(self, load: StepLoad, bucket: int) -> float:
        """Return the time of attention of a step with `bucket` padded tokens."""
        return sum(
            share * self._attention_within_s(load, bucket, window) for window, share in self._costs.windows
        )

    def _attention_within_s(self, load: StepLoad, bucket: int, window: int | None) -> float:
        """Return the time of attention if all layers had this window."""
        costs = self._costs
        longest_kv = load.longest_kv if window is None else min(load.longest_kv, window)
        work_s = costs.kv_read_s * load.num_single_kv_within(window)
        if costs.tiles is not None and load.rows:  # rows of one token, and prompts by tiles, in sequence
            return work_s * costs.tiles.beside_share + costs.tiles.seconds(load.rows, bucket, window)
        for q_len, kv_len in load.rows:
            num_read, num_pairs = reads_and_pairs(q_len, kv_len, window)
            work_s += max(costs.kv_read_s * num_read, costs.pair_s * num_pairs)
        return max(work_s, costs.span_s * longest_kv)
