"""The time of a step on the device.

Owns: the model of a step's time, and of the heat from matrix products. Three parts run in sequence in each
layer, so they add up:
  dense      reading all weights, or arithmetic for every padded token, whichever is longer (a smooth
             maximum); arithmetic takes longer on a device that is hot from it;
  attention  per row, reading its KV cache or arithmetic for its query-key pairs, whichever is longer; all
             rows together take at least the serial time of the longest context. Profiles with tiles have the
             time of the kernel's fullest program instead of arithmetic;
  the rest   a constant, and a share for every padded token: norms, rotations, writing KV, sampling.
Does not know: requests, pages, or what precedes and follows a step.
"""

from __future__ import annotations

import math

from pensieve_jax.scheduler import bucket_for
from pensieve_lab.simulator.attention_tiles import TileCosts
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

    __slots__ = ("longest_kv", "num_rows", "num_single_kv", "num_tokens", "rows")

    def __init__(self) -> None:
        self.num_tokens = self.num_single_kv = self.longest_kv = self.num_rows = 0
        self.rows: list[tuple[int, int]] = []

    def add(self, q_len: int, kv_len: int) -> None:
        """Add a row with its query tokens, and the context tokens at its end."""
        self.num_rows += 1
        self.num_tokens += q_len
        if kv_len > self.longest_kv:
            self.longest_kv = kv_len
        if q_len == 1:
            self.num_single_kv += kv_len
        else:
            self.rows.append((q_len, kv_len))

    def lengthen(self) -> None:
        """Advance all rows, which must have one query token each, by one token."""
        self.num_single_kv += self.num_tokens
        self.longest_kv += 1


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
        """Precompute the times of `buckets`, the padded step sizes in ascending order."""
        self._costs = costs
        self._buckets = buckets
        self._dense_and_rest_s = {bucket: self._of_bucket(bucket) for bucket in buckets}
        self._hot_s = {bucket: self._of_bucket(bucket, 1.0) - self._of_bucket(bucket) for bucket in buckets}
        self._padding_s: dict[int, float] = {}

    def seconds(self, load: StepLoad, heat: float | None = None) -> float:
        """Return the time on the device; raises IndexError if the load exceeds the largest bucket.

        `heat` is 0 for a rested device and 1 for one that runs such steps continuously. None assumes many
        such steps in a row.
        """
        bucket = bucket_for(self._buckets, load.num_tokens)
        if heat is None:
            heat = float(self.is_heating(bucket))
        return self.dense_and_rest_s(bucket, heat) + self.attention_s(load, bucket)

    def dense_and_rest_s(self, bucket: int, heat: float) -> float:
        """Return the time of all but attention, which depends on padded tokens and heat alone."""
        return self._dense_and_rest_s[bucket] + heat * self._hot_s[bucket]

    def is_heating(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` padded tokens is limited by arithmetic, not by reading
        weights."""
        return self._costs.token_s * num_tokens > self._costs.weight_read_s

    def padding_s(self, num_tokens: int) -> float:
        """Return the time that a step of `num_tokens` would save in a bucket of exactly that size.

        The device is assumed to be rested. Attention does not change: unused rows, pages and tiles cost
        nothing.
        """
        seconds = self._padding_s.get(num_tokens)
        if seconds is None:
            of_bucket = self._dense_and_rest_s[bucket_for(self._buckets, num_tokens)]
            seconds = self._padding_s[num_tokens] = of_bucket - self._of_bucket(num_tokens)
        return seconds

    def _of_bucket(self, num_tokens: int, heat: float = 0.0) -> float:
        costs = self._costs
        token_s = costs.token_s * (1 + costs.hot_share * heat)
        read_s, compute_s, power = costs.weight_read_s, token_s * num_tokens, costs.overlap
        dense_s: float = (read_s**power + compute_s**power) ** (1 / power)
        return dense_s + costs.step_s + costs.padded_token_s * num_tokens

    def attention_s(self, load: StepLoad, bucket: int) -> float:
        """Return the time of attention of a step with `bucket` padded tokens."""
        costs = self._costs
        if costs.tiles is not None:
            return self._tiled_attention_s(load, bucket, costs.tiles)
        work_s = costs.kv_read_s * load.num_single_kv
        for q_len, kv_len in load.rows:
            num_pairs = q_len * (kv_len - (q_len - 1) / 2)
            work_s += max(costs.kv_read_s * kv_len, costs.pair_s * num_pairs)
        return max(work_s, costs.span_s * load.longest_kv)

    def _tiled_attention_s(self, load: StepLoad, bucket: int, tiles: TileCosts) -> float:
        """Return the time of rows of one token, and of prompts by their tiles; the two run in sequence."""
        work_s = self._costs.kv_read_s * load.num_single_kv
        if not load.rows:
            return max(work_s, self._costs.span_s * load.longest_kv)
        return work_s * tiles.beside_share + tiles.seconds(load.rows, bucket)
