"""The random driver is worth something only if it catches bugs: here are some, planted one at a time."""

from __future__ import annotations

import pytest

from tests.engine.driver import run_scenario
from tests.engine.mutations import MUTATIONS
from tests.engine.scenarios import random_scenario
from tests.engine.tier_mutations import TIER_MUTATIONS

NUM_SEEDS = 200
PLANTED = MUTATIONS | TIER_MUTATIONS


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name, monkeypatch):
    """Some scenario fails; without the bug, `test_seeded_scenarios` says, none does."""
    PLANTED[name](monkeypatch)
    for seed in range(NUM_SEEDS):
        try:
            run_scenario(random_scenario(seed))
        except (AssertionError, ValueError, LookupError) as error:
            print(f"caught by seed {seed}: {error}")
            return
    pytest.fail(f"{NUM_SEEDS} scenarios passed with this bug: {name}")
