"""Launchers in this process: one tiny model for all of them, and flags that are restored afterwards."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from absl import flags

from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.commands.main import COMMANDS
from pensieve_jax.model_source import DEFAULT_MODEL
from tests.log_state import kept_log

ROOT = Path(__file__).resolve().parents[1]
TINY_MODEL = "random:llama-tiny"
NO_OPTIMIZATIONS = "jax_disable_most_optimizations"

type Launch = Callable[..., int]


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory) -> str:
    """Return the compilation cache of these tests' models, in this process and in others.

    `make mutants` names one in the environment, since each mutant takes several runs of pytest.
    """
    if folder := os.environ.get("TESTS_COMPILATION_CACHE"):
        return folder
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # shared by all workers of a run
    return str(shared / "compiled")


def tiny_config(compilation_cache: str, **cache: Any) -> EngineConfig:
    """Return the configuration of `llm`; engines of the same sizes load its compiled steps."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=24, **cache),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(compilation_cache_dir=compilation_cache),
    )


@pytest.fixture(scope="session")
def llm(compilation_cache) -> Iterator[LLM]:
    """Yield a tiny Llama with its history in memory; every test uses its own conversations."""
    with LLM(TINY_MODEL, dtype="float32", config=tiny_config(compilation_cache), progress=False) as llm:
        yield llm


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """Compile with optimization whatever `make test` sets, by XLA's older emitters.

    This is for tests that compute for longer than they compile.
    """
    before = jax.config.values[NO_OPTIMIZATIONS]
    jax.config.update(NO_OPTIMIZATIONS, False)
    try:
        yield
    finally:
        jax.config.update(NO_OPTIMIZATIONS, before)


@pytest.fixture
def launch(request, monkeypatch) -> Iterator[Launch]:
    """Run a script's `main` with flags given by name, on the shared model if it opens one by `open_llm`.

    A script that would use the default model gets a smaller one unless `model` is given.
    """
    before = set(flags.FLAGS)

    def forget() -> None:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)

    def launch(script: str, *, shared_llm: bool = True, **values: Any) -> int:
        module = load(script)
        forget()
        module.define_flags()
        if "model" in flags.FLAGS and flags.FLAGS["model"].default == DEFAULT_MODEL:
            values = {"model": TINY_MODEL} | values
        flags.FLAGS([script, *(f"--{name}={value}" for name, value in values.items())])
        if shared_llm:
            llm = request.getfixturevalue("llm")
            monkeypatch.setattr(module, "open_llm", lambda **_: contextlib.nullcontext(llm))
        status: int = module.main()
        return status

    with kept_log():
        yield launch
    forget()


def load(script: str) -> ModuleType:
    """Return a module: an installed command, a program of the laboratory, or any module by its path."""
    if "." in script:
        return importlib.import_module(script)
    if script in COMMANDS:
        return importlib.import_module(f"pensieve_jax.commands.{script}")
    return importlib.import_module(f"pensieve_lab.programs.{script}")


@pytest.fixture
def text() -> io.StringIO:
    """Return a buffer for a script's output."""
    return io.StringIO()
