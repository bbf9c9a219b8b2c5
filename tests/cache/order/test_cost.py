"""Measured costs: linear interpolation, rejected files, and profiles of another system."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax import ConfigError
from pensieve_jax.cache import make_policy
from pensieve_jax.cache.order.cost import COST_KINDS, CostPoint, CostProfile, CostSubject, MeasuredCostModel

SUBJECT = CostSubject(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=320,
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    tensor_parallel_size=1,
    chunk_tokens=32,
)


def points(*totals_s, first=32):
    return tuple(CostPoint(first << i, total / 2, totals_s[0] / 2, total) for i, total in enumerate(totals_s))


PROFILE = CostProfile(
    subject=SUBJECT,
    model="random:llama-tiny",
    jax_version="0.11.2",
    command="pensieve profile",
    num_batched_chunks=16,
    cost="in_batch",
    curves={"alone": points(10.0, 11.0), "in_batch": points(1.0, 2.0, 5.0)},
)

curves = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(1e-9, 1e3)), min_size=2, max_size=12, unique_by=lambda p: p[0]
).map(lambda pairs: [CostPoint(length, 0.0, 0.0, total_s) for length, total_s in sorted(pairs)])


@pytest.fixture
def path(tmp_path):
    """Save a valid file."""
    PROFILE.save(tmp_path / "costs.json")
    return tmp_path / "costs.json"


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_costs_are_interpolated_linearly():
    model = MeasuredCostModel(points(1.0, 2.0, 5.0))
    expected = {1: 1, 32: 1, 40: 1.25, 48: 1.5, 64: 2, 96: 3.5, 112: 4.25, 128: 5}
    assert {length: model.chunk_cost_s(length) for length in expected} == expected


def test_the_last_line_is_extrapolated():
    model = MeasuredCostModel(points(1.0, 2.0, 5.0))
    assert [model.chunk_cost_s(length) for length in (192, 256, 1152)] == [8, 11, 53]


def test_noise_does_not_make_a_later_chunk_cheaper():
    model = MeasuredCostModel(points(1.0, 3.0, 2.0, 4.0))
    assert [model.chunk_cost_s(length) for length in (64, 100, 128, 192, 256)] == [3, 3, 3, 3.5, 4]


@given(curve=curves, lens=st.lists(st.integers(1, 4 * 10**6), min_size=2))
def test_never_decreases_and_meets_every_point(curve, lens):
    model = MeasuredCostModel(curve)
    costs = [model.chunk_cost_s(length) for length in sorted({*lens, *(p.context_len for p in curve)})]
    assert all(a <= b for a, b in itertools.pairwise(costs)) and costs[0] > 0
    highest = itertools.accumulate((p.total_s for p in curve), max)
    at_points = [model.chunk_cost_s(p.context_len) for p in curve]
    assert at_points == pytest.approx(list(highest), rel=1e-12)


def test_the_retention_policy_takes_it():
    policy = make_policy("retention", MeasuredCostModel(PROFILE.points), 32)
    assert policy.name == "retention"


def test_save_and_load(path):
    assert CostProfile.load(path) == PROFILE
    document = json.loads(path.read_text())
    assert document["cost_is"] == COST_KINDS["in_batch"] and document["units"].keys() >= {
        "*_s",
        "context_len",
    }
    assert list(document["curves"]["alone"][0]) == ["context_len", "attention_s", "rest_s", "total_s"]


def test_a_file_without_a_kv_dtype_is_accepted_for_one_dtype(path):
    """Such a file is for the model's dtype only."""
    PROFILE.save(path)
    values = json.loads(path.read_text())
    del values["subject"]["kv_dtype"]
    path.write_text(json.dumps(values))
    MeasuredCostModel.load(path, SUBJECT)
    with pytest.raises(ConfigError, match="a profile of kv_dtype='int8'"):
        MeasuredCostModel.load(path, dataclasses.replace(SUBJECT, kv_dtype="int8"))


def test_the_device_kind_of_the_file_counts(path):
    assert MeasuredCostModel.load(path, SUBJECT).chunk_cost_s(64) == 2
    edit(path, lambda values: values.update(cost="alone"))
    assert MeasuredCostModel.load(path, SUBJECT).chunk_cost_s(64) == 11


def refusal(path, subject=SUBJECT):
    with pytest.raises(ConfigError) as caught:
        MeasuredCostModel.load(path, subject)
    assert caught.value.field == "cache.cost_profile" and caught.value.value == str(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[]", "found 'list'"),
        (b"{}", "found None"),
        (b'{"format": "pensieve cost profile, version 2"}', "version 2"),
    ],
)
def test_an_invalid_profile_is_refused(path, text, says):
    path.write_bytes(text)
    assert says in refusal(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.json")
    assert "directory" in refusal(tmp_path)


def first(values):
    return values["curves"]["in_batch"][0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.pop("subject"), "dict 'subject'; it is missing"),
        (lambda v: v.pop("curves"), "dict 'curves'"),
        (lambda v: v.update(model=3), "str 'model'; found 3"),
        (lambda v: v.update(cost="best"), "found 'best'"),
        (lambda v: v["curves"].pop("in_batch"), "found 'in_batch'"),
        (lambda v: v["curves"].update(other=[]), "found 'other'"),
        (lambda v: v["curves"].update(alone=None), "list 'alone'"),
        (lambda v: v["curves"]["alone"].pop(), "'alone' has 1"),
        (lambda v: v["curves"]["alone"].append(7), "int 'context_len'"),
        (lambda v: v["subject"].pop("num_layers"), "int 'num_layers'; it is missing"),
        (lambda v: v["subject"].update(num_layers=True), "int 'num_layers'; found True"),
        (lambda v: v["subject"].update(dtype=16), "str 'dtype'; found 16"),
        (lambda v: first(v).update(context_len=0), "'in_batch' has 0"),
        (lambda v: first(v).update(context_len=64), "'in_batch' has 64"),
        (lambda v: first(v).update(context_len=32.0), "found 32.0"),
        (lambda v: first(v).update(total_s="1"), "found '1'"),
        (lambda v: first(v).update(total_s=0), "total_s above 0"),
        (lambda v: first(v).update(total_s=float("nan")), "nan"),
        (lambda v: first(v).update(total_s=float("inf")), "inf"),
        (lambda v: first(v).update(total_s=10**400), "total_s above 0"),
        (lambda v: first(v).update(rest_s=-1e-3), "-0.001"),
        (lambda v: first(v).pop("attention_s"), "'attention_s'; it is missing"),
    ],
)
def test_impossible_measurements_are_refused(path, change, says):
    edit(path, change)
    assert says in refusal(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [(field.name, 99 if field.type == "int" else "other") for field in dataclasses.fields(CostSubject)],
)
def test_a_profile_of_another_system_is_refused(path, name, value):
    """The error names the value found and the one expected, and no other field."""
    message = refusal(path, dataclasses.replace(SUBJECT, **{name: value}))
    assert f"a profile of {name}={value!r}; this one is of {name}={getattr(SUBJECT, name)!r}:" in message
    assert "pensieve profile" in message
