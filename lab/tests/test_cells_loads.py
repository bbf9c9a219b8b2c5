"""Figures of a load: the backlog of an overloaded run does not count as throughput."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_lab.cells.simulation import SimulationResult
from tests.launching import load


def figures(arrival_s, end_s):
    return load("pensieve_lab.cells.loads").figures(SimulationResult(arrival_s, arrival_s, end_s))


def test_what_drains_after_the_last_arrival_is_no_throughput():
    """2,000 requests arrive in a second; 500 are answered within it, the others soon after."""
    arrival_s = np.linspace(0, 1, 2000)
    end_s = np.concatenate([np.linspace(0.002, 1, 500), np.linspace(1.001, 1.1, 1500)])
    assert figures(arrival_s, end_s)["throughput"] == pytest.approx(500, rel=0.01)


def test_a_load_that_is_served_is_its_throughput():
    arrival_s = np.linspace(0, 2, 2000)
    found = figures(arrival_s, arrival_s + 0.01)
    assert found["throughput"] == pytest.approx(1000, rel=0.02)
    assert found["latency_s"]["p99"] == pytest.approx(0.01)


def test_latency_is_of_requests_in_the_middle_by_arrival():
    arrival_s = np.arange(100.0)
    end_s = arrival_s + np.where(np.arange(100) < 80, 1.0, 50.0)
    assert figures(arrival_s, end_s)["latency_s"]["p99"] == 1.0
