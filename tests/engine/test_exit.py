"""A process may exit while steps are running that no caller waits for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.seeds import enough

CHILD = """
import numpy

from pensieve_jax import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.assembly import make_runner
from pensieve_jax.decoding.device.sampler import all_modes

runner, _ = make_runner(
    "random:llama-tiny",
    "float32",
    EngineConfig(
        cache=CacheConfig(gpu_pages=40),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=1024, token_buckets=(1024,)),
        runner=RunnerConfig(num_layer_groups=1),
    ),
    progress=False,
)
[layout] = runner.layouts.values()

for _ in range(20):  # the device may be ahead of a thread that does not run for a while
    for _ in range(30):
        handle = runner._launch(runner._empty_plan(layout), all_modes()[0])
        runner.choose(handle, None)
    if not handle.words.is_ready():
        break
assert not handle.words.is_ready() and runner._last_words.pop() is handle.words


class Words:
    def __array__(self, *args, **kwargs):
        print("waited for")
        return numpy.zeros(1)


class End:
    def __del__(self, words=handle.words):
        words.block_until_ready()  # what is torn down after Python has begun to end gives threads that time


runner._last_words.append(Words())
end = End()
print("dispatched")
"""


PACKED = """
from pensieve_jax import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.assembly import make_runner

runner, _ = make_runner(
    "random:llama-tiny",
    "bfloat16",
    EngineConfig(
        cache=CacheConfig(gpu_pages=40, cpu_pages=40, pack_host=True),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(num_layer_groups=1, max_num_staged_pages=16),
    ),
    progress=False,
)
gathered = []
for _ in range(60):
    gathered.append(runner.transfers._copies.gather(range(1, 17)))
print("dispatched")
"""


@pytest.mark.long
def test_unfinished_packed_copies_do_not_crash_the_exit():
    """The flags that tell whether the chunks are complete are in flight when the process exits."""
    for _ in range(enough(2, 5)):  # without the safeguard two of three runs aborted
        child = subprocess.run(
            [sys.executable, "-c", PACKED], capture_output=True, text=True, timeout=300, check=False
        )
        assert (child.returncode, child.stdout.splitlines()) == (0, ["dispatched"]), child.stderr


@pytest.mark.long
def test_unfetched_steps_do_not_crash_the_exit():
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, check=False
    )
    assert (child.returncode, child.stdout.splitlines()) == (0, ["dispatched", "waited for"]), child.stderr
