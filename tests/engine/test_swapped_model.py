"""A real model whose pages move to host memory in the middle of a sequence, and return to other pages."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from model_defs import make_mesh
from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.model_runner import ModelRunner
from tests.device.poison import poisoned_pools
from tests.device.test_model_runner import Row, Stepper, Talk, _model, engine_config, random_ids
from tests.seeds import enough


@functools.cache
def warm_runner(num_devices, stored):
    """Return a runner with a KV cache in float32 or 8 bits, or in bfloat16, packed during copies."""
    is_packed = stored == "packed"
    kv_dtype = None if is_packed else stored
    config = engine_config(num_devices, cpu_pages=8, kv_dtype=kv_dtype)
    model = _model("llama-tiny", num_devices, "bfloat16" if is_packed else "float32")
    runner = ModelRunner(model, config, make_mesh(num_devices))
    runner.warm_up()
    assert (runner.storage.packing is not None) == is_packed
    return runner


def fill_with_nan(runner):
    runner.device_pools.replace(poisoned_pools(runner.storage))


@pytest.mark.long  # short tests: `test_real_models`, and `test_packed_engine` for packed copies
@pytest.mark.parametrize("is_expedited", [False, True])
@pytest.mark.parametrize(
    ("num_devices", "stored"),
    [
        *((2, stored) for stored in ("packed", "int8", None)[: enough(2, 3)]),
        *((1, stored) for stored in ("packed", "int8", None)),
    ],
)
def test_a_model_continues_as_if_nothing_had_moved(num_devices, stored, is_expedited):
    """All pages leave, the pools are overwritten, other pages take the content: results are bit-identical."""
    runner = warm_runner(num_devices, stored)
    results = [
        decode_after(runner, leave)
        for leave in (None, functools.partial(leave_and_return, is_expedited=is_expedited))
    ]
    for plain, swapped in zip(*results, strict=True):
        assert plain.prompt is None and swapped.prompt is None
        for one, other in zip(plain[:4], swapped[:4], strict=True):
            np.testing.assert_array_equal(one[:1], other[:1])  # the other rows are padding


def decode_after(runner, leave):
    """Return the results of a prompt's step and of six more; a callback in between moves the pages."""
    runner.reset()
    fill_with_nan(runner)
    stepper, talk = Stepper(runner), Talk(random_ids(60, seed=2), pages=[4, 9, 2, 7])
    results = [stepper.step(Row(talk, 0, 60, samples=True), logprobs=True)]
    num_before = runner.num_compilations
    if leave is not None:
        leave(runner, talk)
    talk.pages = [*talk.pages, 20]
    for length in range(61, 67):
        results.append(stepper.step(Row(talk, length - 1, length, samples=True), logprobs=True))
    assert runner.num_compilations == num_before
    return results


def leave_and_return(runner, talk, *, is_expedited):
    """Copy all pages to host memory, and back to other pages of empty pools."""
    ids, transfers = itertools.count(), runner.transfers
    transfers.swap_out([ChunkCopy(next(ids), page, slot) for slot, page in enumerate(talk.pages, start=1)])
    complete(transfers, 4)
    fill_with_nan(runner)
    talk.pages = [12, 4, 15, 1]
    back = [ChunkCopy(next(ids), page, slot) for slot, page in enumerate(talk.pages, start=1)]
    transfers.swap_in(back)
    if is_expedited:
        transfers.expedite([copy.copy_id for copy in back])
    else:
        complete(transfers, 4)


def complete(transfers, num_copies):
    while num_copies:
        transfers.wait()
        num_copies -= len(transfers.completed().arrived)
