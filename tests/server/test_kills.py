"""Engine, front, or both killed at random bytes of the wire: every turn is there once, or not at all.

Two hundred deaths: `python -m tests.server.faults.kills --num_deaths=200`.
"""

from __future__ import annotations

from tests.seeds import new_seed
from tests.server.faults.kills import scenario

NUM_DEATHS = 8


def test_no_turn_is_lost_or_doubled(tmp_path):
    figures = scenario(tmp_path, new_seed(), NUM_DEATHS, num_clients=6)
    print(figures)
    assert sum(figures["deaths"].values()) == NUM_DEATHS
    assert figures["turns"]["seen"] > NUM_DEATHS and figures["turns"]["tries"] > figures["turns"]["seen"]
