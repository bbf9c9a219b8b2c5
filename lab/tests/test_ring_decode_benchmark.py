"""The benchmark of attention over a ring: what it times, and how it reports a wrong kernel."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.launching import load

ring_cases = load("pensieve_lab.kernels.ring_cases")
ring_rounds = load("pensieve_lab.kernels.ring_rounds")
script = load("benchmark_ring_decode")

QUICK = {"target_ms": 0.01, "repeats": 1, "dtype": "float32"}
CASE = ring_cases.RingCase("tiny", 4, 128, Heads(2, 1, 32), "mixed")


@pytest.fixture
def small(monkeypatch):
    """Use one small case and fixed ceilings."""
    ceilings = load("pensieve_lab.steps.ceilings").Ceilings(1e15, 1e15, 1e15)
    monkeypatch.setattr(script, "measure_ceilings", lambda **_: ceilings)
    monkeypatch.setattr(script, "CASES", {"tiny": CASE})
    monkeypatch.setattr(script, "TINY", ("tiny",))
    monkeypatch.setattr(script, "LARGE", ("tiny",))


def documented(out):
    document = json.loads(out.splitlines()[-1])
    return document, document["results"]["measurements"]


@pytest.mark.long
def test_blocks_and_parts_are_tried(launch, small, monkeypatch, capsys):
    monkeypatch.setattr(script, "_SWEEP", ((16, 4, 2, True), (64, 4, 2, False)))
    assert launch("benchmark_ring_decode", shared_llm=False, sweep=True, **QUICK) == 0
    document, found = documented(capsys.readouterr().out)
    assert [one["kernel"] for one in found] == ["xla", *["pallas_triton"] * (len(found) - 1)]
    assert [one["is_tried"] for one in found[:3]] == [False, False, True]
    assert {one["block"]["num_splits"] for one in found[1:]} == {1, 2}  # of 64 columns and more
    live = 2 * 4 * 32 * sum(CASE.num_columns)
    for one in found:
        assert one["time_us"] > 0 and one["max_error"] < 1e-5
        assert one["live_bytes"] == live < one["ring_bytes"] == 2 * 4 * 32 * 4 * 128
        assert one["gb_per_s"] == pytest.approx(1e-3 * live / one["time_us"], rel=0.02, abs=0.06)
        ring = 1e-3 * one["ring_bytes"] / one["time_us"]
        assert one["ring_gb_per_s"] == pytest.approx(ring, rel=0.02, abs=0.06)
        assert 0 <= one["live_bound_us"] <= one["ring_bound_us"]
        assert one["xla_over"] == pytest.approx(found[0]["time_us"] / one["time_us"], rel=0.02, abs=1e-2)
    assert {"versions", "hardware", "command", "units"} <= document.keys()
    assert document["results"]["cases"]["tiny"]["num_columns"] == CASE.num_columns.tolist()


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ("wrong", "wrong: differs by"),
        ("nan", "wrong: free columns"),
        ("fails", "failed: ValueError: too much"),
    ],
)
def test_ours_is_wrong(launch, small, monkeypatch, planted, says, capsys):
    real = ring_rounds.ring_decode_attention

    def attend(q, keys, values, *rest, backend, **how):
        if backend == "xla":
            return real(q, keys, values, *rest, backend=backend, sm_scale=how["sm_scale"])
        if planted == "fails":
            raise ValueError("too much\nof it")
        if planted == "wrong":
            return q
        # Plain XLA, which multiplies what is hidden by zero.
        return real(q, keys, values, *rest, backend="xla", sm_scale=how["sm_scale"])

    monkeypatch.setattr(ring_rounds, "ring_decode_attention", attend)
    assert launch("benchmark_ring_decode", shared_llm=False, **QUICK) == 1
    found = documented(capsys.readouterr().out)[1]
    assert found[0]["time_us"] > 0
    assert found[1]["reason"].startswith(says) and "time_us" not in found[1]


def test_an_implausibly_fast_result_is_rejected(launch, small, monkeypatch, capsys):
    """Plain XLA must read the whole ring, and the kernel the live columns, so equal times cannot both
    hold."""
    read_bytes_per_s = 1e6
    slow = load("pensieve_lab.steps.ceilings").Ceilings(read_bytes_per_s, 1e15, 1e15)
    live, ring = (CASE.work(4, whole_ring=whole).num_bytes for whole in (False, True))
    seconds = (live + ring) / 2 / read_bytes_per_s
    assert live / read_bytes_per_s < seconds < 0.8 * ring / read_bytes_per_s
    monkeypatch.setattr(script, "measure_ceilings", lambda **_: slow)
    for share, believed in ((1, [False, True]), (live / ring, [False, False]), (ring / live, [True, True])):
        timing = load("pensieve_lab.kernels.timing").Timing(share * seconds, 1, "somehow")
        monkeypatch.setattr(ring_rounds.RingRounds, "time", lambda *_, timing=timing: timing)
        assert launch("benchmark_ring_decode", shared_llm=False, **QUICK) == (0 if all(believed) else 1)
        found = documented(capsys.readouterr().out)[1]
        assert ["time_us" in one for one in found] == believed
        for one in found:
            bound_us = one["ring_bound_us"] if one["kernel"] == "xla" else one["live_bound_us"]
            assert ("time_us" in one) == (1.25e6 * timing.seconds > bound_us)
            assert "time_us" in one or one["reason"].startswith("not plausible")


@pytest.mark.parametrize(("num_turns", "num_unrolled"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_a_layer_asks_what_the_one_before_answered(num_turns, num_unrolled):
    """A round starts with the result of the one before, so no part of the chain can be skipped or merged."""
    case = CASE._replace(length=32)
    layers = [ring_cases.make_inputs(case, "float32", seed, is_small=True) for seed in range(2)]
    inputs = layers[0]._replace(layers=[one.layers[0] for one in layers])
    rounds = ring_rounds.RingRounds.of(inputs, None)
    expected = inputs.q
    for _ in range(num_turns * num_unrolled):
        for keys, values in inputs.layers:
            expected = rounds.attend(expected, keys, values, inputs.place, inputs.num_columns)
    chain = rounds.chain(num_turns, num_unrolled)
    np.testing.assert_allclose(chain(*rounds.arguments), expected, rtol=1e-5, atol=1e-6)
    compiled = chain.lower(*rounds.arguments).compile().as_text()
    assert compiled.count(" dot(") == 2 * len(inputs.layers) * num_unrolled


def test_a_mistake_of_the_reference_is_found(monkeypatch):
    inputs = ring_cases.make_inputs(CASE, "float32", 0, is_small=True)
    ring_cases.expected_answer(inputs)
    moved = inputs._replace(place=inputs.place + 1)
    with pytest.raises(ring_cases.MismatchError, match="tiny: xla and numpy differ"):
        ring_cases.expected_answer(moved)


def test_cases(launch, small, capsys):
    with pytest.raises(AttentionArgumentError, match="--cases"):
        launch("benchmark_ring_decode", shared_llm=False, cases="huge", **QUICK)
    assert launch("benchmark_ring_decode", shared_llm=False, time_limit_s=0, **QUICK) == 0
    assert documented(capsys.readouterr().out)[0]["results"]["left_out"] == ["tiny"]
    for name in ring_cases.LARGE:
        case = ring_cases.CASES[name]
        share = case.num_columns.mean() / case.length
        assert share == 1 if case.windows == "full" else 0.38 < share < 0.41
        assert case.num_columns.min() >= 1
    inputs = ring_cases.make_inputs(CASE, "float32", 0, is_small=True)
    holed = ring_cases.poisoned(inputs).layers[0][0]
    counts = np.isfinite(np.asarray(holed)).all(axis=-1).sum(axis=-1)
    np.testing.assert_array_equal(counts, CASE.num_columns[:, None])
    assert jnp.isfinite(inputs.layers[0][0]).all()
