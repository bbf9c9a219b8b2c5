"""Compiled programs on disk: used if everything is the same, never otherwise, and only by their owner."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.runtime import executable_store
from pensieve_jax.runtime.compilation import (
    CompilationCounter,
    CompilationJob,
    compile_all,
    keep_compilations_in,
)
from pensieve_jax.runtime.executable_store import ExecutableStore
from pensieve_jax.runtime.program import Program


class Lowering:
    """A jitted function that records the threads of its lowerings."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self._jitted = jax.jit(function, donate_argnums=0)
        self.threads = []

    def __call__(self):
        raise AssertionError("only lowered")

    def lower(self, *arguments):
        self.threads.append(threading.current_thread())
        return self._jitted.lower(*arguments)


def shifted_product(x, pair):
    return x + pair["a"] * pair["b"]


def arguments():
    return jnp.arange(8.0), {"a": jnp.full(8, 2.0), "b": jnp.arange(8.0)}


def made(store, function=shifted_product):
    """Return the store's program, and how often it was lowered for that: always on this thread."""
    lowering, kept = Lowering(function), []
    job = CompilationJob("add", Program(lowering, arguments(), {}), kept.append)
    with mock.patch.object(sys.modules[__name__], function.__name__, lowering, create=True):
        assert list(compile_all([job], store)) == ["add"]
    assert set(lowering.threads) <= {threading.current_thread()}
    return kept[0], len(lowering.threads)


def assert_runs(program):
    x, pair = arguments()
    assert program(x, pair).tolist() == [3.0 * i for i in range(8)]
    assert x.is_deleted()


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path / "deep" / "cache"


def opened(cache_dir):
    return ExecutableStore(str(cache_dir), jax.devices()[:1])


def files(cache_dir):
    return sorted((cache_dir / "executables").iterdir())


@pytest.fixture
def only_file(cache_dir):
    """Return the file of the only program."""
    made(opened(cache_dir))
    [path] = files(cache_dir)
    return path


def test_a_second_start_lowers_and_compiles_nothing(cache_dir):
    """It gets the same program, which still donates its first argument's memory."""
    first, num_lowered = made(opened(cache_dir))
    counter = CompilationCounter()
    second, num_lowered_again = made(opened(cache_dir))
    assert (num_lowered, num_lowered_again, counter.value) == (1, 0, 0)
    assert second is not first and len(files(cache_dir)) == 1
    assert_runs(first)
    assert_runs(second)
    assert second.memory_analysis().alias_size_in_bytes == first.memory_analysis().alias_size_in_bytes > 0


