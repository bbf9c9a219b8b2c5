"""A server's process from its start to its end: an engine, an application in front of it, and signals.

Owns: in which order the two start and end, what signals mean, the socket that is listened on, and the file
of a history that nobody wants to keep.
Does not know: what the application does, command lines, or how an engine runs.

The first SIGTERM or Ctrl-C drains: no more turns are taken, those that run get their time, and the status is
0. The second ends everything at once. An engine that dies too often ends the server, with status 1, as does
an end that nobody asked for, so that whoever watches over it can start it anew. One that hangs is killed, and
started again as one that died. A history that turns out to be damaged or gone when the engine is started
again ends it with status 2: somebody has to look.
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
from pensieve_jax.server.logs import log_end_of_task
from pensieve_jax.server.watchdog import watch

EXIT_AT_ONCE: Final = 128 + signal.SIGTERM
EXIT_ENDED: Final = 1
EXIT_DAMAGED: Final = 2
"""As of a start that is refused: to start the server again would serve an empty history."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
_LOOK_S = 0.2
_KEEP_ALIVE_S = 75  # clients' pools keep connections for a minute or so, and must not find them closed
_log = logging.getLogger(__name__)
_UNTAKEN_MS = 30_000
_AT_ONCE_S = 1
_GOODBYE_S = 5  # for answers that are complete and still on their way


class Signals:
    """What this process was told. Whoever enters it takes over SIGTERM, SIGINT and SIGHUP."""

    def __init__(self, on_hangup: Callable[[], object]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_hangup = on_hangup

    def __enter__(self) -> Signals:
        """Take the signals over."""
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (*_ENDING, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _end(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def _hang_up(self) -> None:
        try:
            self._on_hangup()
        except ConfigError as error:
            _log.error("%s", error)


class NotListeningError(PensieveError):
    """A server that was to listen does not."""


class HttpServer(uvicorn.Server):
    """Leaves signals to us, and says when it listens; to be run by `serve(sockets=...)`."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=RequestHeadLimits,
                ws="none",  # nothing here speaks them, and who offers them is answered in HTTP
                log_config=None,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GOODBYE_S,
                server_header=False,
            )
        )
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; raises NotListeningError where the application does not start, which the log says."""
        try:
            await super().startup(sockets)
        except SystemExit as error:  # which would end whatever loop this runs on
            raise NotListeningError("The application in front of the engine could not be started.") from error
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone, which uvicorn's own method would capture."""
        yield


class Listening:
    """A server in a loop that has other things to do as well."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        """It begins; see `begun`. The socket is closed at the end, whatever that is."""
        self._server = HttpServer(app)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        self._serving.add_done_callback(lambda _: listening.close())

    async def begun(self) -> None:
        """Wait until it listens; raises NotListeningError, and whatever else keeps it from that."""
        if await _until(self._server.listens, _outcome(self._serving)):
            raise NotListeningError("The server ended before it listened.")

    def check(self) -> None:
        """Raise NotListeningError where it has ended without being told to."""
        if self._serving.done() and not self._server.should_exit:
            error = None if self._serving.cancelled() else self._serving.exception()
            raise NotListeningError("The server has ended without being told to.") from error

    async def end(self) -> None:
        """Take no more connections, and wait for what is on its way."""
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
    """Serve until told to end; the exit status.

    Args:
      start: an engine that is not started yet.
      make_application: what answers, of the engine when it is ready.
      listening: as `bind` returns it; closed at the end.
      drain_s: how long turns may go on.
      announce: called with the engine and the address once both are ready.
      on_hangup: called for a SIGHUP; a ConfigError that it raises is logged.

    Raises what keeps the engine from starting.
    """

    async def work() -> int:
        with Signals(on_hangup) as signals:
            return await _serve(start, make_application, listening, drain_s, announce, signals)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def leave(status: int) -> int:
    """What is left to do with the status of `serve` and nothing else: return it, or end this process now.

    After a second signal Python would still wait for threads, which cannot be interrupted in a long body.
    """
    if status == EXIT_AT_ONCE:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # whoever reads it has gone
                stream.flush()
        os._exit(status)
    return status


def bind(host: str, port: int) -> socket.socket:
    """A socket for this address; before minutes of loading, so that clients are refused until it listens.

    Raises ConfigError for an address that is taken, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # what a client never takes must not keep its connection
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MS)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(
            "--host and --port", f"{host}:{port}", "a free address of this machine", problem
        ) from error
    return found


async def bind_in_time(host: str, port: int, seconds: float) -> socket.socket:
    """As `bind`, where whoever had the address may take so long to give it back."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while True:
        try:
            return bind(host, port)
        except ConfigError:
            if loop.time() > until_s:
                raise
        await asyncio.sleep(_LOOK_S)


def address_of(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def history_file(path: str | None) -> Iterator[str]:
    """The file of the history: `path`, or one that nobody else can read and that is gone at the end."""
    if path is not None:
        yield path
        return
    directory = Path(tempfile.mkdtemp(prefix="pensieve-"))  # of mode 0700
    try:
        yield str(directory / "history.sqlite")
    finally:
        with contextlib.suppress(FileNotFoundError):  # somebody cleans up old temporary files
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
        watching.add_done_callback(log_end_of_task(_log, "nobody looks any more whether the engine hangs"))
        _log.info("starting the engine; a first start compiles, which takes a minute or more, once")
        try:
            if not await _until(signals.first, engine.open()):
                return 0
            server = HttpServer(make_application(engine))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            if not await _until(server.listens, _outcome(serving)):
                announce(engine, address_of(listening))
            return await _until_told(engine, server, serving, signals, drain_s)
        finally:
            watching.cancel()
            await engine.close()


async def _until_told(
    engine: AsyncEngine, server: HttpServer, serving: asyncio.Task[None], signals: Signals, drain_s: float
) -> int:
    """Serve until the first signal, then drain, until the second; or until the engine is given up."""
    if not await _until(signals.first, _until(engine.gave_up, _outcome(serving))):
        _log.info("ending: turns that run get %g s; a second signal ends them at once", drain_s)
    else:
        if not engine.gave_up.is_set():
            _log.error("the server has ended without being told to")
        server.should_exit = True
        await _outcome(serving)
        return EXIT_DAMAGED if engine.is_damaged else EXIT_ENDED
    if await _until(signals.second, _drain(engine, server, serving, drain_s)):
        return 0
    with _quiet("uvicorn.error"):
        server.force_exit = server.should_exit = True
        engine.kill()
        await serving
        await _cut_off(server)
    return EXIT_AT_ONCE


async def _cut_off(server: HttpServer) -> None:
    """End what a server that was forced to exit leaves behind."""
    requests = list(server.server_state.tasks)
    for request in requests:
        request.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_AT_ONCE_S):
            await asyncio.gather(*requests, return_exceptions=True)
            await server.lifespan.shutdown()


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without a logger's lines: of requests that were cut off on purpose, each is an error with a trace."""
    logger = logging.getLogger(name)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


async def _drain(
    engine: AsyncEngine, server: HttpServer, serving: asyncio.Task[None], drain_s: float
) -> None:
    """Turns first, which clients are still told of; then connections."""
    await engine.drain(drain_s)
    server.should_exit = True
    await _outcome(serving)


async def _outcome(task: asyncio.Task[None]) -> None:
    """Wait for a task that goes on when this does not."""
    await asyncio.shield(task)


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Whether `work` came to its end before the event, which cancels it; raises what it raises."""
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
