"""Random scenarios of an engine on the fake runner, against the reference without pages.

`test_seeded_scenarios` runs others of fixed seeds, and `tests.search_schedules` many more of those.
`run_scenario` runs what hypothesis prints.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pensieve_jax.config import PROMPT_ORDERS
from tests.engine.driver import run_scenario
from tests.engine.scenarios import Scenario, in_order, scenarios

_SEARCH = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(_SEARCH, max_examples=100)
@given(scenario=scenarios(), order=st.sampled_from(PROMPT_ORDERS))
def test_random_scenario(scenario: Scenario, order: str):
    """Tokens equal the reference whatever is moved, dropped, suspended, cancelled, cut or failed."""
    run_scenario(in_order(scenario, order))
