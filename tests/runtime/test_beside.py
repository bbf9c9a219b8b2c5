"""Two things at once: whose items come, who fails, and what stops whom."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Generator, Iterator

import pytest

from pensieve_jax.runtime.beside import beside


def no_thread_is_left() -> bool:
    return not any(thread.name.startswith("beside") for thread in threading.enumerate())


def test_items_of_both_come_and_each_in_its_order():
    threads: dict[str, set[int]] = {"abc": set(), "xyz": set()}

    def side(items: str) -> Generator[str]:
        for item in items:
            threads[items].add(threading.get_ident())
            yield item

    came = list(beside(side("xyz"), side("abc")))
    assert sorted(came) == ["a", "b", "c", "x", "y", "z"]
    assert [item for item in came if item in "abc"] == ["a", "b", "c"]
    assert [item for item in came if item in "xyz"] == ["x", "y", "z"]
    assert threads["abc"] == {threading.get_ident()}
    assert len(threads["xyz"]) == 1 and threads["xyz"].isdisjoint(threads["abc"])


def test_they_run_at_once():
    """Neither could go on by itself."""
    first, second = threading.Event(), threading.Event()

    def other() -> Iterator[str]:
        first.set()
        assert second.wait(60)
        yield "x"

    def here() -> Generator[str]:
        assert first.wait(60)
        second.set()
        yield "a"

    assert set(beside(other(), here())) == {"a", "x"}


@pytest.mark.parametrize(("other", "here"), [("", ""), ("xyz", ""), ("", "abc")])
def test_one_of_them_may_have_nothing(other, here):
    assert "".join(beside(iter(other), (item for item in here))) == other + here


def test_what_the_thread_raises_is_raised_and_the_caller_stops():
    """By itself the caller would go on for a minute."""
    was_closed = []

    def other() -> Iterator[str]:
        yield "x"
        raise MemoryError("no more of it")

    def here() -> Generator[str]:
        try:
            for _ in range(6_000):
                yield "a"
                time.sleep(0.01)
            pytest.fail("nobody stopped it")
        finally:
            was_closed.append(True)

    with pytest.raises(MemoryError, match="no more of it"):
        list(beside(other(), here()))
    assert was_closed
    assert no_thread_is_left()


@pytest.mark.parametrize("num_items", [0, 3])
def test_what_was_raised_keeps_nothing_once_it_is_handled(num_items):
    """Frames in its traceback have a model and its memory, of which the next try may need all at once."""

    class Memory:
        pass

    taken = []

    def other() -> Iterator[str]:
        memory = Memory()
        taken.append(weakref.ref(memory))
        yield "x"
        raise MemoryError("no more of it")

    gc.disable()
    try:
        with contextlib.suppress(MemoryError):
            list(beside(other(), (item for item in "abc"[:num_items])))
        assert taken[0]() is None
    finally:
        gc.enable()


def test_what_it_raises_after_the_caller_has_ended_is_raised():
    ended = threading.Event()

    def other() -> Iterator[str]:
        assert ended.wait(60)
        raise MemoryError("late")
        yield "x"

    def here() -> Generator[str]:
        yield "a"
        ended.set()

    with pytest.raises(MemoryError, match="late"):
        list(beside(other(), here()))


def test_closed_it_closes_the_caller_and_the_thread_stops_at_its_next_item():
    made, has_one, may_go_on = [], threading.Event(), threading.Event()

    def other() -> Iterator[str]:
        for item in "xyz":
            made.append(item)
            yield item
            has_one.set()
            assert may_go_on.wait(60)

    def here() -> Generator[str]:
        try:
            assert has_one.wait(60)
            yield "a"
        finally:
            may_go_on.set()

    both = beside(other(), here())
    next(both)
    both.close()
    assert made == ["x", "y"]
    assert no_thread_is_left()


def test_what_the_caller_raises_is_raised_and_the_thread_stops():
    may_go_on = threading.Event()

    def other() -> Iterator[str]:
        yield "x"
        assert may_go_on.wait(60)

    def here() -> Generator[str]:
        yield "a"
        may_go_on.set()
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        list(beside(other(), here()))
    assert no_thread_is_left()
