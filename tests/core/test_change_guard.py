"""One change at a time, complete or recovered, despite interrupts and threads at every line of the guard."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType

import pytest

from pensieve_jax.core import change_guard
from pensieve_jax.core.change_guard import ChangeGuard
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.turn_node import root_of
from tests.deadlines import TIMEOUT_S
from tests.interruption import Interruption

_TOOL = 4


class Result:
    """The result of a change."""


class GuardedObject:
    """A guarded object that is inconsistent while it changes."""

    def __init__(self) -> None:
        self.is_half = False
        self.num_changes = self.num_recoveries = 0
        self.guard = ChangeGuard(self.recover)

    def recover(self) -> None:
        root_of("a line to be interrupted at")
        self.is_half = False
        self.num_recoveries += 1

    def change(self) -> Result:
        assert not self.is_half, "an interrupted change was not repaired, or two run at a time"
        self.is_half = True
        root_of("a line to be interrupted at")
        self.is_half = False
        self.num_changes += 1
        return Result()

    def refuse(self) -> None:
        raise PensieveError("refused")


class Meanwhile:
    """Calls a function in another thread before a line of the guard, counted from 1 as they run."""

    def __init__(self, at: int, call: Callable[[], None]) -> None:
        self.num_lines = 0
        self._at, self._call, self._thread = at, call, threading.get_ident()

    def __enter__(self) -> Meanwhile:
        sys.monitoring.use_tool_id(_TOOL, "another thread")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._on_line)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)
        return self

    def __exit__(self, *_: object) -> None:
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.NO_EVENTS)
        sys.monitoring.free_tool_id(_TOOL)

    def _on_line(self, code: CodeType, line: int) -> None:
        if code.co_filename != change_guard.__file__ or threading.get_ident() != self._thread:
            return
        self.num_lines += 1
        if self.num_lines == self._at:
            other = threading.Thread(target=self._call)
            other.start()
            other.join()


@pytest.mark.parametrize("begins", ["whole", "cut", "refused"])
def test_another_thread_between_any_two_lines_is_served_or_refused(begins: str) -> None:
    at, num_served, num_refused = 0, 0, 0
    while True:
        at += 1
        guarded, outcomes = GuardedObject(), []
        begin(guarded, begins)

        def call(guarded: GuardedObject = guarded, outcomes: list[str] = outcomes) -> None:
            try:
                guarded.guard.run(guarded.change)
                outcomes.append("served")
            except PensieveError as error:
                outcomes.append(str(error))

        with Meanwhile(at, call) as meanwhile:
            try:
                guarded.guard.run(guarded.change)
                num_own = 1
            except PensieveError:
                num_own = 0
        if meanwhile.num_lines < at:
            break
        assert outcomes == ["served"] or "Another thread" in outcomes[0], outcomes
        num_served += outcomes == ["served"]
        num_refused += outcomes != ["served"]
        assert num_own or outcomes == ["served"], "one of the two is served"
        guarded.guard.run(guarded.change)
        assert guarded.num_changes == num_own + (outcomes == ["served"]) + 1
        assert guarded.num_recoveries == (begins == "cut"), "what no interrupt came into is whole"
    assert num_served and num_refused


class Race:
    """Stops each of two threads once, before a line of the guard counted from 1 as that thread runs it.

    The second thread starts where the first one stops. The first continues when the second has stopped or
    ended, and the second when the first is in its change or has ended.
    """

    def __init__(self, at: int, other_at: int, call: Callable[[], None]) -> None:
        self.num_lines = self.num_other_lines = 0
        self._at, self._other_at, self._thread = at, other_at, threading.get_ident()
        self._stopped, self._goes_on = threading.Event(), threading.Event()
        self._call = call
        self._other = threading.Thread(target=self._run)

    def let_the_other_go_on(self) -> None:
        self._goes_on.set()
        if self._other.ident is not None:
            self._other.join(TIMEOUT_S)
            assert not self._other.is_alive()

    def __enter__(self) -> Race:
        sys.monitoring.use_tool_id(_TOOL, "a race")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._on_line)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_the_other_go_on()
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.NO_EVENTS)
        sys.monitoring.free_tool_id(_TOOL)

    def _run(self) -> None:
        try:
            self._call()
        finally:
            self._stopped.set()

    def _on_line(self, code: CodeType, line: int) -> None:
        if code.co_filename != change_guard.__file__:
            return
        if threading.get_ident() == self._thread:
            self.num_lines += 1
            if self.num_lines == self._at:
                self._other.start()
                assert self._stopped.wait(TIMEOUT_S)
        elif threading.get_ident() == self._other.ident:
            self.num_other_lines += 1
            if self.num_other_lines == self._other_at:
                self._stopped.set()
                assert self._goes_on.wait(TIMEOUT_S)


def race_of(begins: str, at: int, other_at: int) -> tuple[dict[str, bool], Race]:
    """Return which of both calls are served; each of those is alone in its change."""
    guarded, served = GuardedObject(), {}
    begin(guarded, begins)
    num_inside, most_inside = 0, 0

    def change(waits: Callable[[], None]) -> None:
        nonlocal num_inside, most_inside
        num_inside += 1
        most_inside = max(most_inside, num_inside)
        waits()
        guarded.change()
        num_inside -= 1

    def call(name: str, waits: Callable[[], None]) -> None:
        try:
            guarded.guard.run(lambda: change(waits))
            served[name] = True
        except PensieveError as error:
            assert "Another thread" in str(error)
            served[name] = False

    with Race(at, other_at, lambda: call("second", lambda: None)) as race:
        call("first", race.let_the_other_go_on)
    assert most_inside == 1, "two change at a time"
    assert guarded.num_changes == sum(served.values()) and not guarded.guard.interrupted
    guarded.guard.run(guarded.change)
    return served, race


@pytest.mark.parametrize("begins", ["whole", "cut", "refused"])
def test_one_of_two_racing_threads_is_refused(begins: str) -> None:
    """Each stops once, before any line; if both are in a call, one of them changes nothing."""
    at, seen = 0, set()
    while True:
        at, other_at = at + 1, 0
        while True:
            other_at += 1
            served, race = race_of(begins, at, other_at)
            if race.num_lines < at or race.num_other_lines < other_at:
                break
            seen.add((served["first"], served["second"]))
        if race.num_lines < at:
            break
    assert seen == {(True, False), (False, True)}


def begin(guarded: GuardedObject, how: str) -> None:
    guarded.guard.run(guarded.change)
    guarded.num_changes = 0
    if how == "refused":
        with pytest.raises(PensieveError, match="refused"):
            guarded.guard.run(guarded.refuse)
    if how == "cut":
        interrupt_a_change(guarded)


def interrupt_a_change(guarded: GuardedObject) -> None:
    def change() -> None:
        guarded.is_half = True
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded.guard.run(change)


@pytest.mark.parametrize("begins", ["whole", "cut", "refused"])
@pytest.mark.parametrize("gap", [0, 1, 2, 3, 5, 8, 13])
def test_interrupts_between_any_two_lines_are_recovered_from(begins: str, gap: int) -> None:
    """Two come, `gap` lines apart, and their tracebacks are kept; `GuardedObject.change` checks the state."""
    at = 0
    while True:
        at += 1
        guarded, kept = GuardedObject(), []
        begin(guarded, begins)
        with Interruption(at, at + gap) as interruption:
            for _ in range(2):
                try:
                    guarded.guard.run(guarded.change)
                except KeyboardInterrupt as error:
                    kept.append(error)
        assert guarded.guard.run(guarded.change) is not None
        assert not guarded.guard.interrupted and not guarded.is_half
        if begins == "cut":
            assert guarded.num_recoveries
        if not interruption.come:
            break


def test_an_interrupted_check_has_no_effect() -> None:
    at = 0
    while True:
        at += 1
        guarded = GuardedObject()
        begin(guarded, "whole")
        with Interruption(at) as interruption, contextlib.suppress(KeyboardInterrupt):
            guarded.guard.check()
        guarded.guard.run(guarded.change)
        assert not guarded.num_recoveries
        if not interruption.come:
            break


def test_a_failed_recovery_is_tried_again() -> None:
    guarded = GuardedObject()
    interrupt_a_change(guarded)
    recover, calls = guarded.guard._recover, []

    def fail() -> None:
        calls.append(None)
        if len(calls) < 3:
            raise PensieveError("not yet")
        recover()

    guarded.guard._recover = fail
    for _ in range(2):
        with pytest.raises(PensieveError, match="not yet"):
            guarded.guard.run(guarded.change)
        assert guarded.guard.interrupted
    guarded.guard.run(guarded.change)
    assert guarded.num_recoveries == 1 and not guarded.guard.interrupted


def test_an_observer_cannot_start_a_change() -> None:
    guarded = GuardedObject()
    with pytest.raises(PensieveError, match="observer"):
        guarded.guard.run(lambda: guarded.guard.run(guarded.change))
    with pytest.raises(PensieveError, match="observer"):
        guarded.guard.run(guarded.guard.check_thread)
    guarded.guard.run(guarded.change)
    assert not guarded.num_recoveries


def test_an_ended_call_is_not_referenced() -> None:
    """Neither are its arguments; a kept traceback does not change that for later calls."""
    guarded, given = GuardedObject(), []

    def call() -> None:
        argument = Result()
        given.append(weakref.ref(argument))
        guarded.guard.run(lambda: argument)

    gc.disable()
    try:
        for _ in range(3):
            call()
        assert [one() is None for one in given] == [True, True, True]
        try:
            guarded.guard.run(raise_interrupt)
        except KeyboardInterrupt as error:
            kept = error
        for _ in range(3):
            call()
        assert [one() is None for one in given] == [True] * 6
        assert kept.__traceback__ is not None
    finally:
        gc.enable()


def raise_interrupt() -> None:
    raise KeyboardInterrupt
