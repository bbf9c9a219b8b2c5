"""Loads of padded batches: arrivals and lengths of queries.

Owns: the two sets of queries of the Baton paper, Poisson arrivals with recorded lengths, the digest that
shows that several systems served the same load, and the ids of prompts.
Does not know: what serves a load, or how long that takes.

The paper gives lengths in words; a word counts as 1.33 tokens here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pensieve_jax.core.errors import ConfigError
from pensieve_lab.workload import Trace

TOKENS_A_WORD = 1.33
_LONG_WORDS, _LONG_SPREAD = 4000, 0.1  # "around 4,000"
_SHORT_WORDS = (24, 400)  # "a few dozen to 400"
_TABLE2_WORDS = (24, 200)
_TABLE1_QUERIES, _TABLE2_QUERIES = 120, 30
_OF_PROMPTS = 1  # second part of a seed, so that ids and lengths have separate streams
_OF_LENGTHS, _OF_ARRIVALS, _OF_PRIORITIES = 2, 3, 4


class LoadQuery(NamedTuple):
    """Query of a load.

    Attributes:
      prompt_tokens, output_tokens: lengths; only its length ends a reply.
      arrival_s: seconds since the start of the run.
      priority: higher is more urgent.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Load:
    """Queries in order of arrival.

    Attributes:
      name: name for reports; not part of the digest.
      seed: seed of the prompts' ids.
      queries: all queries.
      rate: queries per second of a Poisson process; None if all arrive at once.
    """

    name: str
    seed: int
    queries: tuple[LoadQuery, ...]
    rate: float | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over seed and numbers; equal digests mean equal loads."""
        lines = [
            f"{one.prompt_tokens},{one.output_tokens},{one.arrival_s!r},{one.priority}"
            for one in self.queries
        ]
        return hashlib.sha256("\n".join([str(self.seed), *lines]).encode()).hexdigest()

    @property
    def max_context_tokens(self) -> int:
        """Prompt and output tokens of the longest query."""
        return max(one.num_tokens for one in self.queries)

    @property
    def output_tokens(self) -> int:
        """Total tokens of all replies."""
        return sum(one.output_tokens for one in self.queries)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Draw the ids of every prompt; they are the same for every system."""
        rng = np.random.default_rng([self.seed, _OF_PROMPTS])
        return [rng.integers(0, vocab_size, one.prompt_tokens).tolist() for one in self.queries]


def table1(seed: int, length_scale: float = 1.0, *, doubled: bool = False) -> Load:
    """Make the paper's set (1): long prompt and short reply, the opposite, and both short, as 1 : 1 : 2.

    Args:
      seed: seed of lengths and order.
      length_scale: factor of every length, so that a run takes minutes instead of hours.
      doubled: double every length, as in the first row of the paper's Table 1.
    """
    rng = np.random.default_rng([seed, _OF_LENGTHS])
    factor = length_scale * (2 if doubled else 1)
    long = round(_LONG_WORDS * (1 - _LONG_SPREAD)), round(_LONG_WORDS * (1 + _LONG_SPREAD))
    kinds = [(long, _SHORT_WORDS), (_SHORT_WORDS, long), (_SHORT_WORDS, _SHORT_WORDS)]
    num = _TABLE1_QUERIES // 4
    words = [
        _draw(rng, kind) for kind, count in zip(kinds, (num, num, 2 * num), strict=True) for _ in range(count)
    ]
    shuffled = [words[index] for index in rng.permutation(len(words))]
    name = f"table 1{', doubled' if doubled else ''}, lengths x {length_scale:g}"
    return Load(name, seed, tuple(LoadQuery(*(_tokens(one, factor) for one in pair)) for pair in shuffled))


def table2(seed: int, length_scale: float = 1.0) -> Load:
    """Make the paper's set (2): prompts and replies are all short."""
    rng = np.random.default_rng([seed, _OF_LENGTHS])
    words = [_draw(rng, (_TABLE2_WORDS, _TABLE2_WORDS)) for _ in range(_TABLE2_QUERIES)]
    queries = tuple(LoadQuery(*(_tokens(one, length_scale) for one in pair)) for pair in words)
    return Load(f"table 2, lengths x {length_scale:g}", seed, queries)


def poisson(
    trace: Trace,
    *,
    rate: float,
    seconds: float,
    seed: int,
    share_urgent: float = 0.05,
    length_scale: float = 1.0,
    max_context_tokens: int | None = None,
) -> Load:
    """Make queries with the lengths of a trace's turns and Poisson arrivals.

    With the same seed, another rate only moves the arrivals, and a shorter load is a prefix of a longer one.

    Args:
      trace: every turn with its history is a query.
      rate: arrivals per second.
      seconds: duration of the arrivals; there is at least one query.
      seed: seed of all random draws.
      share_urgent: share of queries with priority 1; the others have 0.
      length_scale: factor of every length.
      max_context_tokens: longer queries are left out; None keeps all.

    Raises:
      ConfigError: no query is short enough.
    """
    lengths = _lengths_of(trace, length_scale, max_context_tokens)
    if not lengths:
        limit = f"long enough for one query of {trace.name}"
        raise ConfigError("max_context_tokens", max_context_tokens, limit)
    order, gaps, urgent = (
        np.random.default_rng([seed, of]) for of in (_OF_LENGTHS, _OF_ARRIVALS, _OF_PRIORITIES)
    )
    queries: list[LoadQuery] = []
    arrival_s = 0.0
    while True:
        arrival_s += float(gaps.standard_exponential()) / rate
        if queries and arrival_s >= seconds:
            break
        prompt_tokens, output_tokens = lengths[int(order.integers(len(lengths)))]
        priority = int(urgent.random() < share_urgent)
        queries.append(LoadQuery(prompt_tokens, output_tokens, arrival_s, priority))
    return Load(f"{trace.name}, {rate:g} a second for {seconds:g} s", seed, tuple(queries), rate)


def _lengths_of(trace: Trace, factor: float, most: int | None) -> list[tuple[int, int]]:
    found = []
    for conversation in trace.conversations:
        for index, turn in enumerate(conversation.turns):
            num_prompt = conversation.num_history_tokens(index) + turn.prompt_tokens
            pair = _scaled(num_prompt, factor), _scaled(turn.output_tokens, factor)
            if most is None or sum(pair) <= most:
                found.append(pair)
    return found


def _draw(rng: np.random.Generator, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Draw word counts, each uniform in its closed range."""
    return tuple(int(rng.integers(low, high + 1)) for low, high in ranges)


def _tokens(words: int, factor: float) -> int:
    return _scaled(words, factor * TOKENS_A_WORD)


def _scaled(number: int, factor: float) -> int:
    return max(1, round(number * factor))
