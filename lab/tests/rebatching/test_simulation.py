"""Virtual time: decisions equal the engine's, and times add up."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import ConfigError, ContextLengthError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.sampling_rows import SamplerMode
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.launches import (
    Insert,
    Park,
    Prefill,
    Resize,
    Return,
    Shape,
    Suspend,
    WordsLayout,
)
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.metrics import StepSeen
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring import Relayout
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes
from pensieve_lab.rebatching.costs import NUMBERS, RingCosts, costs_names
from pensieve_lab.rebatching.simulation import simulate
from pensieve_lab.rebatching.virtual_runner import VirtualRunner
from tests.rebatching.fake_runner import FakeRunner

_ZEROS = np.zeros(1, np.int32)


class SimulatedQuery(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    priority: int = 0


def costs(**changes: float) -> RingCosts:
    """Make costs that are zero except for the given ones."""
    free = {name: 0.0 for name in NUMBERS} | {"token_bytes": 10, "copy_bytes_per_s": math.inf}
    texts = {"model": "", "device": "", "dtype": "", "source": "derived", "provenance": {}}
    return RingCosts(**{**texts, **free, **changes})  # type: ignore[arg-type]


def load(seed: int, num: int = 24) -> list[SimulatedQuery]:
    rng = np.random.default_rng(seed)
    return [
        SimulatedQuery(int(rng.integers(1, 100)), int(rng.integers(1, 80)), priority=int(rng.integers(0, 2)))
        for _ in range(num)
    ]


METHODS: list[dict[str, Any]] = [
    {"insertion": "embed"},
    {"insertion": "embed", "preemptive": True},
    {"insertion": "shape"},
    {"insertion": "none", "prefill": "similar"},
    {"insertion": "none", "prefill": "together"},
]


def _told(seen: list[list[str]], step: StepSeen) -> None:
    """Record each launch by its kind and numbers, except ids, which the engine does not decide."""
    seen.append(
        [
            f"{type(launch).__name__} "
            + " ".join(
                f"{name}={value}"
                for name, value in vars(launch).items()
                if name
                not in ("token_ids", "words", "samples", "sampler_mode", "last_id", "relayout", "places")
            )
            + f" {[place for _, place in getattr(launch, 'samples', ())]}"
            for launch in step.launches
        ]
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_it_decides_as_an_engine_does(method, seed):
    config = RebatchingConfig(max_batch=4, kv_bytes=10**5, lengths=(64, 128, 192, 384), **method)
    ring_shapes = RingShapes(config, 10, 10**6)
    asked = load(seed)
    of_engine: list[list[str]] = []
    runner = FakeRunner(WordsLayout(config.max_batch, config.max_banned_ids))
    loop = RebatchingLoop(config, ring_shapes, runner, observe=lambda step: _told(of_engine, step))
    for serial, one in enumerate(asked):
        loop.submit(
            Query(
                serial,
                [1] * one.prompt_tokens,
                SamplingParams(max_tokens=one.output_tokens, ignore_eos=True),
                seed=0,
                priority=one.priority,
                ending_ids=(),
                max_context_tokens=ring_shapes.max_context_tokens,
                tokenizer=None,
            )
        )
    while loop.queries:
        loop.step()
    simulated: list[list[str]] = []
    profile = RingCosts.load("h200_llama2-7b")
    served = simulate(
        config,
        dataclasses.replace(profile, token_bytes=10),
        asked,
        max_positions=10**6,
        observe=lambda step: _told(simulated, step),
    )
    assert simulated == of_engine and served.metrics == loop.metrics
    assert served.metrics.num_steps > 50


def test_times_add_up():
    """A ring is made, a prompt computed, its row inserted, and two steps follow."""
    config = RebatchingConfig(max_batch=1, kv_bytes=10**5, lengths=(64,))
    priced = costs(weights_s=1.0, column_s=0.01, insert_s=0.5, insert_column_s=0.001, fetch_s=0.25)
    served = simulate(config, priced, [SimulatedQuery(20, 3, arrival_s=7.0)], max_positions=64, records=True)
    ring_s, prefill_s, insert_s, step_s = 0.64, 1.0, 0.5 + 0.064, 1.64
    assert served.first_s == pytest.approx(7 + ring_s + prefill_s + 0.25)
    assert served.end_s == pytest.approx(7 + ring_s + prefill_s + insert_s + 2 * step_s + 0.25)
    assert served.completion_s == served.end_s[0]
    assert served.device_s == pytest.approx(ring_s + prefill_s + insert_s + 2 * step_s)
    assert served.series is not None
    assert served.series.tokens.tolist() == [0, 2, 3] and served.series.completed.tolist() == [0, 0, 1]
    assert served.series.span_bytes.tolist() == [210, 220, 0]
    assert served.series.kv_bytes.tolist() == [640, 640, 640]


def test_the_serving_thread_takes_time_too():
    config = RebatchingConfig(max_batch=1, kv_bytes=10**5, lengths=(64,))
    served = simulate(config, costs(host_s=10.0, fetch_s=0.25), [SimulatedQuery(20, 3)], max_positions=64)
    assert served.end_s == pytest.approx(3 * 10.0 + 0.25)


def test_arithmetic_and_padding_count():
    priced = costs(weights_s=2.0, token_s=0.5, step_s=0.25, pair_s=0.125, shaped_pair_s=2.0, column_s=1.0)
    assert priced.decode_of(RingShape(3, 10)) == 0.25 + 2.0 + 30
    assert priced.decode_of(RingShape(8, 0)) == 0.25 + 4.0
    assert priced.prefill_of(2, 4) == 0.25 + 4.0 + 0.125 * 2 * (1 + 2 + 3 + 4)
    assert priced.shaped_of(RingShape(2, 10), 4) == 0.25 + 4.0 + 2.0 * 2 * 4 * 10


def _prefill(serial: int, length: int) -> Prefill:
    return Prefill((serial,), length, 1, _ZEROS, _ZEROS, SamplerMode(), (), length)


def test_a_row_leaves_beside_programs_and_a_park_may_wait():
    clock = VirtualClock()
    runner = VirtualRunner(costs(weights_s=1.0, copy_bytes_per_s=100, insert_s=0.5), clock, 2)
    runner.launch(_prefill(1, 20))
    runner.launch(_prefill(2, 10))  # ends at 2
    runner.launch(Park(1, waits=False))  # 2 s on the link, from 1 on
    runner.launch(Park(2, waits=False))  # 1 s behind it
    assert clock.now() == 0 and not runner.has_left(1)
    runner.launch(Park(1, waits=True))
    assert clock.now() == 3.0 and runner.has_left(1) and not runner.has_left(2)
    clock.advance_to(3.5)
    assert not runner.has_left(2)
    runner.launch(Return(1))  # behind the other copy: from 4 to 6
    assert not runner.has_left(1)
    runner.launch(Resize(RingShape(1, 20), None))
    runner.launch(Insert(1, 0, 0, 20, -1))  # not before it is back
    flight = runner.launch(_prefill(3, 10))
    assert flight is not None and flight.end_s == 6.0 + 0.5 + 1.0
    runner.fetch(flight)
    assert clock.now() == 7.5 and runner.first_s == {3: 7.5}


def test_a_row_that_is_taken_can_leave_when_that_is_done():
    clock = VirtualClock()
    runner = VirtualRunner(costs(take_column_s=0.1, copy_bytes_per_s=100, weights_s=1.0), clock, 2)
    runner.launch(Resize(RingShape(2, 20), None))
    runner.launch(Shape(5, np.zeros(4, np.int32), _ZEROS, SamplerMode(), (), 4))
    runner.launch(Suspend(5, 0, np.zeros(20, np.int32), 12))
    runner.launch(Park(5, waits=True))
    assert clock.now() == 1.0 + 2.0 + 2.0
    assert not runner.has_left(7)
    runner.reset(())
    assert not runner.has_left(5)


def test_moving_a_ring_is_waited_for():
    """Layer by layer, as the device's runner does."""
    config = RebatchingConfig(max_batch=2, kv_bytes=10**5, lengths=(32, 64))
    priced = costs(relayout_column_s=1.0)
    served = simulate(config, priced, [SimulatedQuery(20, 30)], max_positions=64)
    assert served.metrics.num_resizes == 2 and served.completion_s == 2 * 64.0
    clock = VirtualClock()
    runner = VirtualRunner(dataclasses.replace(priced, column_s=1.0), clock, 2)
    runner.launch(Resize(RingShape(2, 32), None))
    assert clock.now() == 0.0
    runner.launch(Resize(RingShape(2, 64), Relayout(_ZEROS, _ZEROS)))
    assert clock.now() == 2 * 32.0 + 2 * 64.0


