"""Random schedules with fixed seeds, and bugs that they must detect."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cellular.mutations import MUTATIONS
from tests.cellular.scenarios import run_scenario

LEAST = {  # in a thousand
    "requests": 30_000,
    "ended": 20_000,
    "cancelled": 5_000,
    "failed": 2_500,
    "wasted": 3_000,
    "ended early": 2_000,
    "moved": 15_000,
}

SOME = range(12)  # `tests.search_schedules` runs others
# These run first: four short schedules that together catch every planted bug. The set changes with the
# generator and the engine; for a bug that none of them catches any more, all seeds follow.
SHORT_SEEDS = (30, 119, 118, 7)


def test_requests_equal_recursion():
    """Requests join, leave, end early or fail, on one to four workers."""
    totals: Counter[str] = Counter()
    for seed in SOME:
        print(f"run_scenario({seed})")
        totals += run_scenario(seed)
    print(dict(totals))
    assert not {name: totals[name] for name, num in LEAST.items() if totals[name] < num * len(SOME) / 1000}


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_caught(name, monkeypatch):
    """Some schedule fails with the bug; this file proves that none fails without it."""
    MUTATIONS[name](monkeypatch)
    for seed in (*SHORT_SEEDS, *range(140)):
        try:
            run_scenario(seed)
        except AssertionError as error:
            print(f"caught by run_scenario({seed}): {error}")
            return
        except (ValueError, LookupError):
            continue  # an unrelated error: no check detected the bug
    pytest.fail(f"all passed with this bug: {name}")


@pytest.mark.parametrize("seed", SHORT_SEEDS)
def test_without_a_bug_the_short_schedules_pass(seed: int):
    """This proves that a failure with a bug is caused by the bug."""
    run_scenario(seed)
