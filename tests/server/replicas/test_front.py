"""What whoever runs a front can ask it beside requests, and how it ends. Serve does not run."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from pensieve_jax.core.errors import EngineClosedError
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.listening import bind
from pensieve_jax.server.replicas.plan import ReplicaPlan
from pensieve_jax.server.replicas.report_link import ReportListener
from tests.server.replicas.fakes import FakeReplicas, routed, spec_of

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray imports


def front_of(**parts):
    """Without what its start asks for."""
    from pensieve_jax.server.replicas.serve_app import Front

    front = Front.__new__(Front)
    for name, part in parts.items():
        setattr(front, name, part)
    return front


def line_of(key):
    return f"me:{hashlib.sha256(key.encode()).hexdigest()}\n"


def test_a_front_that_drains_takes_no_turns_and_ends_those_that_run():
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
    """The answer of a server, whose connection stays open."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(5)
    writer.close()
    return head.split()[1], body


def test_a_front_with_an_address_listens_there_until_it_has_drained(monkeypatch):
    from pensieve_jax.server.replicas.serve_app import Front

    monkeypatch.setattr(Front, "_application", lambda _: hello)

    async def work():
        front = front_of(_engine=await routed(FakeReplicas()), _listener=ReportListener(), _tasks=[])
        listening = bind("127.0.0.1", 0)
        address = listening.getsockname()
        front._http = await front._listen(listening)
        await front.check_health()
        assert await asked(address) == (b"200", b"hello")
        await front.drain(1.0)
        with pytest.raises(ConnectionRefusedError):
            await asked(address)
        with pytest.raises(EngineClosedError, match="without being told"):
            await front.check_health()

    asyncio.run(work())


def test_a_front_that_cannot_listen_does_not_start(monkeypatch):
    from pensieve_jax.server.replicas.serve_app import Front

    async def ends_at_once(self, sockets):
        for one in sockets:
            one.close()
        raise ZeroDivisionError("no lifespan")

    monkeypatch.setattr(Front, "_application", lambda _: hello)
    monkeypatch.setattr("pensieve_jax.server.listening.HttpServer.serve", ends_at_once)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(front_of(_tasks=[])._listen(bind("127.0.0.1", 0)))


def test_a_front_reads_its_keys_again_or_says_why_it_could_not(tmp_path):
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


def test_an_actor_that_has_nothing_to_do_ends_within_a_second():
    from pensieve_jax.server.replicas.serve_app import application

    plan = ReplicaPlan(history="postgresql://me@host/chats", model="chat")
    built = application(plan, ServerSettings(is_routed=True), 0)
    front = built._bound_deployment
    (replica, *_) = front.init_args
    for one in (front, getattr(replica, "_bound_deployment", replica)):
        assert one._deployment_config.graceful_shutdown_wait_loop_s < 1
