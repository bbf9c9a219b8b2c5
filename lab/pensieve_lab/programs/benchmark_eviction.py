"""Times the cache's eviction decisions, by order, among thousands of idle conversations.

    python -m pensieve_lab.programs.benchmark_eviction [--num_idle=10000 --policies=retention,learned,lru]

The real cache holds `num_idle` conversations of one to `max_chunks` chunks in a pool for half of those, idle
for up to an hour after turns of all sizes. Then they return at random, one every `turn_gap_s` of virtual
time. What they have lost is allocated again, and every page of it costs a decision and a drop. The order
`learned` is measured while it follows each of its three orders, with a model that has seen every kind of turn
return.
  decision  a chunk gives up its page: it is found and dropped, its page is allocated to another chunk, and
            the order is updated (mean over each admission, so it includes the first decision after time has
            passed);
  turn      the bookkeeping of a sent and answered turn: the log of returns and three shadow caches;
  fit       refitting the model with all idle conversations: once in 32 returns;
  switch    the first decision after another order is followed, with all conversations sorted anew.
All times are CPU time of the one working thread, so a shared host has little influence. Prints a table and
one JSON document (see `--json`) as the last line.
"""

from __future__ import annotations

import gc
import random
import time
from typing import NamedTuple

import numpy as np
from absl import flags

from pensieve_jax import CacheConfig, ConfigError
from pensieve_jax.cache import AnalyticCostModel, CachedSequence, CacheManager, LearnedState
from pensieve_jax.cache.order.policies import ORDERS
from pensieve_jax.cache.order.policy_selector import PolicyLosses
from pensieve_jax.cache.order.return_log import ReturnLog
from pensieve_jax.cache.order.returns import NUM_BINS, NUM_BUCKETS, ReturnModel
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.config import POLICIES
from pensieve_jax.core.clock import VirtualClock

FLAGS = flags.FLAGS
_CHUNK_TOKENS = 32
_IDLE_S = 3600.0
_PROMPT_TOKENS = (50, 200, 800, 3000)
_LEARNED = "learned"


class Costs(NamedTuple):
    """Microseconds of CPU time; None where an order has no such work."""

    decision_us: float
    decision_p99_us: float
    turn_us: float | None
    fit_us: float | None
    switch_us: float | None
    num_decisions: int


