"""Deletions by a clock: at a start far ahead of the history, and set while the server runs."""

from __future__ import annotations

import openai
import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.history.server_tables.changes import Expire
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.openai.responses.expiry import Expiry
from tests.deadlines import wait_until
from tests.server.fakes import say
from tests.server.live import START_S, LiveServer

DAY_S = 24 * 3600.0
LATER_S = START_S + 31 * DAY_S
TODAY = "2026-10-22"  # of LATER_S


@pytest.fixture(params=["file", "postgres"])
def where(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres").url()
    return tmp_path / "history.sqlite"


def swept(server) -> None:
    """Wait until the server has deleted, or was refused."""
    wait_until(lambda: any(isinstance(change, Expire) for change in server.engine.changes))
    server.on_loop(lambda: None)


def ask(server, client, response_id) -> bool:
    try:
        client.responses.retrieve(response_id)
        return True
    except openai.NotFoundError:
        return False


def suspended(server) -> float:
    return server.harness.services.metrics._expiry_suspended._value.get()


def test_a_clock_ahead_at_a_start_deletes_nothing_until_it_is_confirmed(where, caplog):
    with LiveServer(where, say("hello")) as server, server.client() as client:
        response_id = client.responses.create(input="hi").id
        swept(server)
    for _ in range(2):  # the second start must not trust what the first one wrote
        caplog.clear()
        with LiveServer(where, say("hello"), start_s=LATER_S) as server, server.client() as client:
            wait_until(lambda: suspended(server) == 1)
            assert ask(server, client, response_id)
            client.responses.create(input="ahead")
        (line,) = [
            record.getMessage() for record in caplog.records if "nothing is deleted" in record.getMessage()
        ]
        assert "2026-10-22T" in line and "2026-09-21T" in line and f"--confirm_clock={TODAY}" in line
    with (
        LiveServer(where, start_s=START_S + 60.0) as server,
        server.client() as client,
    ):  # the clock was put right
        swept(server)
        assert ask(server, client, response_id) and suspended(server) == 0
    settings = ServerSettings(confirm_clock=TODAY)
    with LiveServer(where, start_s=LATER_S, settings=settings) as server, server.client() as client:
        wait_until(lambda: not ask(server, client, response_id))
        assert suspended(server) == 0


def test_a_date_that_has_passed_confirms_nothing(where):
    """The flag may stay in a unit file."""
    with LiveServer(where, say("hello")) as server, server.client() as client:
        response_id = client.responses.create(input="hi").id
    settings = ServerSettings(confirm_clock="2026-10-01")
    with LiveServer(where, start_s=LATER_S, settings=settings) as server, server.client() as client:
        wait_until(lambda: suspended(server) == 1)
        assert ask(server, client, response_id)


@pytest.mark.parametrize("sleeps", [True, False], ids=["the machine slept", "the clock was set"])
def test_while_the_server_runs_a_jump_is_told_from_a_sleep(where, sleeps, caplog):
    with LiveServer(where, say("hello")) as server, server.client() as client:
        response_id = client.responses.create(input="hi").id
        elapsed_s = [5000.0]
        expiry = Expiry(server.harness.services, set(), lambda: elapsed_s[0])
        server.wait_for(expiry.sweep())
        server.on_loop(lambda: server.harness.clock.advance(31 * DAY_S))
        if sleeps:
            elapsed_s[0] += 31 * DAY_S
        for _ in range(2):
            server.wait_for(expiry.sweep())
        assert ask(server, client, response_id) is not sleeps
        told = [record for record in caplog.records if "nothing is deleted" in record.getMessage()]
        assert len(told) == (0 if sleeps else 1)
        assert suspended(server) == (0 if sleeps else 1)


def test_a_busy_conversation_is_not_deleted(where):
    settings = ServerSettings(idle_conversation_days=2)
    with LiveServer(where, say("hello"), settings=settings) as server, server.client() as client:
        busy, idle = (client.conversations.create().id for _ in range(2))
        elapsed_s = [0.0]
        expiry = Expiry(server.harness.services, {("", busy)}, lambda: elapsed_s[0])
        server.wait_for(expiry.sweep())
        client.conversations.retrieve(idle)
        server.on_loop(lambda: server.harness.clock.advance(3 * DAY_S))
        elapsed_s[0] += 3 * DAY_S
        server.wait_for(expiry.sweep())
        client.conversations.retrieve(busy)
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(idle)


@pytest.mark.parametrize("text", ["", "yes", "2026-13-01", "2026-1-1", "2026-11-30T00:00"])
def test_a_confirmation_is_a_date(text):
    with pytest.raises(ConfigError, match=r"confirm_clock is .* must be today's date"):
        ServerSettings(confirm_clock=text)
    assert ServerSettings(confirm_clock="1970-01-01").confirmed_until_s == 36 * 3600.0