def test_time_never_goes_back():
    """A query that arrives while another's last token is fetched is seen after it."""
    config = RebatchingConfig(max_batch=1, kv_bytes=10**5, lengths=(64,))
    priced = costs(weights_s=1.0, fetch_s=0.25)
    served = simulate(
        config, priced, [SimulatedQuery(20, 3), SimulatedQuery(20, 1, arrival_s=3.0)], max_positions=64
    )
    assert served.end_s.tolist() == [3.25, 4.5]


def test_late_queries_are_served_late_and_urgent_ones_first():
    config = RebatchingConfig(max_batch=1, kv_bytes=10**5, lengths=(64,), preemptive=True)
    asked = [
        SimulatedQuery(20, 30),
        SimulatedQuery(20, 5, arrival_s=10.5, priority=1),
        SimulatedQuery(20, 2, arrival_s=1000.0),
    ]
    served = simulate(config, costs(weights_s=1.0), asked, max_positions=64)
    assert served.metrics.num_suspensions == 1
    assert served.end_s[1] < 20 < served.end_s[0]
    assert served.first_s[2] == 1001.0 and served.end_s[2] == 1002.0
    assert served.arrival_s.tolist() == [0.0, 10.5, 1000.0]


@pytest.mark.parametrize("seed", range(20))
def test_little_memory_and_slow_copies_end_all_the_same(seed):
    rng = np.random.default_rng(seed)
    config = RebatchingConfig(
        max_batch=int(rng.integers(1, 6)),
        kv_bytes=int(rng.integers(2 * 192, 5 * 192)) * 10,
        lengths=(32, 64, 96, 192),
        host_bytes=int(rng.choice([0, 2000, 10**5])),
        preemptive=bool(rng.integers(2)),
    )
    asked = [one._replace(arrival_s=10.0 * place) for place, one in enumerate(load(seed))]
    priced = costs(weights_s=1.0, copy_bytes_per_s=float(rng.choice([1.0, 100.0])))
    served = simulate(config, priced, asked, max_positions=192, records=True)
    assert (served.first_s > served.arrival_s).all() and (served.end_s >= served.first_s).all()
    series = served.series
    assert series is not None and (np.diff(series.time_s) >= 0).all()
    assert series.completed[-1] == len(asked)
    assert series.tokens[-1] >= sum(one.output_tokens for one in asked)
    assert series.kv_bytes.max() <= served.metrics.max_kv_bytes <= config.kv_bytes
    assert (series.span_bytes <= series.kv_bytes).all()


