"""Whole returns of a conversation, as measured in `lab/results/h200_swaps_before_groups.json`.

The measurement used one group of layers and the Triton kernel for prompts, like the profile's single steps,
and the engine's thread launched the kernels.

The profile was fitted to single steps and copies. The effects of scheduling, copies and look-ahead were not
fitted.
"""

from __future__ import annotations

import pytest

from lab.tests.simulator.workloads import PROFILE
from pensieve_jax.cache import AnalyticCostModel
from pensieve_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from pensieve_lab.simulator import Replica
from pensieve_lab.workload import History, UserTurn

CONFIG = EngineConfig(
    cache=CacheConfig(gpu_pages=12360, cpu_pages=1674, swap_out_fraction=0.0),
    scheduler=SchedulerConfig(
        max_num_running=129,
        max_num_batched_tokens=2038,
        token_buckets=(48, 176, 2038),
        max_context_tokens=2200,
    ),
)
NUM_HISTORY, NUM_NEW = 1984, 38


def first_token_s(where: str, *, num_decoding: int = 0) -> float:
    """Return the time from a returning turn's submission to its first token, while others decode."""
    replica = Replica(
        CONFIG, PROFILE.launching("engine"), AnalyticCostModel(32, num_weights=1e10, attention_width=204800)
    )
    if where != "dropped":
        replica.remember([History("back", NUM_HISTORY + 1, 0.0)])
    if where == "host":
        replica.cache.push_out(replica._sequences["back"])
        copies, _ = replica.cache.take_copies()
        replica.cache.complete(copy.copy_id for copy in copies)
    for number in range(num_decoding):
        replica.submit(UserTurn(f"crowd{number}", 0, 0.0, 0, 900, 400, is_last=True))
    for _ in range(120 if num_decoding else 0):  # until all of them decode
        replica.step(0.0)
    start_s = replica.clock.now()
    replica.submit(UserTurn("back", 1, start_s, NUM_HISTORY + 1, NUM_NEW - 1, 2, is_last=True))
    for _ in range(20):
        for answer in replica.step(0.0):
            if answer.turn.conversation_id == "back":
                return answer.first_token_s - start_s
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("where", "measured_s"), [("device", 13.39e-3), ("host", 19.10e-3), ("dropped", 78.25e-3)]
)
def test_idle_engine(where, measured_s):
    assert first_token_s(where) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(("where", "measured_s"), [("device", 30.9e-3), ("host", 46.7e-3)])
def test_beside_128_decodes(where, measured_s):
    """With history on the device it takes two steps, on the host one more."""
    assert first_token_s(where, num_decoding=128) == pytest.approx(measured_s, rel=0.1)
