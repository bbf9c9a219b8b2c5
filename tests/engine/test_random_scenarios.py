"""Random lives of an engine on the fake runner, against the reference that knows no pages.

`tests.engine.soak` runs many more of the seeded kind; `run_scenario` runs what hypothesis prints.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings

from tests.engine.driver import run_scenario
from tests.engine.scenarios import Scenario, random_scenario, scenarios


@settings(
    max_examples=800,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenario=scenarios())
def test_random_scenario(scenario: Scenario):
    """Tokens equal the reference whatever is dropped, suspended, cancelled, cut, failed or restarted."""
    run_scenario(scenario)


def test_seeded_scenarios_reach_what_they_are_for():
    """Fixed seeds: reproducible, and proof that reuse, recompute and suspension all happen."""
    num_turns, totals = 0, Counter()
    for seed in range(300):
        try:
            driver = run_scenario(random_scenario(seed))
        except BaseException:
            print(f"failed: run_scenario(random_scenario({seed}))")
            raise
        num_turns += driver.num_checked
        totals += driver.totals
    print(f"{num_turns} turns equal, {dict(totals)}")
    assert num_turns > 3000
    assert totals["reused_gpu_tokens"] > 1000 and totals["recomputed_tokens"] > 1000
    assert totals["num_suspensions"] > 10 and totals["resume_recomputed_tokens"] > 50
