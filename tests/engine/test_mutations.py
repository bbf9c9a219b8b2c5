"""Planted bugs, one at a time: the random driver must catch each of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pensieve_jax.config import PROMPT_ORDERS
from tests.engine.count_mutations import COUNT_MUTATIONS, RARE_COUNT_MUTATIONS
from tests.engine.driver import run_scenario
from tests.engine.mutations import MUTATIONS
from tests.engine.scenarios import in_order, random_scenario
from tests.engine.tier_mutations import TIER_MUTATIONS
from tests.seeds import EVERYTHING

NUM_SEEDS = 200
PLANTED = MUTATIONS | TIER_MUTATIONS
PLANTED |= {name: plant for name, plant in COUNT_MUTATIONS.items() if name not in RARE_COUNT_MUTATIONS}
# These run first: short scenarios, the shortest first, that together catch every planted bug. The set changes
# with the generator and the engine; for a bug that none of them catches any more, all seeds follow.
SHORT_SEEDS = (442, 400, 390, 300, 388, 362, 116, 56, 15, 192, 224, 219, 376, 256, 135, 484, 286, 81)


@pytest.mark.parametrize("order", PROMPT_ORDERS)
@pytest.mark.parametrize("seed", SHORT_SEEDS)
def test_without_a_bug_the_short_scenarios_pass(seed, order):
    """This proves that a failure with a bug, by arrival, is caused by the bug."""
    run_scenario(in_order(random_scenario(seed), order))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name, monkeypatch):
    """Some scenario fails with the bug; this file and `test_seeded_scenarios` show that none does without."""
    PLANTED[name](monkeypatch)
    check_caught(name, (*SHORT_SEEDS, *range(NUM_SEEDS)))


# Dozens of scenarios pass before one needs what these bugs break. The short scenarios catch them in any case.
RARE = frozenset(
    {
        "page freed while in flight",
        "lost copies still count",
        "an expedited copy comes after its step",
        "lost pools still count",
        "slots of expedited copies are given away",
        "expediting is not passed on",
    }
)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if EVERYTHING or name not in RARE])
def test_planted_bug_is_caught_by_any_seeds(name, monkeypatch):
    """These seeds were not selected; `test_seeded_scenarios` proves that none fails without the bug."""
    PLANTED[name](monkeypatch)
    check_caught(name, range(NUM_SEEDS))


def check_caught(name: str, seeds: Iterable[int]) -> None:
    num_passed = 0
    for seed in seeds:
        try:
            run_scenario(random_scenario(seed))
        except (AssertionError, ValueError, LookupError) as error:
            print(f"caught by seed {seed}: {error}")
            return
        num_passed += 1
    pytest.fail(f"{num_passed} scenarios passed with this bug: {name}")
