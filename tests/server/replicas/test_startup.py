"""Progress messages while replicas start."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest

from pensieve_jax.server.replicas import startup
from pensieve_jax.server.replicas.startup import AppStatus, StartReport, problem_in_words, reporting_start
from tests.deadlines import TIMEOUT_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def report(num_replicas):
    clock, lines = Clock(), []
    return StartReport(num_replicas, lines.append, clock), clock, lines


def test_each_ready_replica_is_reported_once():
    found, clock, lines = report(3)
    found.update(AppStatus(0, is_front_ready=False))
    assert lines == []
    clock.now_s += 7
    found.update(AppStatus(2, is_front_ready=False))
    clock.now_s += 1
    found.update(AppStatus(2, is_front_ready=True))
    found.update(AppStatus(3, is_front_ready=True))
    assert lines == [
        "replica 1 of 3 is ready, after 7 s",
        "replica 2 of 3 is ready, after 7 s",
        "replica 3 of 3 is ready, after 8 s",
    ]


def test_silence_is_broken_by_a_line_about_what_is_missing():
    found, clock, lines = report(2)
    for num_ready, is_front_ready in ((0, False), (1, False), (2, False), (2, True)):
        found.update(AppStatus(num_ready, is_front_ready))
        clock.now_s += startup.SILENCE_S
        found.update(AppStatus(num_ready, is_front_ready))
        found.update(AppStatus(num_ready, is_front_ready))
    assert [line for line in lines if line.startswith("waiting")] == [
        "waiting for replicas 1 to 2 of 2, which load the model or compile, 15 s so far",
        "waiting for replica 2 of 2, which loads the model or compiles, 30 s so far",
        "waiting for the front end, 45 s so far",
        "waiting for Serve, 60 s so far",
    ]


def test_a_line_of_news_restarts_the_silence():
    found, clock, lines = report(2)
    clock.now_s += startup.SILENCE_S
    found.update(AppStatus(1, is_front_ready=False))
    assert lines == ["replica 1 of 2 is ready, after 15 s"]


def test_a_problem_is_reported_once_and_so_is_a_dead_replica():
    found, _, lines = report(2)
    found.update(AppStatus(0, is_front_ready=False, problem="no such model"))
    found.update(AppStatus(1, is_front_ready=False, problem="no such model"))
    for left in (10, 9):
        found.update(AppStatus(1, is_front_ready=False, problem=f"no disk; {left} more tries"))
    found.update(AppStatus(0, is_front_ready=False, problem="no memory"))
    assert lines == [
        "no such model",
        "replica 1 of 2 is ready, after 0 s",
        "no disk; 10 more tries",
        "no memory",
        "a replica was lost: 0 of 2 are ready",
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("", ""),
        ("It has 2 replicas that wait.\nThis may be caused by a slow __init__ or reconfigure method.", ""),
        ("no GPU is free", "EngineReplica: no GPU is free"),
        (
            "A replica failed. Error:\n\n  File here, line 1\nConfigError: --model is ...\n",
            "EngineReplica: A replica failed. Error: ConfigError: --model is ...",
        ),
    ],
)
def test_serves_message_becomes_one_line(message, words):
    assert problem_in_words("EngineReplica", message) == words


def test_a_thread_reports_during_the_block_and_the_end_follows_after_it(monkeypatch):
    monkeypatch.setattr(startup, "POLL_S", 0.0)
    found, _, lines = report(2)
    has_told = threading.Event()
    seen = [None, AppStatus(1, is_front_ready=False)]

    def look():
        if len(seen) > 1:
            return seen.pop(0)
        has_told.set()
        return seen[0]

    with reporting_start(found, look):
        assert has_told.wait(TIMEOUT_S)
        seen[0] = AppStatus(2, is_front_ready=True)
    assert lines == ["replica 1 of 2 is ready, after 0 s", "replica 2 of 2 is ready, after 0 s"]
    assert not [thread for thread in threading.enumerate() if thread.name == "replica-status"]


def test_failed_polls_are_logged_once_and_end_neither_the_reports_nor_the_start(monkeypatch, caplog):
    for name in ("pensieve_jax", "pensieve_jax.server"):  # an earlier test may have redirected these loggers
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    monkeypatch.setattr(startup, "POLL_S", 0.0)
    found, _, lines = report(2)
    has_told = threading.Event()
    num_looks = itertools.count()

    def look():
        if next(num_looks) < 3:
            raise RuntimeError("no such state")
        has_told.set()
        return AppStatus(1, is_front_ready=False)

    with reporting_start(found, look):
        assert has_told.wait(TIMEOUT_S)
    assert lines == ["replica 1 of 2 is ready, after 0 s"]
    assert [record.getMessage() for record in caplog.records if "no such state" in record.getMessage()] == [
        "the status of the replicas is unknown: RuntimeError('no such state')"
    ]


def test_a_failed_last_poll_does_not_fail_a_successful_start(monkeypatch):
    monkeypatch.setattr(startup, "POLL_S", 60.0)
    found, _, lines = report(2)

    def look():
        raise RuntimeError("no such state")

    with reporting_start(found, look):
        pass
    assert lines == []


def test_an_interrupted_block_reports_nothing_more():
    found, _, lines = report(2)
    with pytest.raises(KeyboardInterrupt), reporting_start(found, lambda: AppStatus(2, is_front_ready=True)):
        raise KeyboardInterrupt
    assert lines == []
