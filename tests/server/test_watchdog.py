"""An engine that says nothing any more, in a replica that does."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import pytest

from pensieve_jax.core.errors import EngineClosedError
from tests.server.engine_process.fakes import FakeLives, fake_engine, run, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray imports


class Engine:
    def __init__(self) -> None:
        self.state, self.last_heard_s = "ready", 0.5
        self.gave_up = asyncio.Event()
        self.num_killed = 0

    def kill_process(self) -> None:
        self.num_killed += 1


@pytest.fixture
def replica():
    """What an actor asks after its engine's health with."""
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


def test_an_engine_that_is_silent_at_two_looks_is_killed_to_be_started_again(replica):
    assert check(replica, 1.0, 89.0, 91.0) == 0
    assert check(replica, 93.0) == 1
    assert check(replica, 95.0) == 1  # it is given time to end
    assert check(replica, 97.0) == 2


def test_an_engine_whose_history_gives_up_a_statement_is_not_killed_before_it_can_say_so():
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    from pensieve_jax.history import postgres_connection
    from pensieve_jax.server import watchdog

    limit_s = float(postgres_connection._SETTINGS["statement_timeout"].removesuffix("s"))
    assert 1.5 * limit_s <= watchdog.SILENCE_S


def test_an_actor_that_was_stopped_itself_kills_nobody(replica):
    assert check(replica, 300.0, 0.1, 300.0, 0.1) == 0


def test_an_engine_that_starts_is_not_expected_to_say_anything(replica):
    assert check(replica, 100.0, 102.0, 104.0, state="starting") == 0


def test_an_engine_that_is_given_up_has_serve_start_another_replica(replica):
    replica._engine.gave_up.set()
    with pytest.raises(EngineClosedError):
        check(replica, 0.1)


def test_a_life_that_is_killed_is_followed_by_another():
    async def work():
        async with fake_engine(FakeLives()) as engine:
            engine.kill_process()
            await until(lambda: engine.epoch == 2)
            assert engine.state == "ready" and not engine.gave_up.is_set()

    run(work())
