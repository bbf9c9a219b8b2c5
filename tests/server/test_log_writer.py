"""The queue of the log: it never waits for a reader, keeps order, and counts what it drops."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from pensieve_jax.server.log_writer import LogWriter
from tests.deadlines import TIMEOUT_S
from tests.launching import ROOT

# Logs so much that a pipe and the queue are full, answers a signal meanwhile, and ends.
UNREAD = """
import asyncio, os, signal, sys
from pensieve_jax.server.logs import LOGGER, log_to, num_dropped_lines
from pensieve_jax.server.main import EXIT_AT_ONCE, leave

async def work():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    for number in range(30_000):
        LOGGER.info("line %d %s", number, "x" * 100)
    print("logged", num_dropped_lines(), flush=True)
    await told.wait()
    print("told", flush=True)

log_to()
asyncio.run(work())
if sys.argv[1] == "at_once":
    leave(EXIT_AT_ONCE)
"""
NORMAL = """
from pensieve_jax.server.logs import LOGGER, log_to
log_to()
for number in range(5_000):
    LOGGER.info("line %d", number)
"""


@pytest.fixture
def pipe():
    """Yield both ends of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 0, text, (), None)


def read_lines(descriptor: int, num_bytes: int) -> list[str]:
    data = b""
    while len(data) < num_bytes:
        data += os.read(descriptor, num_bytes - len(data))
    return data.decode().splitlines()


def filled(end: int) -> int:
    """Write to a pipe until it is full; return the number of bytes."""
    num_bytes = 0
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += os.write(end, b"." * 4096)
    os.set_blocking(end, True)
    return num_bytes


def test_a_full_queue_drops_counts_and_reports_when_it_goes_on(pipe) -> None:
    reader, end = pipe
    num_bytes = filled(end)  # otherwise the thread might make room between two lines
    writer = LogWriter(end, max_queued_bytes=1000)
    line = "x" * 99
    for _ in range(17):
        writer.handle(record(line))
    assert writer.num_dropped == 7
    assert read_lines(reader, num_bytes + 1000) == ["." * num_bytes + line, *[line] * 9]
    assert writer.flush_for(TIMEOUT_S)
    writer.handle(record("again"))
    assert writer.flush_for(TIMEOUT_S)
    told, again = os.read(reader, 10_000).decode().splitlines()
    assert told == "7 lines of this log were dropped, because its reader had stopped"
    assert again == "again" and writer.num_dropped == 7


def test_a_flush_waits_no_longer_than_its_limit(pipe) -> None:
    writer = LogWriter(pipe[1])
    while not writer.num_dropped:
        writer.handle(record("x" * 1000))
    began_s = time.monotonic()
    assert not writer.flush_for(0.05)
    assert time.monotonic() - began_s < TIMEOUT_S


def test_a_closed_reader_is_survived() -> None:
    reader, end = os.pipe()
    os.close(reader)
    writer = LogWriter(end)
    writer.handle(record("lost"))
    assert writer.flush_for(TIMEOUT_S)
    os.close(end)


def test_a_record_that_cannot_be_formatted_reaches_no_caller(pipe, capsys) -> None:
    writer = LogWriter(pipe[1])
    writer.handle(logging.LogRecord("test", logging.INFO, __file__, 0, "%d", ("no number",), None))
    assert "--- Logging error ---" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["normally", "at_once"])
def test_a_process_whose_log_nobody_reads_answers_signals_and_ends(how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # read after the end
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        words = process.stdout.readline().split()
        assert words[0] == "logged" and int(words[1]) > 0
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told\n"
        assert process.wait(TIMEOUT_S) == (0 if how == "normally" else 128 + signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


def test_a_normal_end_loses_no_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NORMAL],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        check=True,
    )
    numbers = [int(json.loads(line)["message"].split()[1]) for line in done.stderr.splitlines()]
    assert numbers == list(range(5_000))