def test_a_program_has_a_file_for_each_environment(cache_dir, only_file, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=nowhere")
    assert made(opened(cache_dir))[1] == 1
    assert len(files(cache_dir)) == 2
    monkeypatch.undo()
    assert made(opened(cache_dir))[1] == 0


def test_an_entry_of_jaxs_cache_is_compiled_again(cache_dir, tmp_path, monkeypatch):
    """An executable from JAX's cache could be written and loaded, but not run."""

    def program():
        def mixed(x):  # anew for JAX, and the same for its cache
            return jnp.sort(jnp.sin(x) @ jnp.outer(jnp.arange(64.0), x)) + jnp.cumsum(x)

        mixed.__qualname__ = "mixed"
        jitted = jax.jit(mixed)
        monkeypatch.setattr(sys.modules[__name__], "mixed", jitted, raising=False)
        return Program(jitted, (jax.ShapeDtypeStruct((64,), jnp.float32),), {})

    def compiled(program, store=None):
        kept = []
        list(compile_all([CompilationJob("", program, kept.append)], store))
        return kept[0]

    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    settings = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = [getattr(jax.config, name) for name in settings]
    try:
        keep_compilations_in(str(tmp_path / "jax"))
        expected = compiled(program())(jnp.ones(64)).tolist()
        hits.clear()
        same = program()
        compiled(same)
        assert "/jax/compilation_cache/cache_hits" in hits
        hits.clear()
        compiled(same, opened(cache_dir))
        assert "/jax/compilation_cache/cache_hits" not in hits
        assert jax.config.jax_enable_compilation_cache, "it was left off"
        compiled(program())
        assert "/jax/compilation_cache/cache_hits" in hits
        store = opened(cache_dir)
        assert compiled(program(), store)(jnp.ones(64)).tolist() == expected and store.num_loaded == 1
    finally:
        keep_compilations_in(before[0])
        for name, value in zip(settings, before, strict=True):
            jax.config.update(name, value)


def test_jaxs_cache_is_off_until_the_last_job_has_ended(cache_dir):
    one, other = compile_all(two_jobs(), opened(cache_dir)), compile_all(two_jobs(), opened(cache_dir))
    assert next(one) and next(other)
    one.close()
    assert not jax.config.jax_enable_compilation_cache
    other.close()
    assert jax.config.jax_enable_compilation_cache


@jax.jit
def doubled(x):
    return 2 * x


def two_jobs():
    return [CompilationJob("double", Program(doubled, (jnp.ones(4),), {}), [].append)] * 2


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "no pickle": lambda path: path.write_bytes(with_digest(b"no pickle")),
    "another pickle": lambda path: path.write_bytes(with_digest(pickle.dumps((b"payload", None, None)))),
    "an unknown class": lambda path: path.write_bytes(with_digest(b"cnowhere\nNothing\n.")),
    "a number": lambda path: path.write_bytes(with_digest(pickle.dumps(3))),
    "writable by others": lambda path: path.chmod(0o606),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".moved"))),
}


def with_digest(body):
    return hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("name", DAMAGES)
def test_an_unusable_file_is_replaced(cache_dir, only_file, name, caplog):
    DAMAGES[name](only_file)
    with caplog.at_level(logging.WARNING):
        program, num_lowered = made(opened(cache_dir))
    assert num_lowered == 1 and f"{only_file} cannot be used" in caplog.text
    assert_runs(program)
    assert made(opened(cache_dir))[1] == 0, "it was not replaced"
    assert not only_file.is_symlink() and only_file.stat().st_mode & 0o777 == 0o600


def test_an_unreadable_file_is_replaced(cache_dir, only_file, monkeypatch, caplog):
    """The test simulates the system's refusal, since root may read everything."""
    open_file = os.open

    def refuse(path, *args, **kwargs):
        if path == only_file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, *args, **kwargs)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "open", refuse)
        program, num_lowered = made(opened(cache_dir))
    assert num_lowered == 1 and f"{only_file} cannot be used" in caplog.text
    assert_runs(program)
    assert made(opened(cache_dir))[1] == 0, "it was not replaced"


def test_a_file_that_disappears_is_compiled_again(cache_dir, only_file, caplog):
    store = opened(cache_dir)
    store.holds = lambda _: True
    only_file.unlink()
    assert made(store)[1] == 1 and "cannot be used" in caplog.text


def test_two_simultaneous_starts_do_not_interfere(cache_dir, monkeypatch):
    """One begins and ends just before the other's file gets its name."""
    replace, others = os.replace, []

    def replace_late(*paths):
        if not others:
            others.append(None)
            others[0] = made(opened(cache_dir))
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_late)
    late = made(opened(cache_dir))
    starts = [late, *others, made(opened(cache_dir))]
    assert [num_lowered for _, num_lowered in starts] == [1, 1, 0] and len(files(cache_dir)) == 1
    for program, _ in starts:
        assert_runs(program)


def with_callback(x, pair):
    jax.debug.callback(print, x)
    return x + pair["a"]


def test_a_program_that_cannot_be_serialized_still_runs(cache_dir, caplog):
    program, _ = made(opened(cache_dir), with_callback)
    assert "is not stored in" in caplog.text and files(cache_dir) == []
    assert program(*arguments()).tolist() == [i + 2.0 for i in range(8)]


