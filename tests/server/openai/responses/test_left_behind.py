"""Background responses whose queueing, cancelling or end lost its answer: the server always runs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import openai
import pytest

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, HistoryError
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.server_tables.changes import DeleteResponse, EndResponse, QueueResponse
from pensieve_jax.server.http.errors import INTERNAL_ERROR
from pensieve_jax.server.openai.responses import background
from tests.deadlines import TIMEOUT_S, wait_until
from tests.server.fakes import say
from tests.server.live import LiveServer
from tests.server.openai.responses.test_background import ended, feed, turn_of

RETRY = {"x-stainless-retry-count": "1"}
NO_ANSWER = EngineClosedError("The engine has not answered within 30 s; it may still do the work.")
DIED = EngineDiedError("The engine's process died.")
DOWN = EngineClosedError("The engine accepts no calls: it is starting.")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background, "RETRY_S", 0.01)


@pytest.fixture
def client(server):
    with server.client(timeout=TIMEOUT_S) as made:
        yield made


@contextlib.contextmanager
def losing(server, kind: type, error: Exception, *, applies: bool = True) -> Iterator[None]:
    """Make changes of a kind raise this error, whether or not they were applied."""
    apply = server.engine.apply

    async def lose(change) -> None:
        if applies or not isinstance(change, kind):
            await apply(change)
        if isinstance(change, kind):
            raise error

    server.on_loop(lambda: setattr(server.engine, "apply", lose))
    try:
        yield
    finally:
        server.on_loop(lambda: setattr(server.engine, "apply", apply))


def queue_without_a_word(server, client, error: Exception = NO_ANSWER, **options) -> None:
    with losing(server, QueueResponse, error), pytest.raises(openai.InternalServerError):
        client.responses.create(input="hi", background=True, **options)


def only_id(server) -> str:
    (record,) = server.harness.services.history.unfinished_background()
    return record.response_id


def running(server) -> int:
    return server.on_loop(lambda: server.responses.background.num_running)


@pytest.mark.parametrize("headers", [RETRY, {"Idempotency-Key": "k"}], ids=["retry", "key"])
def test_a_retry_gets_a_response_that_runs(server, client, headers):
    options = {"extra_headers": {name: value for name, value in headers.items() if headers is not RETRY}}
    queue_without_a_word(server, client, **options)
    again = client.responses.create(input="hi", background=True, extra_headers=headers)
    assert again.status == "queued"
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, again.id).output_text == "hello" and len(server.engine.turns) == 1


def test_it_runs_without_a_retry(server, client):
    queue_without_a_word(server, client)
    response_id = only_id(server)
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, response_id).output_text == "hello"


def test_it_runs_once_the_engine_is_back(server, client):
    queue_without_a_word(server, client, DIED)
    server.on_loop(lambda: setattr(server.engine, "state", "starting"))
    response_id = only_id(server)

    def back() -> None:
        server.engine.restart()
        server.engine.state = "ready"

    server.on_loop(back)
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, response_id).output_text == "hello"


@contextlib.contextmanager
def stuck(server) -> Iterator[list]:
    """Yield what was sent to an engine that accepts changes without answering. Afterwards it applies them in
    order.
    """
    engine, late = server.engine, []
    apply, call = engine.apply, engine.call

    async def apply_late(change) -> None:
        late.append(change)
        raise NO_ANSWER

    async def no_answer(name, *arguments):
        raise NO_ANSWER

    async def catch_up() -> None:
        while late:
            await apply(late.pop(0))

    async def apply_in_order(change) -> None:
        await catch_up()
        await apply(change)

    async def answer(name, *arguments):
        await catch_up()
        return await call(name, *arguments)

    def turn_to(to_apply, to_call) -> None:
        server.on_loop(lambda: (setattr(engine, "apply", to_apply), setattr(engine, "call", to_call)))

    turn_to(apply_late, no_answer)
    try:
        yield late
    finally:
        turn_to(apply_in_order, answer)


def test_it_runs_if_the_engine_queues_it_late(server, client):
    """A stuck engine processes its messages in order: once it answers again, all earlier ones are done."""
    with stuck(server) as late:
        with pytest.raises(openai.InternalServerError):
            client.responses.create(input="hi", background=True)
        assert len(late) == 1 and not server.harness.services.history.unfinished_background()
    feed(server, turn_of(server), "hello", end=True)
    wait_until(lambda: not running(server))
    (record,) = [change.draft for change in server.engine.changes if isinstance(change, QueueResponse)]
    assert client.responses.retrieve(record.response_id).output_text == "hello"


@pytest.mark.parametrize("headers", [RETRY, {"Idempotency-Key": "k"}], ids=["retry", "key"])
@pytest.mark.parametrize("is_looked_for", [False, True], ids=["before a look", "behind a look"])
def test_a_retry_gets_a_response_that_is_queued_late(server, client, monkeypatch, headers, is_looked_for):
    """It waits until the outcome is certain: a second response would run for no client, or be refused."""
    if not is_looked_for:
        monkeypatch.setattr(background, "RETRY_S", 60.0)
    options = {"extra_headers": {name: value for name, value in headers.items() if headers is not RETRY}}
    with stuck(server):
        with pytest.raises(openai.InternalServerError):
            client.responses.create(input="hi", background=True, **options)
        for _ in range(2):  # without an answer a retry learns nothing new
            with pytest.raises(openai.InternalServerError) as raised:
                client.responses.create(input="hi", background=True, extra_headers=headers)
            assert raised.value.status_code == 503
    again = client.responses.create(input="hi", background=True, extra_headers=headers)
    assert again.status == "queued"
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, again.id).output_text == "hello" and len(server.engine.turns) == 1
    assert len([change for change in server.engine.changes if isinstance(change, QueueResponse)]) == 1


def test_waiters_for_the_same_answer_share_one_lookup(server, client):
    engine, responses = server.engine, server.responses.background
    history, looks, waiting = server.harness.services.history, [], []
    unfinished, goes_on = history.unfinished_background, asyncio.Event()

    async def answer_late(name, *arguments):
        waiting.append(name)
        await goes_on.wait()

    async def wait() -> None:
        history.unfinished_background = lambda: looks.append(None) or unfinished()
        waits = [asyncio.ensure_future(responses.reconcile()) for _ in range(5)]
        while len(waiting) < len(waits):
            await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(*waits)

    server.on_loop(lambda: setattr(engine, "call", answer_late))
    queue_without_a_word(server, client)
    server.wait_for(wait())
    assert len(looks) == 1 and not responses.has_lost_confirmations
    feed(server, turn_of(server), "hello", end=True)
    wait_until(lambda: not running(server))


def test_a_retry_of_a_response_that_was_never_queued_queues_it(server, client):
    with stuck(server) as late:
        with pytest.raises(openai.InternalServerError):
            client.responses.create(input="hi", background=True)
        late.clear()  # the engine ended before it processed them
    again = client.responses.create(input="hi", background=True, extra_headers=RETRY)
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, again.id).output_text == "hello" and len(server.engine.turns) == 1


def test_a_client_that_asks_for_it_makes_it_run(tmp_path, monkeypatch):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        queued = client.responses.create(input="hi", background=True)
        turn_of(server)
    monkeypatch.setattr(HistoryReader, "unfinished_background", lambda _: [])
    with LiveServer(path, say("hello")) as server, server.client() as client:
        assert client.responses.retrieve(queued.id).status in ("queued", "in_progress")
        assert ended(client, queued.id).output_text == "hello"
        assert len(server.engine.turns) == 1


def test_a_response_that_is_being_queued_is_not_taken_for_unfinished(server, client):
    """It is in the history before the engine's answer arrives."""
    apply, looks = server.engine.apply, []
    history = server.harness.services.history
    unfinished = history.unfinished_background

    def look():
        looks.append(unfinished())
        return looks[-1]

    async def wait_for_a_look(change) -> None:
        await apply(change)
        server.engine.restart()
        while not looks:
            await asyncio.sleep(0)

    def prepare() -> None:
        history.unfinished_background = look
        server.engine.apply = wait_for_a_look

    server.on_loop(prepare)
    queued = client.responses.create(input="hi", background=True)
    assert [record.response_id for record in looks[0]] == [queued.id]
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, queued.id).output_text == "hello" and len(server.engine.turns) == 1


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_response_that_cannot_be_cancelled_continues(server, client, how):
    made = client.conversations.create()
    queued = client.responses.create(input="hi", conversation=made.id, background=True)
    turn = turn_of(server)
    with losing(server, EndResponse, DOWN, applies=False):
        with pytest.raises(openai.InternalServerError) as raised:
            getattr(client.responses, how)(queued.id)
        assert raised.value.status_code == 503
        assert not turn.cancelled and running(server) == 1 and len(server.responses.locks) == 1
    feed(server, turn, "hello", end=True)
    assert ended(client, queued.id).output_text == "hello"
    wait_until(lambda: not server.responses.locks)
    assert len(client.conversations.items.list(made.id).data) == 2


