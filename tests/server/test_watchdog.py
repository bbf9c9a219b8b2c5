"""The watchdog of a silent engine in a replica that still responds."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import pytest

from pensieve_jax.core.errors import EngineClosedError
from tests.server.engine_process.fakes import FakeEngines, fake_engine, run, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports


class Engine:
    def __init__(self) -> None:
        self.state, self.last_heard_s = "ready", 0.5
        self.gave_up = asyncio.Event()
        self.num_killed = 0

    def kill_process(self) -> None:
        self.num_killed += 1


@pytest.fixture
def replica():
    """Return the replica with which an actor checks its engine's health."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from pensieve_jax.server.replicas.serve_app import EngineReplica
    from pensieve_jax.server.watchdog import SILENCE_S, Watchdog

    found = SimpleNamespace(_engine=Engine())
    found._watchdog = Watchdog(found._engine, SILENCE_S)
    found.check_health = functools.partial(EngineReplica.check_health, found)
    return found


def check(replica, *silences_s, state="ready"):
    replica._engine.state = state
    for replica._engine.last_heard_s in silences_s:
        asyncio.run(replica.check_health())
    return replica._engine.num_killed


def test_an_engine_that_is_silent_at_two_checks_is_killed_and_restarted(replica):
    assert check(replica, 1.0, 89.0, 91.0) == 0
    assert check(replica, 93.0) == 1
    assert check(replica, 95.0) == 1  # it has time to end
    assert check(replica, 97.0) == 2


def test_an_engine_is_not_killed_before_its_history_can_time_out_and_report():
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    from pensieve_jax.history import postgres_connection
    from pensieve_jax.server import watchdog

    limit_s = float(postgres_connection._SETTINGS["statement_timeout"].removesuffix("s"))
    assert 1.5 * limit_s <= watchdog.SILENCE_S


def test_an_actor_that_was_suspended_itself_kills_no_engine(replica):
    assert check(replica, 300.0, 0.1, 300.0, 0.1) == 0


def test_a_starting_engine_may_be_silent(replica):
    assert check(replica, 100.0, 102.0, 104.0, state="starting") == 0


def test_for_an_engine_that_is_given_up_serve_starts_another_replica(replica):
    replica._engine.gave_up.set()
    with pytest.raises(EngineClosedError):
        check(replica, 0.1)


def test_a_killed_engine_is_restarted():
    async def work():
        async with fake_engine(FakeEngines()) as engine:
            engine.kill_process()
            await until(lambda: engine.epoch == 2)
            assert engine.state == "ready" and not engine.gave_up.is_set()

    run(work())