def test_a_program_without_a_key_still_runs(cache_dir, caplog):
    factor = 3.0
    program, _ = made(opened(cache_dir), lambda x, pair: x * factor + pair["a"])
    assert "add is not stored on disk: no key for" in caplog.text and files(cache_dir) == []
    assert program(*arguments()).tolist() == [3.0 * i + 2.0 for i in range(8)]


def test_a_full_disk_leaves_nothing_behind(cache_dir, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    assert_runs(made(opened(cache_dir))[0])
    assert "no space left" in caplog.text and files(cache_dir) == []


def test_nothing_is_loaded_or_stored_after_the_source_has_changed(cache_dir, only_file, monkeypatch, caplog):
    before = only_file.stat()
    monkeypatch.setattr(executable_store, "source_digest", lambda: "changed")
    program, num_lowered = made(opened(cache_dir))
    assert_runs(program)
    assert num_lowered == 1 and "source has changed" in caplog.text
    assert files(cache_dir) == [only_file] and only_file.stat() == before


def test_programs_that_do_not_run_are_discarded(cache_dir, only_file):
    other = only_file.with_name("other.executable")
    other.touch()
    store = opened(cache_dir)
    made(store)
    assert store.num_loaded == 1
    store.discard_used()
    assert files(cache_dir) == [other] and store.num_loaded == 0


def test_programs_that_do_not_run_are_not_loaded_again(cache_dir, only_file, monkeypatch):
    """This process skips them even if their files cannot be removed, as on a read-only file system."""

    def fail(*_, **__):
        raise OSError("read only")

    store = opened(cache_dir)
    made(store)
    monkeypatch.setattr(Path, "unlink", fail)
    store.discard_used()
    assert only_file.is_file() and made(store)[1] == 1 and store.num_loaded == 0


def aged(path, seconds, size=1):
    path.write_bytes(b"x" * size)
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_old_files_are_deleted(cache_dir, only_file, monkeypatch):
    """Used files stay, whatever their age; of others the latest stay, as many as there is room for."""
    monkeypatch.setattr(executable_store, "_MAX_UNUSED_BYTES", 250)
    directory = only_file.parent
    kept = {aged(directory / f"{i}.executable", 1000 * i, size=100) for i in (1, 2)}
    kept |= {aged(directory / "written.tmp", 60), aged(directory / "foreign", 10**6), only_file}
    for i in (3, 4):
        aged(directory / f"{i}.executable", 1000 * i, size=100)
    aged(directory / "stale.tmp", 4000)
    os.utime(only_file, (0, 0))
    store = opened(cache_dir)
    made(store)
    assert only_file.stat().st_mtime > 0, "to be used is not noted"
    store.tidy()
    assert set(files(cache_dir)) == kept


def test_directories_are_private(cache_dir):
    with loose_umask():
        opened(cache_dir)
    for path in (cache_dir, cache_dir / "executables"):
        assert path.stat().st_mode & 0o777 == 0o700


@contextlib.contextmanager
def loose_umask():
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("inner", [".", "executables"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(cache_dir, only_file, inner, mode):
    (cache_dir / inner).chmod(mode)
    for use in (opened, lambda path: keep_compilations_in(str(path))):
        with pytest.raises(ConfigError, match=r"no other user can write to.*chmod go-w") as raised:
            use(cache_dir)
        assert raised.value.field == "runner.compilation_cache_dir"
    (cache_dir / inner).chmod(0o755)
    assert made(opened(cache_dir))[1] == 0


@pytest.mark.parametrize("name", ["cache", "executables"])
def test_a_directory_of_another_user_is_refused(cache_dir, only_file, monkeypatch, name):
    """Root owns everything, so the test fakes the owner of a directory."""
    stat = Path.stat

    def of_another(path, **options):
        status = stat(path, **options)
        return os.stat_result([*status[:4], status.st_uid + 1, *status[5:]]) if path.name == name else status

    monkeypatch.setattr(Path, "stat", of_another)
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}"):
        opened(cache_dir)


def test_a_directory_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "deep").write_text("a file")
    with pytest.raises(ConfigError, match=r"compilation_cache_dir.*Not a directory"):
        opened(tmp_path / "deep" / "cache")
