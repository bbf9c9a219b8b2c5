"""Programs of groups whose layers are of several kinds, and the tile list of each window."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from model_defs import LayerKind, RopeConfig, make_mesh, preset, random_model
from pallas_kernels.ragged_paged_attention import build_tiles, tile_spec
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.step_programs import bucket_layouts, bucket_tile_specs
from pensieve_jax.scheduler.plan import StepPlan
from tests.device.test_model_runner import GREEDY, Row, Stepper, Talk, engine_config, random_ids

WINDOWED, PLAIN = LayerKind(window=20), LayerKind()
TURNED, STILL = LayerKind(rope=1), LayerKind(rope=None)
ROPES = RopeConfig(), RopeConfig(theta=100.0)


def warm_runner(kinds, num_devices=1, num_groups=2):
    config = preset("qwen3-tiny", num_layers=len(kinds), layer_kinds=kinds, ropes=ROPES)
    model = random_model(config, dtype="float32", mesh=make_mesh(num_devices), seed=1)
    engine = engine_config(num_devices)
    engine = dataclasses.replace(
        engine,
        runner=dataclasses.replace(engine.runner, num_layer_groups=num_groups),
        scheduler=dataclasses.replace(engine.scheduler, token_buckets=(64,)),
    )
    runner = ModelRunner(model, engine, make_mesh(num_devices))
    runner.warm_up()
    alone = random_model(config, dtype="float32", mesh=make_mesh(1), seed=1)
    return runner, DenseReference(alone)


def error_of(runner, reference):
    """Return how far the log-probabilities of a prompt in two pieces and four decodes are from dense ones."""
    runner.reset()
    stepper, talk = Stepper(runner), Talk(random_ids(60, seed=12), pages=[3, 6, 8, 1, 9])
    stepper.buckets = (64,)
    stepper.step(Row(talk, 0, 41))
    found = []
    for start in (41, *range(60, 64)):
        row = Row(talk, start, len(talk.ids), samples=True)
        found.append(stepper.step(row, logprobs=True).logprobs[0])
    turn = reference.replay_turn([], talk.ids[:60], talk.outputs, GREEDY)
    return np.abs(turn.logprobs - found).max()


@pytest.mark.parametrize(
    ("kinds", "num_programs"),
    [
        ((WINDOWED, PLAIN), 2),
        ((TURNED, PLAIN), 2),
        pytest.param((STILL, PLAIN), 2, marks=pytest.mark.long),
        pytest.param((WINDOWED, WINDOWED, PLAIN, PLAIN), 2, marks=pytest.mark.long),
        ((WINDOWED, PLAIN, WINDOWED, PLAIN), 1),
    ],
    ids=["windows", "ropes", "no rope", "halves", "a pattern"],
)
def test_groups_of_other_kinds_have_other_programs(kinds, num_programs, monkeypatch):
    """Groups of equal length share a program only if their kinds are equal, in order."""
    runner, reference = warm_runner(kinds)
    found = runner._executables.run_layers
    assert {len(group) for group in runner.storage.groups} == {len(kinds) // 2}
    assert len(found) == num_programs
    assert error_of(runner, reference) < 1e-4
    if num_programs == 1:
        return
    # The planted bug: programs by the number of layers.
    first, second = (64, runner._programs.group_kinds[0]), (64, runner._programs.group_kinds[1])
    monkeypatch.setitem(found, second, found[first])
    assert error_of(runner, reference) > 1e-3, "the reference does not see a wrong program"


@pytest.mark.long
def test_kinds_on_two_devices():
    runner, reference = warm_runner((WINDOWED, TURNED, STILL, PLAIN), num_devices=2)
    assert error_of(runner, reference) < 1e-4


def test_a_plan_has_the_tiles_of_each_window():
    """The lists are those that the kernel builds for each window, in the order of the specs."""
    model = preset("qwen3-tiny", layer_kinds=(WINDOWED, PLAIN))
    config = engine_config()
    specs = bucket_tile_specs(model, config, np.dtype("float32"), "xla", 1)
    assert {bucket: [spec.window for spec in each] for bucket, each in specs.items()} == {
        8: [None, 20],
        64: [None, 20],
    }
    tiled = [
        tile_spec(
            num_tokens=64,
            max_num_seqs=8,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=32,
            page_size=16,
            dtype=np.dtype("float32"),
            backend="pallas_triton",
        )
    ]
    tiled.append(dataclasses.replace(tiled[0], window=20))
    layout = bucket_layouts(model, config, {64: tuple(tiled)})[64]
    plan = StepPlan(layout, 0, 10**6)
    plan.num_rows[0], plan.kv_lens[:2], plan.cu_q_lens[1:] = 2, (150, 9), 20
    plan.cu_q_lens[1] = 14
    runner = ModelRunner.__new__(ModelRunner)
    runner._tile_specs = {64: tuple(tiled)}
    runner.fill_tiles(plan)
    for spec, tiles in zip(tiled, plan.tiles, strict=True):
        expected = build_tiles(spec, plan.cu_q_lens, plan.kv_lens, 2)
        np.testing.assert_array_equal(tiles, expected)
    assert (plan.tiles[0] != plan.tiles[1]).any()