@pytest.mark.parametrize("rows_of_room", [1, 2, 4])
def test_a_query_that_is_served_next_is_not_suspended(rows_of_room):
    """Prompts are computed ahead as far as there is room, and no row leaves only to return at once."""
    rng = np.random.default_rng(5)
    asked = [SimulatedQuery(int(rng.integers(33, 60)), int(rng.integers(5, 30))) for _ in range(60)]
    config = RebatchingConfig(max_batch=4, kv_bytes=(4 + rows_of_room) * 96 * 10, lengths=(64, 96))
    parks: list[Park] = []

    def see(step: StepSeen) -> None:
        parks.extend(launch for launch in step.launches if isinstance(launch, Park))

    served = simulate(config, costs(copy_bytes_per_s=1.0), asked, max_positions=97, observe=see)
    assert served.metrics.num_insertions >= 60
    assert sum(park.waits for park in parks) <= 2  # where the ring becomes longer, its room shorter


def test_a_query_that_is_too_long_is_refused():
    config = RebatchingConfig(max_batch=1, kv_bytes=10**5, lengths=(64,))
    with pytest.raises(ContextLengthError, match=r"queries\[1\] is '66 tokens', but must be at most 65"):
        simulate(config, costs(), [SimulatedQuery(1, 1), SimulatedQuery(33, 33)], max_positions=100)


@pytest.mark.parametrize("name", costs_names())
def test_profiles_of_the_package_can_be_read(name, tmp_path):
    found = RingCosts.load(name)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(found.as_document()))
    assert RingCosts.load(path) == found
    assert name.endswith(found.model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "a file of format"),
        ({"source": "guessed"}, "whose source is one of"),
        ({"model": 7}, "a text 'model'"),
        ({"provenance": {"weights_s": 1}}, "texts by keyword"),
        ({"weights_s": -1}, "'weights_s' from 0 on"),
        ({"host_s": True}, "'host_s' from 0 on"),
        ({"copy_bytes_per_s": 0}, "'copy_bytes_per_s' above 0"),
        ({"fetch_s": None}, "'fetch_s' from 0 on"),
    ],
)
def test_invalid_costs_are_refused(changes, words, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(RingCosts.load(costs_names()[0]).as_document() | changes))
    with pytest.raises(ConfigError, match=words):
        RingCosts.load(path)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a file that can be read, or one of h200_llama2-7b"):
        RingCosts.load("nothing")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        RingCosts.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="found 'list'"):
        RingCosts.load(tmp_path / "list.json")
