"""The policy in virtual time: figure 2.5 as its text says, and the thesis's device."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.cellular.cells import Cell, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_lab.cells.simulation import simulate
from pensieve_lab.cells.times import CellTimes, thesis_v100
from tests.cellular.step_cell import STEP, Step, chain
from tests.launching import load


def test_figure_2_5():
    """Four cells at a time, a time unit per cell; requests 5 to 8 come while 1 to 4 run."""
    timeline = load("pensieve_lab.cells.timeline").run(CellScheduler)
    # Two tasks of requests 1 to 4; at 2 request 1 has left and 5 joins; at 3 requests 2 and 3 leave, for 6
    # and 7.
    assert timeline.tasks[:4] == [(0, (1, 2, 3, 4)), (1, (1, 2, 3, 4)), (2, (2, 3, 4, 5)), (3, (4, 5, 6, 7))]
    assert timeline.end_s[:4].tolist() == [2, 3, 3, 5]
    assert timeline.begin_s[4:7].tolist() == [2, 3, 3]
    # Request 8 takes the place of request 4. By graphs of four everything would end at 5 and at 12.
    assert timeline.end_s[7] == 6
    assert timeline.end_s.max() == 9


@pytest.mark.parametrize(("rate", "p90_ms"), [(2000, 12.5), (8000, 12.5)])
def test_latency_is_flat_to_8000_a_second_on_the_device_of_the_thesis(rate, p90_ms):
    """Section 2.7.2: the 90th percentile is 12 ms below 8 K requests a second."""
    served = run_lstm(rate, seconds=0.6)
    latency_s = served.end_s - served.arrival_s
    assert np.percentile(latency_s, 90) * 1e3 == pytest.approx(p90_ms, rel=0.12)


def test_fixed_lengths_reach_87_percent_of_the_bound_on_the_device_of_the_thesis():
    """Section 2.7.3: of 27,136 requests of length 24 a second."""
    num = 12_000
    served = serve(np.full(num, 24), np.zeros(num))
    assert num / served.end_s.max() == pytest.approx(0.87 * 27_136, rel=0.02)


def run_lstm(rate, *, seconds):
    rng = np.random.default_rng(0)
    num = int(rate * seconds)
    lengths = np.clip(np.round(rng.lognormal(2.914, 0.727, num)).astype(int), 1, 330)
    arrivals = np.cumsum(rng.exponential(1 / rate, num))
    return serve(lengths, arrivals)


def serve(lengths, arrivals):
    types = CellTypes([Cell(STEP, "lstm", 512)])
    config = CellularConfig(num_rows=50_000)
    return simulate(types, chain, config, thesis_v100(), lengths.tolist(), arrivals)


def test_a_decoder_that_follows_without_a_word():
    """Released at submission, it is launched after its encoder; released at completion, a launch later."""
    module = {"encoder": Step(), "decoder": Step()}
    types = CellTypes([Cell(one, name, 4) for name, one in module.items()])

    def unfold(num, graph):
        encoded = graph.chain(module["encoder"], range(num))
        graph.returns(graph.chain(module["decoder"], [0], after=encoded[-1])[-1])

    times = CellTimes({"encoder": {4: 1.0}, "decoder": {4: 1.0}})
    begun = {}
    for release in ("completion", "submission"):
        config = CellularConfig(release=release, launches_in_flight=2)
        arrivals = np.array([0.0, 0.0, 0.5, 0.5])
        served = simulate(types, unfold, config, times, [2, 2, 4, 4], arrivals)
        begun[release] = served.end_s[:2].tolist()
    assert begun == {"completion": [7.0, 7.0], "submission": [3.0, 3.0]}


@pytest.mark.parametrize("tie_break", ["alternate", "priority"])
@pytest.mark.parametrize("priority", [0, 9])
@pytest.mark.parametrize(("max_skips", "least_s", "most_s"), [(None, 200, 1000), (4, 25, 40), (1, 5, 20)])
def test_a_type_that_is_never_full_waits_no_longer_than_it_is_told(
    tie_break, priority, max_skips, least_s, most_s
):
    """Its priority does not matter: line 5 of Algorithm 1 prefers full batches, which two other types
    have."""
    module = {"busy": Step(), "also": Step(), "rare": Step()}
    ranks = {"busy": 2, "also": 1, "rare": priority}
    types = CellTypes([Cell(one, name, 4, priority=ranks[name]) for name, one in module.items()])

    def unfold(request, graph):
        name, num = request
        graph.returns(graph.chain(module[name], [0] * num)[-1])

    requests = [("busy", 5), ("also", 5)] * 200 + [("rare", 1)]
    times = CellTimes({name: {4: 1.0} for name in module})
    config = CellularConfig(num_rows=401, tie_break=tie_break, max_skips=max_skips, launches_in_flight=1)
    arrivals = np.array([0.0] * 400 + [0.5])
    served = simulate(types, unfold, config, times, requests, arrivals)
    assert least_s < served.end_s[-1] - arrivals[-1] < most_s
