"""A server's start, drain and shutdown, with a small application over an engine on the fake runner."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax import AsyncEngine, ConfigError, EngineClosedError
from pensieve_jax.server import watchdog
from pensieve_jax.server.engine_process.supervisor import RestartPolicy
from pensieve_jax.server.main import (
    EXIT_AT_ONCE,
    EXIT_ENDED,
    EXIT_INTERRUPTED,
    HttpServer,
    Listening,
    NotListeningError,
    history_file,
    serve,
)
from pensieve_jax.server.sockets import address_of, bind, bind_in_time
from tests.engine.harness import Harness
from tests.server.engine_process.fakes import TIMEOUT_S, FakeEngines, ThreadHandle, spec

LONG = 1500


def application(engine: AsyncEngine) -> Any:
    """Return an application for GET /n: it streams the ids of a reply of n tokens."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        try:
            turn = engine.submit(spec([5], max_tokens=int(scope["path"][1:])))
        except EngineClosedError as error:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": str(error).encode()})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for delta in turn:
            body = "".join(f"{token_id}\n" for token_id in delta.token_ids).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": turn.output.finish_reason.encode()})

    return app


class Client(threading.Thread):
    """Thread that runs its work against the server once it is up; `join` raises its error."""

    def __init__(self, work: Callable[[Callable[[int], http.client.HTTPResponse]], None]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.error: BaseException | None = None
        self.connections: list[http.client.HTTPConnection] = []

    def announce(self, engine: AsyncEngine, address: str) -> None:
        self.address = address.removeprefix("http://")
        self.start()

    def ask(self, num_tokens: int) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
        self.connections.append(connection)
        connection.request("GET", f"/{num_tokens}")
        return connection.getresponse()

    def run(self) -> None:
        try:
            self.work(self.ask)
        except BaseException as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)

    def join(self, timeout: float | None = TIMEOUT_S) -> None:
        super().join(timeout)
        for connection in self.connections:
            connection.close()
        if self.error is not None:
            raise self.error


def run(client: Client, *, drain_s: float, engines: FakeEngines | None = None) -> int:
    engines = engines or FakeEngines()
    status = serve(
        lambda: AsyncEngine(engines.begin, restarts=RestartPolicy(first_delay_s=0.0)),
        application,
        bind("127.0.0.1", 0),
        drain_s=drain_s,
        announce=client.announce,
    )
    client.join()
    assert engines.harness.engine.closed
    return status


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def slow(engines: FakeEngines) -> threading.Event:
    """Let each step take a while until the event is set, so that a long turn still runs later."""
    is_over = threading.Event()
    engines.prepare = lambda harness: setattr(harness, "on_step", lambda output: is_over.wait(0.02))
    return is_over


def test_running_turns_get_time_to_end() -> None:
    engines = FakeEngines()
    goes_on = slow(engines)

    def work(ask: Callable[[int], http.client.HTTPResponse]) -> None:
        short = ask(3).read().split()
        assert len(short) == 4 and short[-1] == b"length"
        running = ask(LONG)
        assert running.readline().strip().isdigit()
        terminate()
        while (late := ask(1)).status != 503:
            late.read()
        assert b"draining" in late.read()
        goes_on.set()
        assert running.read().split()[-1] == b"length"

    assert run(Client(work), drain_s=TIMEOUT_S, engines=engines) == 0


def test_ctrl_c_drains_too_and_the_status_says_so() -> None:
    def work(ask: Callable[[int], http.client.HTTPResponse]) -> None:
        running = ask(LONG)
        running.readline()
        os.kill(os.getpid(), signal.SIGINT)
        assert running.read().split()[-1] == b"cancelled"

    assert run(Client(work), drain_s=0.0) == EXIT_INTERRUPTED == 130


def test_turns_that_take_longer_are_cancelled() -> None:
    engines = FakeEngines()
    slow(engines)

    def work(ask: Callable[[int], http.client.HTTPResponse]) -> None:
        running = ask(LONG)
        running.readline()
        terminate()
        assert running.read().split()[-1] == b"cancelled"

    assert run(Client(work), drain_s=0.0, engines=engines) == 0


def test_a_second_signal_ends_everything_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engines, gate = FakeEngines(), threading.Event()
    engines.prepare = lambda harness: setattr(harness, "on_step", lambda output: gate.wait(TIMEOUT_S))

    def work(ask: Callable[[int], http.client.HTTPResponse]) -> None:
        running = ask(LONG)  # none of its steps ends
        terminate()
        while ask(1).status != 503:
            pass
        terminate()
        gate.set()
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            running.read()

    assert run(Client(work), drain_s=TIMEOUT_S, engines=engines) == EXIT_AT_ONCE
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


def test_an_engine_that_dies_too_often_ends_the_server() -> None:
    engines = FakeEngines()
    slow(engines)

    def work(ask: Callable[[int], http.client.HTTPResponse]) -> None:
        for _ in range(1 + RestartPolicy().max_restarts):
            while (running := ask(LONG)).status == 503:  # it is restarting
                running.read()
            engines.handles[-1].kill()
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                running.read()

    assert run(Client(work), drain_s=TIMEOUT_S, engines=engines) == EXIT_ENDED
    assert len(engines.handles) == 1 + RestartPolicy().max_restarts


