"""What is remembered for a while."""

from __future__ import annotations

from pensieve_jax.server.api.recent import Recent


def test_a_value_is_remembered_until_its_time_is_over():
    recent: Recent[str, int] = Recent(10.0, 5)
    recent.put("a", 1, 100.0)
    assert recent.get("a", 109.5) == 1 and recent.get("b", 100.0) is None
    assert recent.get("a", 110.0) is None
    recent.put("a", 2, 109.0)
    assert recent.get("a", 118.5) == 2 and len(recent) == 1, "its time began anew"
    recent.put("b", 3, 118.5)
    assert len(recent) == 2
    recent.put("c", 4, 119.0)
    assert len(recent) == 2 and recent.get("b", 119.0) == 3, "what is over takes no room"


def test_of_many_values_the_latest_are_remembered():
    recent: Recent[str, int] = Recent(1000.0, 3)
    for time_s, key in enumerate("abcad"):
        recent.put(key, time_s, float(time_s))
    assert [recent.get(key, 5.0) for key in "abcd"] == [3, None, 2, 4]


def test_a_value_that_was_replaced_is_not_dropped():
    recent: Recent[str, int] = Recent(10.0, 3)
    recent.put("a", 1, 0.0)
    recent.put("a", 2, 0.0)
    recent.drop("a", 1)
    recent.drop("b", 1)
    assert recent.get("a", 0.0) == 2
    recent.drop("a", 2)
    assert len(recent) == 0
