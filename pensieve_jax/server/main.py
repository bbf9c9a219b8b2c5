"""Runs a server's process from start to end: an engine, the application in front of it, and signals.

Owns: the order in which both start and stop, the meaning of signals, and the file of a temporary history.
Does not know: what the application does, command lines, or how an engine runs.

The first SIGTERM or Ctrl-C drains: the server accepts no more turns, and running turns get `drain_s` seconds.
The exit status is 0 after SIGTERM and 130 after Ctrl-C. The second signal ends everything at once. The exit
status is 1 if the engine dies too often or the server stops unexpectedly, so that a process supervisor can
restart it. A hanging engine is killed and restarted like one that died. If the history is damaged or missing
when the engine restarts, the exit status is 2, because an operator must look at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from pensieve_jax.core.errors import ConfigError, PensieveError
from pensieve_jax.server.engine_process.async_llm import AsyncEngine
from pensieve_jax.server.http.connections import RequestHeadLimits
from pensieve_jax.server.logs import flush_log, log_end_of_task
from pensieve_jax.server.sockets import address_of
from pensieve_jax.server.watchdog import watch

EXIT_AT_ONCE: Final = 128 + signal.SIGTERM
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_ENDED: Final = 1
EXIT_DAMAGED: Final = 2
"""Same status as a refused start. A restarted server would serve an empty history."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than the minute or so for which clients' pools keep connections
_log = logging.getLogger(__name__)
_CANCEL_S = 1  # time for cancelled requests to end after a second signal
_SHUTDOWN_S = 5  # time to deliver responses that are complete but not yet sent