@pytest.mark.long
def test_a_hanging_engine_is_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server itself must do this: clients wait for the engine's turns, and so do cancellations."""
    monkeypatch.setattr(watchdog, "ALONE_SILENCE_S", 5.0)  # the engine sends a heartbeat every second
    monkeypatch.setattr(watchdog, "POLL_S", 1.0)  # of two looks, one follows a heartbeat
    engines, gate = FakeEngines(), threading.Event()

    def prepare(harness: Harness) -> None:
        if len(engines.handles) <= 1:
            harness.on_step = lambda output: gate.wait(TIMEOUT_S)

    engines.prepare = prepare

    def work(ask: Callable[[int], http.client.HTTPResponse]) -> None:
        running = ask(LONG)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            running.read()
        gate.set()
        while (again := ask(3)).status == 503:
            again.read()
        assert again.read().split()[-1] == b"length"
        terminate()

    assert run(Client(work), drain_s=TIMEOUT_S, engines=engines) == 0
    assert len(engines.handles) == 2 and "has been silent for" in caplog.text


def test_an_unexpected_shutdown_has_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service manager restarts the server for status 1, not for 0."""

    servers: list[HttpServer] = []
    startup = HttpServer.startup

    async def noted(server: HttpServer, sockets: list[socket.socket] | None = None) -> None:
        servers.append(server)
        await startup(server, sockets)

    monkeypatch.setattr(HttpServer, "startup", noted)
    status = serve(
        lambda: AsyncEngine(FakeEngines().begin),
        application,
        bind("127.0.0.1", 0),
        drain_s=0,
        announce=lambda engine, address: setattr(servers[0], "should_exit", True),
    )
    assert status == EXIT_ENDED
    assert "stopped unexpectedly" in caplog.text


def test_a_signal_during_the_start_ends_it() -> None:
    gate = threading.Event()

    def prepare(harness: Harness) -> None:
        terminate()
        gate.wait(TIMEOUT_S)

    class SlowEngines(FakeEngines):
        async def begin(self) -> ThreadHandle:
            handle = await super().begin()
            kill = handle.kill
            handle.kill = lambda: (gate.set(), kill())
            return handle

    engines = SlowEngines()
    engines.prepare = prepare
    client = Client(lambda ask: pytest.fail("it was announced"))
    status = serve(
        lambda: AsyncEngine(engines.begin),
        application,
        bind("127.0.0.1", 0),
        drain_s=0,
        announce=client.announce,
    )
    assert status == 0 and not client.is_alive()


def test_an_address_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        bind("203.0.113.1", 0)
    with bind("127.0.0.1", 0) as free:
        assert address_of(free) == f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_temporary_history_is_private_and_deleted_at_the_end(tmp_path: Path) -> None:
    with history_file(None) as path:
        directory = Path(path).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        Path(path).write_text("x")
    assert not directory.exists()
    with history_file(None) as path:  # whose file a cleaner of old files deleted first
        Path(path).parent.rmdir()
    with history_file(str(tmp_path / "kept")) as path:
        Path(path).write_text("x")
    assert (tmp_path / "kept").exists()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
def test_a_connection_whose_client_reads_nothing_is_closed():
    """Closing waits until the written data is read; the kernel ends that wait, for accepted sockets too."""
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()[:2]):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def hello(scope, receive, send):
    """Answer without a lifespan, which servers accept."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def status_of(address):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line.split()[1]


def test_a_server_beside_other_tasks_starts_and_stops():
    async def work():
        listening = bind("127.0.0.1", 0)
        address = listening.getsockname()
        server = Listening(hello, listening)
        await server.begun()
        server.check()
        assert await status_of(address) == b"200"
        await server.end()
        server.check()  # it was told to stop
        with pytest.raises(ConnectionRefusedError):
            await status_of(address)

    asyncio.run(work())


def test_an_application_that_fails_to_start_is_an_error_and_does_not_end_the_loop():
    async def refuses(scope, receive, send):
        assert scope["type"] == "lifespan"
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    async def work():
        listening = bind("127.0.0.1", 0)
        with pytest.raises(NotListeningError, match="could not be started"):
            await Listening(refuses, listening).begun()
        assert listening.fileno() == -1

    asyncio.run(work())


def test_a_server_that_stops_unexpectedly_is_detected():
    async def work():
        listening = bind("127.0.0.1", 0)
        server = Listening(hello, listening)
        await server.begun()
        server._serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server._serving
        await asyncio.sleep(0)
        assert listening.fileno() == -1
        with pytest.raises(NotListeningError, match="stopped unexpectedly"):
            server.check()

    asyncio.run(work())


def test_the_server_waits_for_an_address_that_is_about_to_become_free(monkeypatch):
    monkeypatch.setattr("pensieve_jax.server.sockets._POLL_S", 0.001)

    async def work():
        first = bind("127.0.0.1", 0)
        first.listen()
        host, port = first.getsockname()
        waiting = asyncio.ensure_future(bind_in_time(host, port, TIMEOUT_S))
        await asyncio.sleep(0)
        assert not waiting.done()
        first.close()
        second = await waiting
        second.listen()
        with pytest.raises(ConfigError, match=f"{port}"):
            await bind_in_time(host, port, 0.0)
        second.close()

    asyncio.run(work())
