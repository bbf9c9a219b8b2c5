"""A log handler that never blocks: a bounded queue, and a thread that writes it to a file descriptor.

Owns: the bound of the queue, the count of dropped lines, and the line that reports them.
Does not know: the format of a line, or which loggers use it.

A pipe whose reader has stopped blocks the process that writes to it. A server must go on, so it drops lines
then. A signal handler may log at any moment, so the queue is one whose `put` can be interrupted by another.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from typing import Final

MAX_QUEUED_BYTES: Final = 2**20
"""Bytes of lines that wait to be written."""
_NAME: Final = "pensieve_jax.server.log_writer"


class LogWriter(logging.Handler):
    """A handler whose lines are written in order by a thread of its own; a full queue drops new ones.

    Attributes:
      num_dropped: lines that were dropped since the start.
    """

    def __init__(self, descriptor: int, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        """Write to an open file descriptor, which stays open. The thread starts with the first line."""
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        self._max_queued_bytes = max_queued_bytes
        self._queue = queue.SimpleQueue[bytes | threading.Event]()
        # The first is changed under the handler's lock, the second by the writing thread only.
        self._num_bytes_in = self._num_bytes_out = 0
        self._num_reported = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record, or count it as dropped."""
        try:
            line = self._line(record)
        except Exception:  # the interface of a handler: an error of a log call must not reach its caller
            self.handleError(record)
            return
        if not self._has_room(len(line)):
            self.num_dropped += 1
            return
        self._report_drops()
        self._put(line)

    def flush_for(self, seconds: float) -> bool:
        """Wait until the lines so far are written, at most `seconds`; return whether they are."""
        if self._thread is None:
            return True
        with self._locked():
            self._report_drops()
        written = threading.Event()
        self._queue.put(written)
        return written.wait(seconds)

    # Private methods

    def _locked(self) -> threading.RLock:
        assert self.lock is not None
        return self.lock

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _has_room(self, num_bytes: int) -> bool:
        queued = self._num_bytes_in - self._num_bytes_out
        return not queued or queued + num_bytes <= self._max_queued_bytes

    def _report_drops(self) -> None:
        """Queue a line about the lines that were dropped since the last such line."""
        number = self.num_dropped - self._num_reported
        if number:
            self._num_reported = self.num_dropped
            sentence = "%d lines of this log were dropped, because its reader had stopped"
            self._put(
                self._line(
                    logging.LogRecord(_NAME, logging.WARNING, __file__, 0, sentence, (number,), None, None)
                )
            )

    def _put(self, line: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
            self._thread.start()
        self._num_bytes_in += len(line)
        self._queue.put(line)

    def _write_all(self) -> None:
        while True:
            entry = self._queue.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            # Not through `sys.stderr`: a write that blocks holds its lock, and aborts the interpreter's end.
            self._write(memoryview(entry))
            self._num_bytes_out += len(entry)

    def _write(self, line: memoryview) -> None:
        while line:
            try:
                line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:  # the reader has gone, or the disk is full
                return
