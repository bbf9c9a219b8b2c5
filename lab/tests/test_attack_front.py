"""The attack on the front end: its requests are what they say, and its report names what was seen."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.server.http.settings import MAX_BODY_BYTES
from pensieve_lab.hostile.front_requests import front_attacks


def test_bodies_are_json_that_the_server_reads():
    attacks = front_attacks()
    assert len(attacks) >= 15
    for name, one in attacks.items():
        if one.body is not None:
            assert len(one.body) <= MAX_BODY_BYTES, name
            assert isinstance(json.loads(one.body), dict), name
    longest = [name for name, one in attacks.items() if one.body and len(one.body) > 0.9 * MAX_BODY_BYTES]
    assert len(longest) >= 10


@pytest.mark.long
def test_a_server_is_attacked_and_lives(launch, tmp_path):
    document = tmp_path / "found.json"
    flags = {"only": "lists in", "attack_s": 1.0, "quiet_s": 0.5, "rest_s": 0.5, "json": str(document)}
    assert launch("pensieve_lab.programs.attack_front", shared_llm=False, **flags) == 0
    found = json.loads(document.read_text())["results"]
    (row,) = found["attacks"]
    assert not found["has_died"] and row["statuses"] and row["during"]["num"] > 0
    assert row["memory_most"]["front_mb"] > 10 < row["memory_most"]["engine_mb"]
