"""Recompute cost by the cost model, the measure of eviction policies.

Owns: `Cost(l)` of a simulated device, and the seconds of recomputed history.
Does not know: how a run is made, or anything of a policy except the end from which it drops.
Called by `experiments.points` and others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from pensieve_jax.cache.order.cost import CostModel, CostPoint, MeasuredCostModel
from pensieve_lab.simulator import DeviceProfile
from pensieve_lab.simulator.step_time import StepLoad, StepTime
from pensieve_lab.workload import Answer

NUM_BATCHED_CHUNKS = 16  # as in `profile_costs.py`: the cost of one more chunk in a step that holds many


def cost_points(profile: DeviceProfile, chunk_tokens: int, max_context_tokens: int) -> list[CostPoint]:
    """Return what `profile_costs.py` would measure on that device at powers of two: the share of one chunk.

    The device is assumed to be cool, as in that measurement; on a hot device every chunk costs more.
    """
    step_time = StepTime(profile.step, (NUM_BATCHED_CHUNKS * chunk_tokens,))

    def chunk_s(context_len: int) -> float:
        load = StepLoad()
        for _ in range(NUM_BATCHED_CHUNKS):
            load.add(chunk_tokens, context_len)
        return step_time.seconds(load, 0.0) / NUM_BATCHED_CHUNKS

    rest_s = chunk_s(chunk_tokens)
    lens = [chunk_tokens]
    while lens[-1] < max_context_tokens:
        lens.append(2 * lens[-1])
    return [CostPoint(n, chunk_s(n) - rest_s, rest_s, chunk_s(n)) for n in lens]


def cost_model(profile: DeviceProfile, chunk_tokens: int, max_context_tokens: int) -> CostModel:
    """Return `Cost(l)` of a simulated device, by which `retention` evicts and all policies are judged."""
    # A curve needs two points; with very short contexts, all tokens lie within its first chunk.
    points = cost_points(profile, chunk_tokens, max(max_context_tokens, 2 * chunk_tokens))
    return MeasuredCostModel(points)


class RecomputeSeconds:
    """Recompute seconds of history tokens by their position."""

    def __init__(self, costs: CostModel, chunk_tokens: int, max_context_tokens: int) -> None:
        """Prepare contexts of up to `max_context_tokens`."""
        num_chunks = -(-max_context_tokens // chunk_tokens)
        each_s = (costs.chunk_cost_s((index + 1) * chunk_tokens) for index in range(num_chunks))
        self._before_s = [0.0, *itertools.accumulate(each_s)]
        self._chunk_tokens = chunk_tokens

    def of(self, answers: Iterable[Answer], policy: str) -> tuple[float, float]:
        """Return the seconds of recomputed tokens, and of whole histories as in a stateless system.

        Answers give the number of recomputed tokens, not their positions. `trailing` drops from the tail of a
        conversation, the other policies from its beginning.
        """
        recompute_s = history_s = 0.0
        for answer in answers:
            num_history = max(answer.turn.num_history_tokens - 1, 0)  # the last token never had KV
            num_lost = answer.usage.recomputed_tokens
            whole_s = self._before(num_history)
            history_s += whole_s
            if policy == "trailing":
                recompute_s += whole_s - self._before(num_history - num_lost)
            else:
                recompute_s += self._before(num_lost)
        return recompute_s, history_s

    def _before(self, num_tokens: int) -> float:
        """Return the seconds of the first tokens of a conversation; part of a chunk counts proportionally."""
        index, rest = divmod(num_tokens, self._chunk_tokens)
        whole_s = self._before_s[index]
        if not rest:
            return whole_s
        return whole_s + (self._before_s[index + 1] - whole_s) * rest / self._chunk_tokens
