"""Compiled programs on disk: used where all is the same, and never where anything is not."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from pensieve_jax.engine import executable_store
from pensieve_jax.engine.compilation import CompilationCounter, CompilationJob, compile_all
from pensieve_jax.engine.executable_store import ExecutableStore


@functools.partial(jax.jit, donate_argnums=0)
def add(x, pair):
    return x + pair["a"] * pair["b"]


def arguments():
    return jnp.arange(8.0), {"a": jnp.full(8, 2.0), "b": jnp.arange(8.0)}


def made(store, key="key"):
    """The program by way of the store, and whether it was lowered for that."""
    lowered, kept = [], []

    def lower():
        lowered.append(key)
        return add.lower(*arguments())

    assert list(compile_all([CompilationJob("add", key, lower, kept.append)], store)) == ["add"]
    return kept[0], bool(lowered)


@pytest.fixture
def store(tmp_path):
    return ExecutableStore(tmp_path / "deep" / "store", jax.devices()[:1])


def files(tmp_path):
    return list((tmp_path / "deep" / "store").iterdir())


def test_a_second_start_lowers_and_compiles_nothing(store, tmp_path):
    """And gets the same program, which still takes its first argument's memory."""
    first, was_lowered = made(store)
    counter = CompilationCounter()
    second, was_lowered_again = made(ExecutableStore(tmp_path / "deep" / "store", jax.devices()[:1]))
    assert was_lowered and not was_lowered_again and counter.value == 0
    assert second is not first and len(files(tmp_path)) == 1
    x, pair = arguments()
    assert second(x, pair).tolist() == first(*arguments()).tolist() == [3.0 * i for i in range(8)]
    assert x.is_deleted()
    assert second.memory_analysis().alias_size_in_bytes == first.memory_analysis().alias_size_in_bytes > 0


def test_keys_and_surroundings_tell_programs_apart(store, tmp_path, monkeypatch):
    made(store)
    assert store.holds("key") and not store.holds("another")
    again = functools.partial(ExecutableStore, tmp_path / "deep" / "store")
    assert again(jax.devices()[:1]).holds("key") and not again(jax.devices()[1:2]).holds("key")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=nowhere")
    assert not again(jax.devices()[:1]).holds("key")
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        assert not again(jax.devices()[:1]).holds("key")
    assert again(jax.devices()[:1]).holds("key")
    monkeypatch.setattr(executable_store, "_source_digest", lambda: "changed")
    assert not again(jax.devices()[:1]).holds("key")


def test_any_changed_source_changes_the_digest(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/code.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executable_store, "_PACKAGES", ("some_package",))
    before = executable_store._source_digest()
    assert executable_store._source_digest() == before
    (package / "inner" / "code.py").write_text("x = 2\n")
    assert executable_store._source_digest() != before


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-5], lambda content: b"", lambda content: b"x" * 99]
)
def test_a_damaged_file_is_made_anew(store, tmp_path, damage, caplog):
    made(store)
    [path] = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        program, was_lowered = made(store)
    assert was_lowered and "is damaged" in caplog.text and str(path) in caplog.text
    assert program(*arguments()).tolist() == [3.0 * i for i in range(8)]
    assert not made(store)[1], "it was not replaced"


def test_what_cannot_be_saved_is_still_run(tmp_path, caplog):
    (tmp_path / "deep").write_text("a file")
    with caplog.at_level(logging.WARNING):
        program, _ = made(ExecutableStore(tmp_path / "deep" / "store", jax.devices()[:1]))
    assert "is not kept in" in caplog.text
    assert program(*arguments()).tolist() == [3.0 * i for i in range(8)]
