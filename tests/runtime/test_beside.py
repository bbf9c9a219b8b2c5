"""Two things at once: whose items come, who fails, and what stops whom."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

import pytest

from pensieve_jax.runtime.beside import beside


class Caller:
    """Items of the caller's side, in its own thread."""

    def __init__(self, *items: str, before: dict[str, threading.Event] | None = None) -> None:
        """Wait for an event `before` some items."""
        self.items, self.before = items, before or {}
        self.threads: set[int] = set()
        self.was_closed = False

    def __call__(self) -> Generator[str]:
        """What is iterated."""
        try:
            for item in self.items:
                if item in self.before:
                    assert self.before[item].wait(60)
                self.threads.add(threading.get_ident())
                yield item
        finally:
            self.was_closed = True


def no_thread_is_left() -> bool:
    return not any(thread.name.startswith("beside") for thread in threading.enumerate())


def test_items_of_both_come_and_each_in_its_order():
    caller, threads = Caller("a", "b", "c"), set()

    def other() -> Iterator[str]:
        for item in "xyz":
            threads.add(threading.get_ident())
            yield item

    came = list(beside(other(), caller()))
    assert sorted(came) == ["a", "b", "c", "x", "y", "z"]
    assert [item for item in came if item in "abc"] == ["a", "b", "c"]
    assert [item for item in came if item in "xyz"] == ["x", "y", "z"]
    assert (
        caller.threads == {threading.get_ident()} and len(threads) == 1 and threads.isdisjoint(caller.threads)
    )


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
    failed = threading.Event()
    caller = Caller("a", "b", "c", before={"b": failed})

    def other() -> Iterator[str]:
        yield "x"
        try:
            raise MemoryError("no more of it")
        finally:
            failed.set()

    with pytest.raises(MemoryError, match="no more of it"):
        list(beside(other(), caller()))
    assert caller.was_closed
    assert no_thread_is_left()


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
    made, may_go_on = [], threading.Event()

    def other() -> Iterator[str]:
        for item in "xyz":
            made.append(item)
            yield item
            assert may_go_on.wait(60)

    def here() -> Generator[str]:
        try:
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
