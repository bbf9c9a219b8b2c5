"""Sums that devices make themselves, in whole steps: the same tokens, and what is done when one is lost."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from model_defs import device_sums, load_model, make_mesh
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.device import exchange, sampler
from pensieve_jax.device.model_runner import ModelRunner
from tests.collectives import collectives
from tests.device.test_model_runner import (
    Row,
    Stepper,
    Talk,
    assert_equals_reference,
    engine_config,
    random_ids,
)


def config_of(num_devices=2):
    """One bucket, so that little is compiled."""
    config = engine_config(num_devices)
    return dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, all_reduce="jax_triton"),
        scheduler=dataclasses.replace(config.scheduler, token_buckets=(64,)),
    )


@functools.cache
def model_on_two(preset):
    return load_model(f"random:{preset}", dtype="float32", mesh=make_mesh(2), seed=1)


@pytest.fixture
def by_psum(monkeypatch):
    """The kernel's place is taken by `psum`, which runs on any device; all else is as with it."""
    monkeypatch.setattr(exchange, "device_limit", lambda device: None)
    monkeypatch.setattr(exchange, "SumSpec", lambda backend, capacity: device_sums.SumSpec("xla", capacity))
    modes = sampler.all_modes()[:1]
    monkeypatch.setattr(sampler, "all_modes", lambda: modes)


class WideStepper(Stepper):
    """Of one bucket."""

    buckets = (64,)


def check_a_talk(preset, runner):
    """A prompt in pieces and decoding, greedy, as the dense reference says."""
    runner.reset()
    stepper, talk = WideStepper(runner), Talk(random_ids(30, seed=12), pages=[3, 6, 8])
    stepper.step(Row(talk, 0, 20))
    stepper.step(Row(talk, 20, 30, samples=True))
    for _ in range(4):
        stepper.step(Row(talk, len(talk.ids) - 1, len(talk.ids), samples=True))
    assert_equals_reference(preset, talk)


@pytest.mark.parametrize("preset", ["llama-tiny", pytest.param("opt-tiny", marks=pytest.mark.long)])
def test_tokens_are_the_references(by_psum, preset):
    """With a norm behind a sum (Llama) or a bias (OPT); a lost device fails the step, and no other one."""
    runner = ModelRunner(model_on_two(preset), config_of(), make_mesh(2))
    alone = runner._exchange.arrays[0].tolist()
    runner.warm_up()
    assert runner._exchange.arrays[0].tolist() != alone, "devices would not wait for each other"
    check_a_talk(preset, runner)
    for (_, group), executable in runner._forward.items():
        num_sums = 2 * len(runner.storage.groups[group]) + (group == 0)
        assert collectives(executable.as_text()) == {"all-reduce": num_sums}
    before = runner._exchange.arrays[1]
    runner._exchange._memory.words = before.at[1, 0].set(1)
    stepper, talk = WideStepper(runner), Talk(random_ids(9, seed=2), pages=[1])
    runner._next_step_id = None
    with pytest.raises(StepFailedError, match="waited in vain"):
        stepper.step(Row(talk, 0, 9, samples=True))
    check_a_talk(preset, runner)
    assert not runner._exchange.arrays[1].any() and runner._exchange.arrays[1] is not before


def test_devices_that_cannot_are_refused():
    with pytest.raises(
        ConfigError, match=r"runner\.all_reduce is 'jax_triton', but must be 'xla' here.*NVIDIA"
    ):
        ModelRunner(model_on_two("llama-tiny"), config_of(), make_mesh(2))


def test_one_device_has_nothing_to_sum():
    model = load_model("random:llama-tiny", dtype="float32", mesh=make_mesh(1), seed=1)
    assert ModelRunner(model, config_of(1), make_mesh(1))._exchange.arrays == ()
