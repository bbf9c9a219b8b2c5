"""Decode runs equal single steps: the same decisions, answers, times and counters."""

from __future__ import annotations

import dataclasses

import pytest

from lab.tests.simulator.workloads import make_sessions, serve, small_config
from pensieve_jax.config import POLICIES
from pensieve_jax.scheduler.step_target import StepTarget
from pensieve_lab.simulator import replica as replica_module
from tests.cache.helpers import learned_state_of


def with_target(config):
    """Return the configuration with small steps while replies take over 7.2 ms per later token."""
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_batched_tokens=600,
        token_buckets=(16, 64, 256, 600),
        target_tpot_ms=7.2,
    )
    return dataclasses.replace(config, scheduler=scheduler)


CONFIGS = {
    **{policy: small_config(policy=policy) for policy in POLICIES},
    "gpu": small_config(cpu_pages=0),
    "stateless": small_config(cpu_pages=0, stateful=False),
    "ample": small_config(gpu_pages=400, cpu_pages=400, max_num_running=32),
    "tight": small_config(gpu_pages=26, cpu_pages=12),
    "no priority": small_config(retrieval_priority=False, prefetch=False),
    "work left": small_config(prompt_order="work_left"),
    "work left, tight": small_config(prompt_order="work_left", gpu_pages=26, cpu_pages=12),
    "target": with_target(small_config(prompt_order="work_left", gpu_pages=200, max_num_running=32)),
}


def check_equal(config, sessions):
    stepped = serve(config, sessions, decode_runs=False)
    advanced = serve(config, sessions, decode_runs=True)
    assert advanced.outputs == stepped.outputs
    assert advanced.plain_answers() == stepped.plain_answers()
    assert advanced.stats == stepped.stats
    return stepped


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_stepping(name, seed):
    seen = check_equal(CONFIGS[name], make_sessions(seed))
    assert len(seen.answers) > 24


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_stepping_in_an_order_that_has_learned(seed):
    """Idle time moves between bins during a run."""
    config, sessions = CONFIGS["learned"], make_sessions(seed, think_s=3.0)
    learned_state = learned_state_of(seed)
    seen = [
        serve(config, sessions, decode_runs=decode_runs, learned_state=learned_state)
        for decode_runs in (False, True)
    ]
    assert seen[0].outputs == seen[1].outputs and seen[0].stats == seen[1].stats
    assert any(output[4] for output in seen[0].outputs), "nothing gave way"


@pytest.mark.parametrize("gap_s", [0.01, 2.0])
def test_equals_stepping_crowded_and_lonely(gap_s):
    """Turns queue all the time, or come one conversation at a time."""
    check_equal(CONFIGS["retention"], make_sessions(7, gap_s=gap_s))


def test_equals_stepping_where_replies_are_over_and_within_a_target(monkeypatch):
    """Both happen, although a run changes the lengths of its requests at its end only."""
    are_over, mean_s = set(), StepTarget.mean_s

    def noted(self, running):
        found = mean_s(self, running)
        are_over.add(found > self._target_s)
        return found

    monkeypatch.setattr(StepTarget, "mean_s", noted)
    check_equal(CONFIGS["target"], make_sessions(7, gap_s=0.02))
    assert are_over == {False, True}


def test_equals_stepping_without_an_observer():
    """Grants are made only for observers, and nothing else depends on them."""
    config, sessions = CONFIGS["tight"], make_sessions(11)
    seen = [serve(config, sessions, decode_runs=decode_runs, observed=False) for decode_runs in (False, True)]
    assert seen[0].plain_answers() == seen[1].plain_answers() and seen[0].stats == seen[1].stats


def test_everything_happens_here_and_decode_runs_are_long(monkeypatch):
    """Otherwise these tests would show little."""
    lengths = []

    class Counted(replica_module.DecodeRun):
        def end(self):
            lengths.append(self.num_steps)
            super().end()

    monkeypatch.setattr(replica_module, "DecodeRun", Counted)
    happened, num_steps = set(), 0
    for name in ("retention", "tight"):
        for seed in range(4):
            seen = serve(CONFIGS[name], make_sessions(seed), decode_runs=True)
            num_steps += seen.stats["num_steps"]
            for grants, _, admitted, suspended, drops, swap_outs, swap_ins, expedited in seen.outputs:
                kinds = {
                    "grants": grants, "admitted": admitted, "suspended": suspended, "drops": drops,
                    "swap_outs": swap_outs, "swap_ins": swap_ins, "expedited": expedited,
                }  # fmt: skip
                happened |= {kind for kind, values in kinds.items() if values}
    assert happened == {"grants", "admitted", "suspended", "drops", "swap_outs", "swap_ins", "expedited"}
    assert sum(lengths) > num_steps / 3 and max(lengths) > 30
