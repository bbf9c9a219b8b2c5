"""Background responses that kill the engine: they fail at its second death, and no other one does."""

from __future__ import annotations

import contextlib

import pytest

from pensieve_jax.core.errors import EngineDiedError, HistoryUnavailableError
from pensieve_jax.history import open_store
from pensieve_jax.history.server_tables.changes import EndResponse, StartResponse, TakeBackStart
from pensieve_jax.server.openai.responses import background
from tests.deadlines import wait_until
from tests.server.fakes import FakeTurn, say
from tests.server.live import START_S, LiveServer
from tests.server.openai.responses.test_background import ended, feed, turn_of
from tests.server.stored_engine import FINGERPRINT

POISON = "poison"
DIED = EngineDiedError("The engine's process died.")
LONG_S = START_S + 100.0


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    monkeypatch.setattr(background, "POLL_S", 0.02)
    monkeypatch.setattr(background, "TAKE_BACK_S", 0.01)


@pytest.fixture(params=["file", "postgres"])
def where(request, tmp_path):
    """Return a history that a server opens again, in a file or in Postgres."""
    return (
        request.getfixturevalue("postgres").url()
        if request.param == "postgres"
        else tmp_path / "history.sqlite"
    )


def is_poison(turn: FakeTurn) -> bool:
    return POISON in "".join(message["content"] for message in turn.spec.messages or ())


class Deadly:
    """An engine that dies with all of its turns once a poisonous one has begun and `num_beside` others run.

    Attributes:
        num_deaths: deaths so far.
        at_deaths: the prompts that ran at each death.
    """

    def __init__(self, num_beside: int = 0) -> None:
        self.num_beside = num_beside
        self.num_deaths = 0
        self.running: list[FakeTurn] = []
        self.at_deaths: list[list[str]] = []
        self.begun: list[str] = []

    def __call__(self, turn: FakeTurn) -> None:
        self.begun.append(text_of(turn))
        self.running.append(turn)
        if any(map(is_poison, self.running)) and (self.num_deaths or len(self.running) > self.num_beside):
            dying, self.running = self.running, []
            self.num_deaths += 1
            self.at_deaths.append(sorted(map(text_of, dying)))
            for one in dying:
                one.fail(DIED)
        elif self.num_deaths or not self.num_beside:
            self.running.remove(turn)
            say("hello")(turn)


def text_of(turn: FakeTurn) -> str:
    (message,) = turn.spec.messages or ()
    return str(message["content"])


def check_failed(response) -> None:
    assert response.status == "failed"
    assert (response.error.code, response.error.pensieve_code) == ("server_error", "engine_died_running")


def starts_of(server, response_id: str) -> int:
    return server.harness.services.history.response("", response_id).starts


def test_the_start_is_counted_before_the_engine_gets_the_turn(where):
    with LiveServer(where) as server, server.client() as client:
        seen = []
        submit_all = server.engine.submit_all

        def submit(specs):
            (record,) = server.harness.services.history.unfinished_background()
            seen.append(record.starts)
            return submit_all(specs)

        server.on_loop(lambda: setattr(server.engine, "submit_all", submit))
        queued = client.responses.create(input="hi", background=True)
        turn = turn_of(server)
        assert seen == [1]
        feed(server, turn, "hello", end=True)
        assert ended(client, queued.id).output_text == "hello"


def test_a_response_that_kills_the_engine_twice_fails_and_the_others_complete(where):
    """Two innocent responses run beside it at the first death, and none at the second."""
    engine = Deadly(num_beside=2)
    with LiveServer(where, engine) as server, server.client() as client:
        innocent = [client.responses.create(input=f"hi {i}", background=True).id for i in range(2)]
        guilty = client.responses.create(input=POISON, background=True).id
        later = [client.responses.create(input=f"ho {i}", background=True).id for i in range(3)]
        failed = ended(client, guilty)
        for response_id in innocent + later:
            assert ended(client, response_id).output_text == "hello"
        check_failed(failed)
        assert "died 2 times" in failed.error.message
        assert engine.num_deaths == 2
        assert engine.at_deaths == [["hi 0", "hi 1", POISON], [POISON]]
        wait_until(lambda: not server.on_loop(lambda: server.responses.background.num_running))
        assert not server.responses.background._driver._started


def test_suspects_run_one_at_a_time_and_others_wait(where):
    with LiveServer(where) as server, server.client() as client:
        for text in ("one", "two"):
            client.responses.create(input=text, background=True)
        first = [turn_of(server, 0), turn_of(server, 1)]
        server.on_loop(lambda: [turn.fail(DIED) for turn in first])
        suspect, gate = turn_of(server, 2), server.responses.background._driver._gate
        wait_until(lambda: len(gate._waiting) == 1)
        client.responses.create(input="fresh", background=True)
        wait_until(lambda: len(gate._waiting) == 2)
        server.wait_for(server.responses.background.reconcile())
        assert len(server.engine.turns) == 3
        feed(server, suspect, "hello", end=True)
        second = turn_of(server, 3)
        assert {text_of(suspect), text_of(second)} == {"one", "two"}
        feed(server, second, "hello", end=True)
        fresh = turn_of(server, 4)
        assert text_of(fresh) == "fresh"
        feed(server, fresh, "hello", end=True)
        wait_until(lambda: not server.on_loop(lambda: server.responses.background.num_running))


