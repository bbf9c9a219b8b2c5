"""How long a step takes on the device.

Owns: the model of a step's time, and of the heat that products leave. Three parts follow one another through
the layers, so they add up:
  dense      reading all weights, or arithmetic for every padded token, whichever is longer (a smooth
             maximum); arithmetic takes longer on a device that is hot from it;
  attention  for every row reading its KV state or arithmetic for its pairs of query and key, whichever is
             longer; all rows together no less than what is serial in the longest context;
  the rest   a constant, and a share for every padded token: norms, rotations, writing KV, sampling.
Does not know: requests, pages, or what comes before and after a step.
"""

from __future__ import annotations

import math

from pensieve_jax.scheduler import bucket_for
from pensieve_lab.simulator.profile import StepCosts


class StepLoad:
    """What a step computes, as far as it takes time.

    Attributes:
      num_tokens: query tokens of all rows.
      num_single_kv: context tokens of all rows of one query token together.
      rows: (query tokens, context tokens) of the other rows.
      longest_kv: context tokens of the longest row.
      num_rows: of either kind.
    """

    __slots__ = ("longest_kv", "num_rows", "num_single_kv", "num_tokens", "rows")

    def __init__(self) -> None:
        """Nothing."""
        self.num_tokens = self.num_single_kv = self.longest_kv = self.num_rows = 0
        self.rows: list[tuple[int, int]] = []

    def add(self, q_len: int, kv_len: int) -> None:
        """One more row: its query tokens, and the context tokens at its end."""
        self.num_rows += 1
        self.num_tokens += q_len
        if kv_len > self.longest_kv:
            self.longest_kv = kv_len
        if q_len == 1:
            self.num_single_kv += kv_len
        else:
            self.rows.append((q_len, kv_len))

    def lengthen(self) -> None:
        """The same rows of one query token each, one token further on."""
        self.num_single_kv += self.num_tokens
        self.longest_kv += 1


class ThermalModel:
    """How hot a device is from products, between 0 and 1; it follows what steps do within `hot_s`."""

    def __init__(self, hot_s: float) -> None:
        """Rested. Nothing is ever felt where `hot_s` is 0."""
        self._hot_s = hot_s
        self._heat = 0.0

    def rest(self, seconds: float) -> None:
        """The device stood idle."""
        self._follow(0.0, seconds)

    def step(self, seconds: float, *, is_heating: bool) -> float:
        """A step of about so long; returns the mean heat during it."""
        return self._follow(float(is_heating), seconds)

    def _follow(self, target: float, seconds: float) -> float:
        if not self._hot_s or seconds <= 0:
            return self._heat
        left = math.exp(-seconds / self._hot_s)
        away = self._heat - target
        self._heat = target + away * left
        return target + away * (1 - left) * self._hot_s / seconds


class StepTime:
    """Seconds of a step, by its load."""

    def __init__(self, costs: StepCosts, buckets: tuple[int, ...]) -> None:
        """`buckets`: the padded step sizes, ascending."""
        self._costs = costs
        self._buckets = buckets
        self._dense_and_rest_s = {bucket: self._of_bucket(bucket) for bucket in buckets}
        self._hot_s = {bucket: self._of_bucket(bucket, 1.0) - self._of_bucket(bucket) for bucket in buckets}
        self._padding_s: dict[int, float] = {}

    def seconds(self, load: StepLoad, heat: float | None = None) -> float:
        """Time on the device; `IndexError` for more tokens than the largest bucket holds.

        `heat` is 0 for a device that has rested and 1 for one that computes such steps without end; None: as
        of many such steps in a row.
        """
        bucket = bucket_for(self._buckets, load.num_tokens)
        if heat is None:
            heat = float(self.is_heating(bucket))
        return self._dense_and_rest_s[bucket] + heat * self._hot_s[bucket] + self._attention_s(load)

    def is_heating(self, num_tokens: int) -> bool:
        """Whether arithmetic, not reading weights, is what a step of so many padded tokens waits for."""
        return self._costs.token_s * num_tokens > self._costs.weight_read_s

    def padding_s(self, num_tokens: int) -> float:
        """What a step of `num_tokens` would take less in a bucket of exactly that size.

        On a device that has rested. Attention's part is the same: rows, pages and tiles beyond those in use
        cost nothing.
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

    def _attention_s(self, load: StepLoad) -> float:
        costs = self._costs
        work_s = costs.kv_read_s * load.num_single_kv
        for q_len, kv_len in load.rows:
            num_pairs = q_len * (kv_len - (q_len - 1) / 2)
            work_s += max(costs.kv_read_s * kv_len, costs.pair_s * num_pairs)
        return max(work_s, costs.span_s * load.longest_kv)
