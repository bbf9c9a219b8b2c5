"""Fixtures that server tests share: one server with the packaged model, and clients that start fast."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpcore2
import pytest

from pensieve_jax import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_lab.serving.served import ServedProcess

# Every server and engine with this model uses these sizes, so the steps compile once.
SIZES = ("--model=chat", "--gpu_pages=256", "--cpu_pages=64", "--max_num_running=8", "--token_buckets=8,64")


def engine_config(compilation_cache: str) -> EngineConfig:
    """Return the configuration of `SIZES` for an engine in this process; it reuses what servers compiled."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=256, cpu_pages=64),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=64, token_buckets=(8, 64)),
        runner=RunnerConfig(compilation_cache_dir=compilation_cache),
    )


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Skip loading the CA certificates: it takes 50 ms for each of hundreds of clients. None uses TLS."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        once = functools.cache(httpcore2.default_ssl_context)
        monkeypatch.setattr(httpcore2, "default_ssl_context", once)
        yield


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[ServedProcess]:
    """Start `pensieve serve` without keys, in float32 on a CPU; every test uses its own conversations."""
    history = tmp_path_factory.mktemp("served") / "chats.sqlite"
    flags = [*SIZES, f"--history={history}", f"--compilation_cache_dir={compilation_cache}"]
    with ServedProcess(flags) as served:
        yield served
