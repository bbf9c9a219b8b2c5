"""Histograms: each value is in one bucket, and a bucket includes its upper bound."""

from __future__ import annotations

from pensieve_jax.engine.stats import COMMIT_S_BOUNDS, STEP_TOKENS_BOUNDS, EngineStats
from tests.engine.harness import Harness


def test_a_bucket_includes_its_upper_bound() -> None:
    stats = EngineStats()
    for num_tokens in (1, 8, 9, 16384, 16385):
        stats.count_step(num_tokens)
    stats.count_commit(0.0)
    stats.count_commit(2.0)
    counts, total = stats.distributions()["step_tokens"]
    assert counts == [1, 1, 1, *[0] * 9, 1, 1] and total == stats.num_step_tokens
    assert len(counts) == len(STEP_TOKENS_BOUNDS) + 1
    assert stats.distributions()["commit_s"] == ([1, *[0] * (len(COMMIT_S_BOUNDS) - 1), 1], 2.0)
    assert not any(name.endswith("_counts") for name in stats.as_dict())


def test_every_step_and_every_commit_of_an_engine_is_counted() -> None:
    harness = Harness()
    harness.turn("ada", 5, max_tokens=4)
    stats, found = harness.engine.stats(), harness.engine.distributions()
    assert sum(found["step_tokens"][0]) == stats["num_steps"] >= 4
    assert found["step_tokens"][1] == stats["num_step_tokens"]
    assert sum(found["commit_s"][0]) == stats["num_commits"] == 1
