"""A closed loop over conversations of seeded random ids, and the result of serving them.

Owns: the order of turns, and their times. Does not know: tiers or policies; the caller gives the engine.

Turns come in rounds: all first turns, then all second turns, each round in its own order, with a fixed number
of turns in the engine. So a conversation returns after about all others have had a turn. That is the think
time that evicts it from memory that is too small for all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax import Output, SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_lab.common.spread import Spread

MOVES = ("none", "in", "out", "both")
HISTORY_SOURCES = ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens")


class Workload(NamedTuple):
    """Prompts of all conversations; the same for every engine that is compared.

    Attributes:
      prompts: by round, (conversation id, token ids) in the order of arrival.
      output_tokens: tokens of every reply.
    """

    prompts: list[list[tuple[str, list[int]]]]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and reply tokens of all conversations."""
        return sum(len(ids) + self.output_tokens for one_round in self.prompts for _, ids in one_round)

    @property
    def longest_tokens(self) -> int:
        """Length of the longest conversation."""
        lengths: dict[str, int] = {}
        for one_round in self.prompts:
            for name, ids in one_round:
                lengths[name] = lengths.get(name, 0) + len(ids) + self.output_tokens
        return max(lengths.values())


def make_workload(
    *,
    num_conversations: int,
    num_turns: int,
    prompt_tokens: int,
    output_tokens: int,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Draw prompts of `prompt_tokens` ids, plus or minus a quarter."""
    random = np.random.default_rng(seed)
    spread = prompt_tokens // 4
    rounds = []
    for _ in range(num_turns):
        order = random.permutation(num_conversations)
        lengths = prompt_tokens + random.integers(-spread, spread + 1, num_conversations)
        rounds.append(
            [
                (f"conversation-{i}", random.integers(3, vocab_size, n).tolist())
                for i, n in zip(order, lengths, strict=True)
            ]
        )
    return Workload(rounds, output_tokens)


@dataclass
class RoundsResult:
    """Result of serving a workload.

    Attributes:
      outputs: outputs of all turns.
      step_s: wall time between the ends of steps.
      step_moves: direction of the copies started with each step or the one before; see `MOVES`.
      first_token_s: time from submission to first token of each returning turn.
      seconds: time from the first submission to the last reply.
      stats: changes of the engine's counters.
    """

    outputs: list[Output] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_moves: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stats: dict[str, int | float] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return totals and rates, with units in the names."""
        totals = {name: sum(getattr(o.usage, name) for o in self.outputs) for name in HISTORY_SOURCES}
        history = max(sum(totals.values()), 1)
        num_output = sum(output.usage.output_tokens for output in self.outputs)
        resumed = ("resume_swapped_in_tokens", "resume_recomputed_tokens")
        return {
            "gpu_hit_rate": totals["reused_gpu_tokens"] / history,
            "cpu_hit_rate": totals["swapped_in_tokens"] / history,
            **totals,
            **{name: sum(getattr(o.usage, name) for o in self.outputs) for name in resumed},
            "prefilled_tokens": sum(output.usage.prefilled_tokens for output in self.outputs),
            "num_suspensions": sum(output.usage.num_suspensions for output in self.outputs),
            "swapped_in_bytes": self.stats["swapped_in_bytes"],
            "swapped_out_bytes": self.stats["swapped_out_bytes"],
            "num_forced_swap_outs": self.stats["num_forced_swap_outs"],
            "num_prefetched_chunks": self.stats["num_prefetched_chunks"],
            "num_dropped_chunks": self.stats["num_dropped_chunks"],
            "swap_dispatch_s": self.stats["swap_dispatch_s"],
            "transfer_stall_s": self.stats["transfer_stall_s"],
            "num_steps": self.stats["num_steps"],
            "step_s": Spread.of(self.step_s).as_dict(),
            "step_s_by_moves": self._step_s_by_moves(),
            "first_token_s": Spread.of(self.first_token_s).as_dict(),
            "output_tokens": num_output,
            "seconds": self.seconds,
            "output_tokens_per_s": num_output / self.seconds,
        }

    def _step_s_by_moves(self) -> dict[str, Any]:
        pairs = list(zip(self.step_moves, self.step_s, strict=True))
        return {kind: Spread.of([s for move, s in pairs if move == kind]).as_dict() for kind in MOVES}


class _Movements:
    """Direction in which chunks move with a step, from the engine's counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._counts = self._read()
        self._before = [False, False]

    def _read(self) -> list[int | float]:
        stats = self._engine.stats()
        return [stats["swapped_in_bytes"], stats["swapped_out_bytes"]]

    def after_step(self) -> str:
        """Return one of `MOVES`."""
        counts = self._read()
        now = [new > old for new, old in zip(counts, self._counts, strict=True)]
        moved_in, moved_out = (a or b for a, b in zip(now, self._before, strict=True))
        self._counts, self._before = counts, now
        return MOVES[moved_in + 2 * moved_out]


def serve(
    engine: Engine, workload: Workload, concurrency: int, ended_turn: Callable[[], object] = lambda: None
) -> RoundsResult:
    """Serve a workload with `concurrency` turns in the engine; raises a failed turn's error.

    `ended_turn` is called as each turn ends.
    """
    served = RoundsResult()
    params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True)
    pending = deque(
        (index, name, ids) for index, one_round in enumerate(workload.prompts) for name, ids in one_round
    )
    active: dict[str, tuple[Turn, float]] = {}
    silent: set[Turn] = set()  # no token yet, and a history
    before = engine.stats()
    movements = _Movements(engine)
    start_s = previous_s = time.perf_counter()
    while pending or active:
        while pending and len(active) < concurrency and pending[0][1] not in active:
            index, name, ids = pending.popleft()
            (turn,) = engine.submit([TurnSpec(ids, params, name)])
            active[name] = turn, time.perf_counter()
            if index:
                silent.add(turn)
        ended = engine.step()
        now_s = time.perf_counter()
        served.step_s.append(now_s - previous_s)
        served.step_moves.append(movements.after_step())
        previous_s = now_s
        for turn in [turn for turn in silent if turn.token_ids or turn.done]:
            silent.remove(turn)
            served.first_token_s.append(now_s - active[turn.request.conversation.conversation_id][1])
        for turn in ended:
            if turn.error is not None:
                raise turn.error
            assert turn.output is not None
            served.outputs.append(turn.output)
            ended_turn()
            del active[turn.request.conversation.conversation_id]
    served.seconds = previous_s - start_s
    served.stats = {name: value - before[name] for name, value in engine.stats().items()}
    return served