class Crowd:
    """Cache full of idle conversations.

    Attributes:
      turn_s: time of the bookkeeping of every turn.
      decision_s: time per decision, as its share of its admission.
    """

    def __init__(self, policy: str, followed: str) -> None:
        """Give every conversation one turn."""
        self.turn_s: list[float] = []
        self.decision_s: list[float] = []
        self._random = random.Random(0)
        self._lens = [self._random.randint(1, FLAGS.max_chunks) for _ in range(FLAGS.num_idle)]
        self.clock = VirtualClock(1e9)
        self.cache = CacheManager(
            CacheConfig(
                gpu_pages=sum(self._lens) // 2 + 2 * FLAGS.max_chunks,
                chunk_tokens=_CHUNK_TOKENS,
                policy=policy,
                reserve_fraction=0.0,
            ),
            AnalyticCostModel(_CHUNK_TOKENS, num_weights=1.3e10, attention_width=40 * 5120),
            self.clock,
            max_num_copies=64,
            learned_state=learned_state(followed) if policy == _LEARNED else None,
        )
        self._sequences = [self.cache.open(f"c{i}") for i in range(FLAGS.num_idle)]
        for number in range(FLAGS.num_idle):
            self.turn(number)
            self.clock.advance(_IDLE_S / FLAGS.num_idle)

    def come_back(self, num_turns: int) -> None:
        """Let conversations return at random."""
        for _ in range(num_turns):
            self.clock.advance(FLAGS.turn_gap_s)
            self.turn(self._random.randrange(FLAGS.num_idle))

    def turn(self, number: int) -> None:
        """Take one turn, from submission to its end, in its own scheduling pass."""
        sequence, num_tokens = self._sequences[number], self._lens[number] * _CHUNK_TOKENS
        prompt_tokens = min(self._random.choice(_PROMPT_TOKENS), num_tokens - 1)
        notes = self.cache.turns
        start_s = time.thread_time()
        notes.sent(sequence, sequence.num_kv_tokens)
        sent_s = time.thread_time() - start_s
        self.admit(sequence, num_tokens)
        start_s = time.thread_time()
        notes.answered(
            sequence, num_tokens, prompt_tokens=prompt_tokens, output_tokens=num_tokens - prompt_tokens
        )
        self.turn_s.append(sent_s + time.thread_time() - start_s)
        self.cache.release(sequence)
        self.cache.take_drops()

    def admit(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Allocate pages, timed, and mark them as computed."""
        cache = self.cache
        cache.begin_step()
        cache.enqueue(sequence, 0)
        num_needed = num_tokens // _CHUNK_TOKENS - sum(chunk.page != 0 for chunk in sequence.chunks)
        num_decisions = num_needed - int(cache.stats()["num_free_gpu_pages"])
        start_s = time.thread_time()
        if not cache.try_admit(sequence, num_tokens, waive_reserve=True):
            raise AssertionError("the pool has no room for one conversation")
        if num_decisions > 0:
            each_s = (time.thread_time() - start_s) / num_decisions
            self.decision_s += [each_s] * num_decisions
        cache.fill(sequence, 0, num_tokens)

    def switch_us(self, followed: str) -> float:
        """Return the difference between a decision after a change of the followed order and one without."""
        self.cache.turns.begin(learned_state(followed))
        sequence = self.cache.open("one more")
        self.decision_s.clear()
        self.admit(sequence, _CHUNK_TOKENS)
        return 1e6 * sum(self.decision_s)


def learned_state(followed: str) -> LearnedState:
    """Make a state in which every kind of turn has returned, and losses that prevent a change of order."""
    rng = np.random.default_rng(0)
    shape = NUM_BUCKETS, NUM_BINS
    lost_s = tuple(0.0 if name == followed else 1e9 for name in ORDERS)
    losses = PolicyLosses(lost_s, ((0.0,) * len(ORDERS),) * len(ORDERS))
    returns, exposure_s = rng.uniform(1, 50, shape), rng.uniform(1, 1e5, shape)
    return LearnedState(returns, exposure_s, followed, losses)


def fit_us() -> float:
    """Time refitting the model with all idle conversations."""
    log, num_fits = ReturnLog(ReturnModel()), 20
    for number in range(FLAGS.num_idle):
        log.left(str(number), number % NUM_BUCKETS, _IDLE_S * number / FLAGS.num_idle)
    start_s = time.thread_time()
    for _ in range(num_fits):
        log.fit(_IDLE_S)
    return 1e6 * (time.thread_time() - start_s) / num_fits


def measure(policy: str, followed: str) -> Costs:
    """Measure one order, without garbage collection of the set-up's objects."""
    crowd = Crowd(policy, followed)
    crowd.come_back(FLAGS.num_turns // 4)
    crowd.turn_s.clear()
    crowd.decision_s.clear()
    gc.collect()
    gc.freeze()
    crowd.come_back(FLAGS.num_turns)
    gc.unfreeze()
    found = sorted(crowd.decision_s)
    costs = Costs(
        1e6 * sum(found) / len(found), 1e6 * found[int(0.99 * len(found))], None, None, None, len(found)
    )
    if policy != _LEARNED:
        return costs
    turn_us = 1e6 * sum(crowd.turn_s) / len(crowd.turn_s)
    return costs._replace(turn_us=turn_us, fit_us=fit_us(), switch_us=crowd.switch_us(followed))


def main() -> int:
    unknown = [name for name in FLAGS.policies if name not in POLICIES]
    if unknown or not FLAGS.policies:
        raise ConfigError("--policies", ",".join(FLAGS.policies), f"among {', '.join(POLICIES)}")
    rows = {policy: (policy, "") for policy in FLAGS.policies if policy != _LEARNED}
    if _LEARNED in FLAGS.policies:
        rows |= {f"{_LEARNED}, following {order}": (_LEARNED, order) for order in ORDERS}
    found = {name: measure(*row) for name, row in rows.items()}
    cells = [
        [name, *("" if cost is None else f"{cost:.1f}" for cost in costs[:-1]), costs.num_decisions]
        for name, costs in found.items()
    ]
    print(table(["order", *Costs._fields], cells))
    units = {"*_us": "microseconds of CPU time", "num_decisions": "evicted chunks"}
    settings = {name: FLAGS[name].value for name in ("num_idle", "max_chunks", "num_turns", "turn_gap_s")}
    document = {"settings": settings, "orders": {name: costs._asdict() for name, costs in found.items()}}
    print_document(json_line("eviction", document, units=units, device="none (host only, one core)"))
    return 0


def define_flags() -> None:
    flags.DEFINE_integer("num_idle", 10_000, "Idle conversations.", lower_bound=2)
    flags.DEFINE_integer("max_chunks", 128, "Chunks of the longest conversation.", lower_bound=1)
    flags.DEFINE_integer(
        "num_turns", 2000, "Measured turns, after a quarter as many for warm-up.", lower_bound=4
    )
    flags.DEFINE_float("turn_gap_s", 0.4, "Virtual seconds between turns.", lower_bound=0.0)
    flags.DEFINE_list("policies", list(POLICIES), f"Orders to measure, from {', '.join(POLICIES)}.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
