"""Random scenarios of an engine on the fake runner, against the reference without pages.

`test_seeded_scenarios` runs others of fixed seeds, and `tests.search_schedules` many more of those.
`run_scenario` runs what hypothesis prints.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.engine.driver import run_scenario
from tests.engine.scenarios import Scenario, scenarios

_SEARCH = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(_SEARCH, max_examples=100)
@given(scenario=scenarios())
def test_random_scenario(scenario: Scenario):
    """Tokens equal the reference whatever is moved, dropped, suspended, cancelled, cut or failed."""
    run_scenario(scenario)
