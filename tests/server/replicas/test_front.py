"""Operations of a front end besides requests, and how it shuts down. Serve does not run."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace

import pytest

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.main import Listening, NotListeningError
from pensieve_jax.server.replicas.plan import ReplicaPlan
from pensieve_jax.server.replicas.report_stream import ReportLinks, ReportListener
from pensieve_jax.server.sockets import bind
from tests.server.replicas.fakes import FakeReplicas, routed, spec_of

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports


def front_of(**parts):
    """Return a front end without the parts that need a start."""
    from pensieve_jax.server.replicas.serve_app import Front

    class Quiet(Front):
        """Front end without a finalizer: Serve calls and awaits it instead of Python."""

        def __del__(self) -> None: ...

    front = Quiet.__new__(Quiet)
    for name, part in parts.items():
        setattr(front, name, part)
    return front


def line_of(key):
    return f"me:{hashlib.sha256(key.encode()).hexdigest()}\n"


def test_a_draining_front_end_refuses_turns_and_ends_those_that_run():
    async def work():
        engine = await routed(FakeReplicas())
        turn = engine.submit(spec_of())
        await front_of(_engine=engine, _listener=ReportListener(), _http=None).drain(0.0)
        with pytest.raises(EngineClosedError):
            await turn.result()
        with pytest.raises(EngineClosedError, match="draining"):
            engine.submit(spec_of())

    asyncio.run(work())


async def hello(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})


async def asked(address):
    """Return a server's answer."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(5)
    writer.close()
    return head.split()[1], body


def test_a_front_end_with_an_address_listens_and_is_healthy_until_it_has_drained():
    async def work():
        socket_ = bind("127.0.0.1", 0)
        address, http, listener = socket_.getsockname(), Listening(hello, socket_), ReportListener()
        watch = asyncio.get_running_loop().create_future()
        front = front_of(_engine=await routed(FakeReplicas()), _listener=listener, _http=http, _watch=watch)
        await http.begun()
        await front.check_health()
        assert await asked(address) == (b"200", b"hello")
        waiting = listener.open()
        await front.drain(1.0)
        with pytest.raises(ConnectionRefusedError):
            await asked(address)
        with pytest.raises(EngineDiedError):
            await waiting.take()
        watch.set_result(None)
        with pytest.raises(EngineClosedError, match="stopped watching"):
            await front.check_health()

    asyncio.run(work())


def test_a_front_end_whose_server_has_stopped_is_unhealthy():
    class Ended:
        def check(self):
            raise NotListeningError("ended")

    async def work():
        watch = asyncio.get_running_loop().create_future()
        with pytest.raises(NotListeningError):
            await front_of(_watch=watch, _http=Ended()).check_health()

    asyncio.run(work())


def test_a_front_end_that_serve_removes_lets_its_turns_end():
    from pensieve_jax.server.replicas.serve_app import Front

    drained = []

    async def drain(seconds):
        drained.append(seconds)

    async def work():
        front = front_of(_settings=ServerSettings(is_routed=True, drain_s=7.0), _http=None)
        front.drain = drain
        await Front.__del__(front)
        await Front.__del__(front_of())  # a front end that never started

    asyncio.run(work())
    assert drained == [7.0]


def test_a_replica_streams_all_messages_of_a_run_and_then_its_end():
    from pensieve_jax.server.replicas.serve_app import EngineReplica

    class Replica:
        def __init__(self, lines) -> None:
            self._lines, self.is_closed = lines, False

        async def run(self, submission):
            try:
                for line in self._lines:
                    if isinstance(line, Exception):
                        raise line
                    yield line
            finally:
                self.is_closed = True

    async def work():
        listener, links = ReportListener(), ReportLinks()
        address = await listener.listen("127.0.0.1")

        async def told(*lines):
            actor, inbox = SimpleNamespace(_links=links, _replica=Replica(lines)), listener.open()
            try:
                await EngineReplica.run(actor, b"turns", address, inbox.number)
            finally:
                assert actor._replica.is_closed
            found = []
            while (line := await inbox.take()) is not None:
                found.append(line)
            return found

        assert await told(b"one", b"two") == [b"one", b"two"]
        with pytest.raises(UnknownTurnError):
            await told(b"one", UnknownTurnError("0" * 32))
        links.close()
        listener.close()

    asyncio.run(work())


def test_a_front_end_reloads_its_keys_or_reports_why_it_could_not(tmp_path):
    path = tmp_path / "keys"
    path.write_text(line_of("first"))
    keys = ApiKeys(path)
    front = front_of(_keys=keys)
    path.write_text(line_of("second"))
    assert asyncio.run(front.reload_keys()) is None
    assert keys.owner("Bearer second") == "me" and keys.owner("Bearer first") is None
    path.write_text("no key")
    assert "api_keys_file" in asyncio.run(front.reload_keys())
    assert keys.owner("Bearer second") == "me"


@pytest.mark.parametrize(("log_format", "expected"), [(None, []), ("json", ["json", "uncaught"])])
def test_an_actor_logs_in_the_given_format(monkeypatch, log_format, expected):
    from pensieve_jax.server.replicas import serve_app

    done = []
    monkeypatch.setattr(serve_app, "log_to", lambda *, log_format: done.append(log_format))
    monkeypatch.setattr(serve_app, "log_uncaught", lambda: done.append("uncaught"))
    serve_app._log_as(log_format)
    assert done == expected


def test_an_idle_actor_ends_within_a_second():
    from pensieve_jax.server.replicas.serve_app import application

    plan = ReplicaPlan(history="postgresql://me@host/chats", model="chat")
    built = application(plan, ServerSettings(is_routed=True), 0)
    front = built._bound_deployment
    (replica, *_) = front.init_args
    for one in (front, getattr(replica, "_bound_deployment", replica)):
        assert one._deployment_config.graceful_shutdown_wait_loop_s < 1
