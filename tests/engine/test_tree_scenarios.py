"""Random scenarios of trees of turns with fixed seeds, and bugs around forks, planted one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from pensieve_jax.config import PROMPT_ORDERS
from tests.cache.fork_scenarios import run_fork_scenario
from tests.engine.fork_mutations import FORK_MUTATIONS
from tests.engine.tree_scenarios import run_tree_scenario

SOME = range(32, 48)  # `tests.search_schedules` runs others
LEAST = {  # in a thousand
    "turns": 10_000,
    "found": 100_000,  # tokens
    "computed": 100_000,
    "extended": 1500,
    "forked": 5000,
    "loaded": 150,
    "chunks": 500,
    "new": 5000,
    "forgotten": 100,
    "removed": 1000,
}


@pytest.mark.parametrize("order", PROMPT_ORDERS)
def test_trees_of_turns_equal_the_reference(order: str):
    """Every kind of reuse happens often, and every turn equals the reference."""
    totals, deepest = Counter(), 0
    for seed in SOME:
        found = run_tree_scenario(seed, order)
        deepest = max(deepest, found.pop("depth", 0))
        totals += found
    print(f"{dict(totals)}, deepest {deepest}")
    assert deepest >= 4
    rare = {name: totals[name] for name, count in LEAST.items() if totals[name] < count * len(SOME) / 1000}
    assert not rare


@pytest.mark.long
@pytest.mark.parametrize("name", FORK_MUTATIONS)
def test_planted_bug_is_caught(name, monkeypatch):
    """Some scenario fails with the bug; this file proves that none fails without it."""
    FORK_MUTATIONS[name](monkeypatch)
    check_caught(name, range(40), range(150))


def check_caught(name: str, tree_seeds: Iterable[int], fork_seeds: Iterable[int]) -> None:
    for run, seeds in ((run_fork_scenario, fork_seeds), (run_tree_scenario, tree_seeds)):
        for seed in seeds:
            try:
                run(seed)
            except (AssertionError, ValueError, LookupError) as error:
                print(f"caught by {run.__name__}({seed}): {error}")
                return
    pytest.fail(f"all passed with this bug: {name}")