def test_a_foreground_turn_does_not_wait_for_a_suspect_and_is_not_repeated(where):
    with LiveServer(where) as server, server.client() as client:
        queued = client.responses.create(input="hi", background=True)
        first = turn_of(server)
        server.on_loop(lambda: first.fail(DIED))
        suspect = turn_of(server, 1)
        server.on_loop(lambda: setattr(server.engine, "script", lambda turn: turn.fail(DIED)))
        status = client._client.post(
            f"{server.url}/responses", json={"model": "fake", "input": "now"}
        ).status_code
        assert status == 500 and len(server.engine.turns) == 3
        server.on_loop(lambda: setattr(server.engine, "script", None))
        feed(server, suspect, "hello", end=True)
        assert ended(client, queued.id).output_text == "hello"


def kill(server) -> None:
    """Let the server's next requests to the engine fail, as if both processes had been killed."""

    async def dead(change) -> None:
        raise DIED

    server.on_loop(lambda: setattr(server.engine, "apply", dead))


@pytest.mark.parametrize("num_kills", [1, 2])
def test_deaths_count_over_restarts_of_the_server(where, num_kills):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(LiveServer(where))
        client = stack.enter_context(server.client())
        response_id = client.responses.create(input="hi", background=True).id
        turn_of(server)
        kill(server)
    for number in range(1, num_kills):
        with LiveServer(where, start_s=START_S + number) as server:
            turn_of(server)
            assert starts_of(server, response_id) == 2
            kill(server)
    with LiveServer(where, say("hello"), start_s=LONG_S) as server, server.client() as client:
        found = ended(client, response_id)
        if num_kills == 1:
            assert found.output_text == "hello"
        else:
            check_failed(found)
            assert not server.engine.turns
            events = list(client.responses.retrieve(response_id, stream=True))
            assert events[-2].code == "engine_died_running"
            check_failed(events[-1].response)


def drain(engine, turn: FakeTurn) -> None:
    engine.state = "draining"
    turn.finish("cancelled")


@pytest.mark.parametrize("drains", [False, True])
def test_a_server_that_ends_in_order_counts_no_death(where, drains):
    for number in range(3):
        with LiveServer(where, start_s=START_S + number) as server, server.client() as client:
            if not number:
                response_id = client.responses.create(input="hi", background=True).id
            turn = turn_of(server)
            assert starts_of(server, response_id) == 1
            if drains:
                server.on_loop(lambda turn=turn, engine=server.engine: drain(engine, turn))
    with LiveServer(where, say("hello"), start_s=LONG_S) as server, server.client() as client:
        assert ended(client, response_id).output_text == "hello"


def test_a_run_that_the_history_interrupts_is_no_death(where):
    with LiveServer(where) as server, server.client() as client:
        response_id = client.responses.create(input="hi", background=True).id
        for number in range(4):
            turn = turn_of(server, number)
            assert starts_of(server, response_id) == 1
            server.on_loop(lambda turn=turn: turn.fail(HistoryUnavailableError("The history is away.")))
        feed(server, turn_of(server, 4), "hello", end=True)
        assert ended(client, response_id).output_text == "hello"


def test_a_start_that_cannot_be_counted_does_not_reach_the_engine(where):
    with LiveServer(where) as server, server.client() as client:
        apply, refused = server.engine.apply, []

        async def refuse(change) -> None:
            if isinstance(change, StartResponse) and len(refused) < 2:
                refused.append(change)
                raise DIED
            await apply(change)

        server.on_loop(lambda: setattr(server.engine, "apply", refuse))
        response_id = client.responses.create(input="hi", background=True).id
        turn = turn_of(server)
        assert [change.starts for change in refused] == [1, 1] and starts_of(server, response_id) == 1
        assert len(server.engine.turns) == 1
        feed(server, turn, "hello", end=True)
        assert ended(client, response_id).output_text == "hello"


def test_the_engine_of_a_killed_server_may_take_back_a_start_after_the_claim(postgres, monkeypatch):
    """It ends its step first, while another server claims the response and reads it."""
    url, claimed = postgres.url(), background.BackgroundResponses._claimed

    def claimed_before(self):
        found = claimed(self)
        if [record.starts for record in found] == [2]:
            with open_store(url, fingerprint=FINGERPRINT) as dying:
                dying.apply(TakeBackStart(owner="", response_id=response_id))
        return found

    with LiveServer(url) as one, one.client() as client:
        response_id = client.responses.create(input="hi", background=True).id
        turn_of(one)
        one.wait_for(one.engine.apply(StartResponse(owner="", response_id=response_id, starts=2)))
        kill(one)
    monkeypatch.setattr(background.BackgroundResponses, "_claimed", claimed_before)
    with LiveServer(url, say("hello"), start_s=LONG_S) as other, other.client() as client:
        assert ended(client, response_id).output_text == "hello"


def test_two_servers_with_one_history_have_two_deaths_together(postgres):
    """The first server dies with its engine; the other one runs the response alone, and it dies again."""
    url = postgres.url()
    engine = Deadly()
    with LiveServer(url) as one, one.client() as client:
        guilty = client.responses.create(input=POISON, background=True).id
        innocent = client.responses.create(input="hi", background=True).id
        turn_of(one, 1)
        kill(one)
    with LiveServer(url, engine, start_s=LONG_S) as other, other.client() as client:
        assert ended(client, innocent).output_text == "hello"
        failed = ended(client, guilty)
        check_failed(failed)
        assert engine.num_deaths == 1 and engine.at_deaths == [[POISON]]
        ends = [change for change in other.engine.changes if isinstance(change, EndResponse)]
        assert [change.response_id for change in ends] == [guilty]
