"""Compiled programs outlive the memory of a process."""

import jax
import jax.numpy as jnp
import pytest

from pensieve_jax.engine.compilation import CompilationCounter, keep_compilations_in

OPTIONS = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")


@pytest.fixture
def restored():
    """The process-wide switches as they were."""
    directory = jax.config.jax_compilation_cache_dir
    values = {name: getattr(jax.config, name) for name in OPTIONS}
    yield
    keep_compilations_in(directory)
    for name, value in values.items():
        jax.config.update(name, value)


@pytest.fixture
def hits():
    """One entry for every program that was found in the directory."""
    found: list[str] = []

    def on_event(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            found.append(event)

    jax.monitoring.register_event_listener(on_event)
    yield found
    jax.monitoring.unregister_event_listener(on_event)


def test_a_small_program_is_found_again(tmp_path, restored, hits):
    program = jax.jit(lambda x: x * 3 + 1)
    argument = jnp.arange(7)
    keep_compilations_in(str(tmp_path))
    program(argument).block_until_ready()
    files = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache"))
    assert files and not hits
    program(argument).block_until_ready()
    assert not hits  # that one was still in memory
    jax.clear_caches()
    counter = CompilationCounter()
    assert program(argument).tolist() == [1, 4, 7, 10, 13, 16, 19]
    assert len(hits) == 1
    assert counter.value == 1  # an answer of the cache counts too
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")) == files


def test_another_directory_starts_empty(tmp_path, restored):
    program, argument = jax.jit(lambda x: x * 5 + 2), jnp.arange(7)
    stored = []
    for name in ("first", "second"):
        keep_compilations_in(str(tmp_path / name))
        jax.clear_caches()
        program(argument).block_until_ready()
        stored.append({path.name for path in (tmp_path / name).iterdir() if path.name.endswith("-cache")})
    assert any("lambda" in name for name in stored[0])
    assert {name for name in stored[0] if "lambda" in name} <= stored[1]  # compiled and kept anew
