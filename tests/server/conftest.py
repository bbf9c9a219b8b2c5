"""One server with the model in the package for tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving.served import ServedProcess

from pensieve_jax import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig

# Of every server and engine with this model, so that one of them compiles for all.
SIZES = ("--model=chat", "--gpu_pages=256", "--cpu_pages=64", "--max_num_running=8", "--token_buckets=8,64")


def engine_config(compilation_cache: str) -> EngineConfig:
    """What `SIZES` say, for an engine in this process that finds what servers compiled."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=256, cpu_pages=64),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=64, token_buckets=(8, 64)),
        runner=RunnerConfig(compilation_cache_dir=compilation_cache),
    )


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[ServedProcess]:
    """`pensieve serve` without keys, float32 on a CPU; every test has conversations of its own."""
    history = tmp_path_factory.mktemp("served") / "chats.sqlite"
    flags = [*SIZES, f"--history={history}", f"--compilation_cache_dir={compilation_cache}"]
    with ServedProcess(flags) as served:
        yield served