class Signals:
    """Signals that this process received. As a context manager, it handles SIGTERM, SIGINT and SIGHUP.

    Attributes:
      first, second: set by the first and the second signal that ends the server.
      drained: exit status of a server that the first signal has ended.
    """

    def __init__(self, on_hangup: Callable[[], object]) -> None:
        self.drained = 0
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_hangup = on_hangup

    def __enter__(self) -> Signals:
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        for number in _END_SIGNALS:
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (*_END_SIGNALS, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _end(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self.drained = EXIT_INTERRUPTED if number == signal.SIGINT else 0
        self.first.set()

    def _hang_up(self) -> None:
        try:
            self._on_hangup()
        except ConfigError as error:
            _log.error("%s", error)


class NotListeningError(PensieveError):
    """The HTTP server could not start to listen, or stopped unexpectedly."""


class HttpServer(uvicorn.Server):
    """Uvicorn server that handles no signals and reports when it listens; run it by `serve(sockets=...)`."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=RequestHeadLimits,
                ws="none",  # no route uses WebSockets; a client that offers them gets an HTTP response
                log_config=None,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_S,
                server_header=False,
            )
        )
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; raises NotListeningError if the application does not start. The log has the reason."""
        try:
            await super().startup(sockets)
        except SystemExit as error:  # it would end the event loop that runs this
            raise NotListeningError("The HTTP application could not be started; see the log.") from error
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals, unlike uvicorn's own method."""
        yield


class Listening:
    """HTTP server that runs as a task of an event loop shared with other work."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        """Start the server; await `begun` next. The socket is closed when the server ends in any way."""
        self._server = HttpServer(app)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        self._serving.add_done_callback(lambda _: listening.close())

    async def begun(self) -> None:
        """Wait until the server listens; raises NotListeningError or any other error of its start."""
        if await _run_unless(self._server.listens, _outcome(self._serving)):
            raise NotListeningError("The server stopped before it listened; see the log.")

    def check(self) -> None:
        """Raise NotListeningError if the server has stopped unexpectedly."""
        if self._serving.done() and not self._server.should_exit:
            error = None if self._serving.cancelled() else self._serving.exception()
            raise NotListeningError("The server stopped unexpectedly; see the log.") from error

    async def end(self) -> None:
        """Accept no more connections, and wait for the requests in progress."""
        self._server.should_exit = True
        await _outcome(self._serving)


def serve(
    start: Callable[[], AsyncEngine],
    make_application: Callable[[AsyncEngine], ASGIApp],
    listening: socket.socket,
    *,
    drain_s: float,
    announce: Callable[[AsyncEngine, str], None],
    on_hangup: Callable[[], object] = lambda: None,
) -> int:
    """Serve until a signal or a failure ends the server, and return the exit status.

    Args:
      start: returns an engine that is not started yet.
      make_application: returns the application for the engine once that is ready.
      listening: a socket from `bind`; it is closed at the end.
      drain_s: how long turns may run after the first signal.
      announce: called with the engine and the address once both are ready.
      on_hangup: called on SIGHUP; a ConfigError that it raises is logged.

    Raises the error of an engine that does not start.
    """

    async def work() -> int:
        with Signals(on_hangup) as signals:
            return await _serve(start, make_application, listening, drain_s, announce, signals)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def leave(status: int) -> int:
    """Return the exit status of `serve`, or end this process now if the status is EXIT_AT_ONCE.

    Call it as the last step. After a second signal, a normal exit would still wait for threads, and a thread
    that parses a long request body cannot be interrupted.
    """
    if status == EXIT_AT_ONCE:
        flush_log()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader has closed the stream
                stream.flush()
        os._exit(status)
    return status


@contextlib.contextmanager
def history_file(path: str | None) -> Iterator[str]:
    """Yield the path of the history file: `path`, or a private temporary file that is deleted at the end."""
    if path is not None:
        yield path
        return
    directory = Path(tempfile.mkdtemp(prefix="pensieve-"))  # of mode 0700
    try:
        yield str(directory / "history.sqlite")
    finally:
        with contextlib.suppress(FileNotFoundError):  # the system may have cleaned up old temporary files
            shutil.rmtree(directory)


async def _serve(
    start: Callable[[], AsyncEngine],
    make_application: Callable[[AsyncEngine], ASGIApp],
    listening: socket.socket,
    drain_s: float,
    announce: Callable[[AsyncEngine, str], None],
    signals: Signals,
) -> int:
    engine = start()
    with contextlib.closing(listening):
        watching = asyncio.create_task(watch(engine))
        watching.add_done_callback(log_end_of_task(_log, "the watchdog of the engine failed"))
        _log.info("starting the engine; the first start compiles its steps, which takes a minute or more")
        try:
            if not await _run_unless(signals.first, engine.open()):
                return signals.drained
            server = HttpServer(make_application(engine))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            if not await _run_unless(server.listens, _outcome(serving)):
                announce(engine, address_of(listening))
            return await _serve_until_signal(engine, server, serving, signals, drain_s)
        finally:
            watching.cancel()
            await engine.close()


async def _serve_until_signal(
    engine: AsyncEngine, server: HttpServer, serving: asyncio.Task[None], signals: Signals, drain_s: float
) -> int:
    """Serve until the first signal and drain until the second; end early if the engine gives up."""
    if not await _run_unless(signals.first, _run_unless(engine.gave_up, _outcome(serving))):
        _log.info("draining: running turns get %g s; a second signal ends them at once", drain_s)
    else:
        if not engine.gave_up.is_set():
            _log.error("the HTTP server stopped unexpectedly")
        server.should_exit = True
        await _outcome(serving)
        return EXIT_DAMAGED if engine.is_damaged else EXIT_ENDED
    if await _run_unless(signals.second, _drain(engine, server, serving, drain_s)):
        return signals.drained
    with _quiet("uvicorn.error"):
        server.force_exit = server.should_exit = True
        engine.kill()
        await serving
        await _cut_off(server)
    return EXIT_AT_ONCE


async def _cut_off(server: HttpServer) -> None:
    """Cancel the requests of a server that was forced to exit, and shut down its lifespan."""
    requests = list(server.server_state.tasks)
    for request in requests:
        request.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CANCEL_S):
            await asyncio.gather(*requests, return_exceptions=True)
            await server.lifespan.shutdown()


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a logger, because each request that is cut off on purpose would log an error with a trace."""
    logger = logging.getLogger(name)
    logger.addFilter(_reject)
    try:
        yield
    finally:
        logger.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return False


async def _drain(
    engine: AsyncEngine, server: HttpServer, serving: asyncio.Task[None], drain_s: float
) -> None:
    """Drain turns first, while clients can still receive their results; then close connections."""
    await engine.drain(drain_s)
    server.should_exit = True
    await _outcome(serving)


async def _outcome(task: asyncio.Task[None]) -> None:
    """Wait for a task, which continues if this wait is cancelled."""
    await asyncio.shield(task)


async def _run_unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run `work` until `event` cancels it, and return whether `work` finished first. Raises its errors."""
    doing = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            await doing
            return True
        doing.cancel()
        await asyncio.wait({doing})
        return False
    finally:
        waiting.cancel()