def test_a_cancellation_whose_answer_was_lost_is_reported(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    first = next(stream)
    turn = turn_of(server)
    with losing(server, EndResponse, DIED), pytest.raises(openai.InternalServerError):
        client.responses.cancel(first.response.id)
    server.on_loop(lambda: turn.fail(DIED))
    rest = list(stream)
    assert rest[-1].response.status == "cancelled"
    wait_until(lambda: not running(server))
    assert client.responses.retrieve(first.response.id).status == "cancelled"
    assert len(server.engine.turns) == 1


def test_a_cancelled_response_whose_answer_was_lost_is_not_computed_to_its_end(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    first = next(stream)
    turn = turn_of(server)
    with losing(server, EndResponse, NO_ANSWER), pytest.raises(openai.InternalServerError):
        client.responses.cancel(first.response.id)
    wait_until(lambda: turn.cancelled)
    assert list(stream)[-1].response.status == "cancelled"
    assert client.responses.retrieve(first.response.id).status == "cancelled"
    wait_until(lambda: not running(server))


def test_a_client_that_cancels_may_leave_before_the_end(server, client):
    """Its turn takes long to end. Code whose client left must not continue as if the turn had ended."""
    queued = client.responses.create(input="hi", background=True)
    turn, history = turn_of(server), server.harness.services.history
    is_asked, may_end = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> None:
        is_asked.set()
        await may_end.wait()

    async def leave() -> bool:
        turn.cancel = end_slowly
        record = history.response("", queued.id)
        cancelling = asyncio.ensure_future(server.responses.background.cancel("", record.response_id))
        await is_asked.wait()
        cancelling.cancel()
        await asyncio.wait({cancelling})
        may_end.set()
        return cancelling.cancelled()

    assert server.wait_for(leave())
    wait_until(lambda: not running(server))


@pytest.mark.parametrize("committed", [False, True])
def test_a_history_that_is_briefly_unreadable_ends_nothing(server, client, committed):
    queued = client.responses.create(input="hi", background=True)
    turn, history = turn_of(server), server.harness.services.history
    refused = []

    def refuse_twice(owner, response_id):
        refused.append(response_id)
        if len(refused) == 2:
            del history.response
        raise HistoryError("disk I/O error")

    def work() -> None:
        history.response = refuse_twice
        if committed:
            turn.feed("hello")
            turn.finish()
        else:
            turn.fail(DIED)

    server.on_loop(work)
    if not committed:
        feed(server, turn_of(server, 1), "hello", end=True)
    wait_until(lambda: not running(server))
    assert ended(client, queued.id).output_text == "hello" and len(refused) == 2
    assert len(server.engine.turns) == (1 if committed else 2)


def test_a_response_that_is_deleted_before_its_end_arrives_is_gone(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    first = next(stream)
    turn = turn_of(server)
    forget = DeleteResponse(owner="", response_id=first.response.id)
    server.wait_for(server.engine.apply(forget))
    server.on_loop(lambda: turn.fail(DIED))
    assert [getattr(event, "code", None) for event in stream][-2] == "not_found"
    wait_until(lambda: not running(server))


def test_an_unexpected_error_fails_it(server, client, monkeypatch):
    """If it stayed queued, it would run and fail again at every lookup."""

    async def broken(*_, **__):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(background, "run_turns", broken)
    queued = client.responses.create(input="hi", background=True)
    failed = ended(client, queued.id)
    assert (failed.status, failed.error.message) == ("failed", INTERNAL_ERROR)
    wait_until(lambda: not running(server))


def test_an_unreadable_response_does_not_keep_the_others_from_running(tmp_path, monkeypatch, caplog):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        bad, good = (client.responses.create(input=text, background=True) for text in ("bad", "good"))
        turn_of(server, 1)
    head_of = background.head_of

    def broken(record, template_input):
        if record.response_id == bad.id:
            raise KeyError("unexpected")
        return head_of(record, template_input)

    monkeypatch.setattr(background, "head_of", broken)
    with LiveServer(path, say("hello")) as server, server.client() as client:
        unfinished = server.harness.services.history.unfinished_background
        wait_until(lambda: [record.response_id for record in unfinished()] == [bad.id])
        queue_without_a_word(server, client)  # later responses are found as well
        wait_until(lambda: [record.response_id for record in unfinished()] == [bad.id])
        assert ended(client, good.id).output_text == "hello" and len(server.engine.turns) == 2
    assert "could not be run" in caplog.text
