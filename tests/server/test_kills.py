"""Engine, front end, or both killed at random bytes of the wire: every turn is there once, or not at all.

Two hundred deaths: `python -m tests.server.faults.kills --num_deaths=200`.
"""

from __future__ import annotations

import pytest

from tests.seeds import enough, new_seed
from tests.server.faults.kills import scenario


@pytest.mark.long
def test_no_turn_is_lost_or_doubled(tmp_path):
    num_deaths = enough(5, 8)
    figures = scenario(tmp_path, new_seed(), num_deaths, num_clients=6)
    print(figures)
    assert sum(figures["deaths"].values()) == num_deaths
    assert figures["turns"]["tries"] >= figures["turns"]["seen"] > num_deaths


@pytest.mark.long
def test_deaths_before_the_first_turn(tmp_path):
    """Both deaths come while the server starts; clients still complete turns afterwards."""
    figures = scenario(tmp_path, 3557444857, 2, num_clients=6)
    assert figures["deaths"] == {"both out": 1, "engine out": 1} and figures["turns"]["seen"] > 2
