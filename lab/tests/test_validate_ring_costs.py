"""Measured runs in virtual time: every step equals the engine's."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED
from tests.launching import ROOT

RESULTS = ROOT / "lab" / "results"


def test_steps_of_an_h200_are_those_of_the_simulator(launch, capsys):
    document = RESULTS / "h200_rebatching_table2.json"
    assert launch("validate_ring_costs", shared_llm=False, documents=str(document)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["points"]
    assert len(found) == 15
    assert all(one["steps"] == one["simulated_steps"] for one in found)
    assert all(abs(one["error"]) < 0.15 for one in found)


def test_other_steps_are_a_failure(launch, tmp_path):
    results = json.loads((RESULTS / "h200_rebatching_table2.json").read_text())
    points = results["results"]["points"]
    results["results"]["points"] = points[:1]
    points[0]["steps"] += 1
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(results))
    assert launch("validate_ring_costs", shared_llm=False, documents=str(path)) == EXIT_FAILED


@pytest.mark.parametrize("name", ["h200_rebatching_steps.json", "nowhere.json"])
def test_other_documents_are_refused(launch, name):
    with pytest.raises(ConfigError, match="--documents"):
        launch("validate_ring_costs", shared_llm=False, documents=str(RESULTS / name))
