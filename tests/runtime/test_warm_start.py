"""Starts in fresh processes: the second takes everything from disk, whatever else is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.start_process import Start, run_start

# These programs run a few times: compile them fast rather than well.
FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def executables(cache_dir):
    return sorted(Path(cache_dir, "executables").iterdir())


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def first(cache_dir):
    return run_start(Start(cache_dir), **FAST)


@pytest.mark.long
def test_a_second_start_compiles_nothing(cache_dir, first):
    """Nothing is traced, lowered or compiled, in a process with different hash seeds."""
    assert first.events["traced"] >= first.events["compiled"] >= len(executables(cache_dir)) > 8
    files = executables(cache_dir)
    second = run_start(Start(cache_dir, may_save=False), PYTHONHASHSEED="7", **FAST)
    assert second.events == {} and second.warnings == []
    assert second.token_ids == first.token_ids and executables(cache_dir) == files


@pytest.mark.long
def test_damaged_files_are_compiled_again(cache_dir, first):
    """Our executables are replaced; an entry of JAX's cache is recompiled at every start, with a warning."""
    cut, changed, *rest = executables(cache_dir)
    cut.write_bytes(cut.read_bytes()[:1000])
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    before = {path: path.read_bytes() for path in rest}
    entries = list(Path(cache_dir).glob("*-cache"))  # JAX's own files, as a killed process leaves them
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-20])
    third = run_start(Start(cache_dir), **FAST)
    # Groups of the same number of layers share executables: a file may be found damaged twice.
    assert 2 <= third.events["compiled"] <= 4 and third.token_ids == first.token_ids
    assert set(third.warnings) == {
        f"{path} cannot be used (it is damaged); its program will be compiled again"
        for path in (cut, changed)
    }
    assert {path: path.read_bytes() for path in rest} == before and cut.stat().st_size > 1000
