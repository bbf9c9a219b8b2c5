"""Retried requests do not run again; the server remembers them for a limited time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import openai
import pytest

from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.server.openai.responses.context import request_context
from pensieve_jax.server.openai.responses.retries import UNDELIVERED_LIFETIME_S, IdempotencyStore, TtlCache
from pensieve_jax.server.workers import INLINE_CHARACTERS, WorkEstimate
from tests.deadlines import TIMEOUT_S, wait_until
from tests.server.fakes import say
from tests.server.live import START_S, LiveServer
from tests.server.openai.responses.test_background import feed, turn_of
from tests.server.stale_keys import found_before_its_deletion

RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("hello")) as running:
        yield running


def keyed(key: str = "k") -> dict:
    return {"Idempotency-Key": key}


def test_the_same_key_gives_the_same_response(server, client):
    first = client.responses.create(input="hi", extra_headers=keyed())
    again = client.responses.create(input="hi", extra_headers=keyed())
    assert again.to_dict() == first.to_dict() and len(server.engine.turns) == 1
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        client.responses.create(input="other", extra_headers=keyed())
    assert raised.value.code == "idempotency_key_reused"
    client.responses.create(input="hi", extra_headers=keyed("other"))
    assert len(server.engine.turns) == 2


def test_a_key_is_free_once_its_response_is_deleted(server, client):
    services = server.harness.services
    first = client.responses.create(input="hi", extra_headers=keyed()).id
    known = services.history.idempotent("", "k", services.now_s())
    client.responses.delete(first)
    with found_before_its_deletion(services.history, known):
        assert client.responses.create(input="hi", extra_headers=keyed()).id != first


def test_a_key_requires_a_stored_response(server, client):
    """Otherwise the request would run twice, and a different body would not be noticed."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(input="hi", store=False, extra_headers=keyed())
    assert (raised.value.param, raised.value.code) == ("Idempotency-Key", "invalid_value")
    assert not server.engine.turns
    client.responses.create(input="hi", extra_headers=keyed())


@pytest.mark.parametrize("said", ["hello", "h\u00e9llo \U0001f600 there"])
def test_a_stream_with_a_key_has_the_logprobs_of_one_without(tmp_path, said):
    def logprobs(client: openai.OpenAI, headers: dict) -> list:
        stream = client.responses.create(
            input="hi",
            stream=True,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            extra_headers=headers,
        )
        told = [event for event in stream if event.type == "response.output_text.delta"]
        return [one.to_dict() for event in told for one in event.logprobs]

    with LiveServer(tmp_path / "history.sqlite", say(said)) as server, server.client() as client:
        count = len(said.encode())  # plus the token that ended the reply, if it came with text
        without, with_key = logprobs(client, {})[:count], logprobs(client, keyed())
        assert len(without) == count and len(without[0]["top_logprobs"]) == 2
        assert with_key == without


def test_a_key_is_forgotten_after_a_day(server, client):
    first = client.responses.create(input="hi", extra_headers=keyed())
    server.on_loop(lambda: server.harness.clock.advance(24 * 3600 + 1))
    again = client.responses.create(input="hi", extra_headers=keyed())
    assert again.id != first.id


def test_a_key_attaches_to_the_running_turn(server, client):
    server.on_loop(lambda: setattr(server.engine, "script", None))
    answers = []

    def ask() -> None:
        with server.client() as another:
            answers.append(another.responses.create(input="hi", extra_headers=keyed()))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    turn = turn_of(server)
    with server.client() as third:
        events = iter(third.responses.create(input="hi", stream=True, extra_headers=keyed("s")))
        next(events)
        streamed = turn_of(server, 1)
        feed(server, streamed, "hello", end=True)
        again = list(third.responses.create(input="hi", stream=True, extra_headers=keyed("s")))
        assert again[-1].response.id == list(events)[-1].response.id
    feed(server, turn, "hello", end=True)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(answers) == 2 and answers[0].to_dict() == answers[1].to_dict()
    assert len(server.engine.turns) == 2


def test_a_keyed_request_that_failed_may_be_sent_again(server, client):
    server.on_loop(lambda: setattr(server.engine, "state", "draining"))
    with pytest.raises(openai.InternalServerError) as raised:
        client.responses.create(input="hi", extra_headers=keyed())
    assert raised.value.status_code == 503
    server.on_loop(lambda: setattr(server.engine, "state", "ready"))
    assert client.responses.create(input="hi", extra_headers=keyed()).output_text == "hello"


def test_a_background_response_with_a_key_runs_once(server, client):
    first = client.responses.create(input="hi", background=True, extra_headers=keyed())
    again = client.responses.create(input="hi", background=True, extra_headers=keyed())
    assert again.id == first.id
    wait_until(lambda: client.responses.retrieve(first.id).status == "completed")
    assert len(server.engine.turns) == 1


def test_a_repeated_request_is_a_new_one_if_the_first_was_answered(server, client):
    first = client.responses.create(input="hi")
    again = client.responses.create(input="hi", extra_headers=RETRY)
    assert again.id != first.id


def leave(server, meanwhile: Callable[[], object], **options) -> None:
    """Send a request, and disconnect without its answer once `meanwhile` has returned."""

    async def work() -> None:
        async with server.async_client() as leaving:
            asking = asyncio.ensure_future(leaving.responses.create(**options))
            await asyncio.to_thread(meanwhile)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(work())


def test_a_retry_gets_a_response_that_was_committed_after_its_client_left(server, client):
    server.on_loop(lambda: setattr(server.engine, "script", None))
    asked = {"input": "hi", "conversation": client.conversations.create().id}

    def commit_late(turn) -> None:
        """End the turn at the moment in which its client leaves, so that the cancellation comes too late."""

        async def cancel() -> None:
            turn.feed("hello")
            turn.finish()

        turn.cancel = cancel

    leave(server, lambda: commit_late(turn_of(server)), **asked)
    wait_until(lambda: not server.responses.locks)
    answer = client.responses.create(**asked, extra_headers=RETRY)
    assert answer.output_text == "hello" and len(server.engine.turns) == 1
    listed = client.conversations.items.list(asked["conversation"], order="asc")
    texts = [item.content[0].text for item in listed]
    assert texts == ["hi", "hello"]


def test_a_retry_gets_a_response_that_was_committed_before_the_engine_accepted_its_turn(server, client):
    """The engine died between the commit and its message; the client gets the error of a dead engine."""

    async def accepted() -> None:
        raise EngineDiedError("The engine's process died.")

    def commit_and_die(turn) -> None:
        turn.feed("hello")
        turn.finish()
        turn.accepted = accepted

    server.on_loop(lambda: setattr(server.engine, "script", commit_and_die))
    conversation = client.conversations.create().id
    with pytest.raises(openai.InternalServerError) as raised:
        client.responses.create(input="hi", conversation=conversation)
    assert raised.value.code == "step_failed"
    answer = client.responses.create(input="hi", conversation=conversation, extra_headers=RETRY)
    assert answer.output_text == "hello" and len(server.engine.turns) == 1
    assert len(client.conversations.items.list(conversation).data) == 2


def test_a_retry_gets_a_response_that_was_committed_before_its_stream_failed(server, client):
    """The engine died between the commit and its message of the end; the stream reports a failure."""

    def begin(turn) -> None:
        turn.accept()
        turn.feed("hel")

    def commit_and_die() -> None:
        turn = server.engine.turns[0]
        turn.feed("lo")
        turn.finish()
        turn.fail(EngineDiedError("The engine's process died."))

    server.on_loop(lambda: setattr(server.engine, "script", begin))
    conversation = client.conversations.create().id
    ask = partial(client.responses.create, input="hi", conversation=conversation, stream=True)
    events = []
    for event in ask():
        events.append(event)
        if event.type == "response.output_text.delta" and event.delta == "l":
            server.on_loop(commit_and_die)
    assert events[-1].type == "response.failed"
    wait_until(lambda: not server.responses.locks)
    server.on_loop(lambda: setattr(server.engine, "script", say("another")))
    again = list(ask(extra_headers=RETRY))[-1]
    assert again.type == "response.completed" and again.response.output_text == "hello"
    assert len(server.engine.turns) == 1
    assert len(client.conversations.items.list(conversation).data) == 2


def test_a_background_response_whose_queueing_lost_its_answer_is_not_queued_again(server, client):
    server.on_loop(lambda: setattr(server.engine, "script", None))
    apply = server.engine.apply

    async def apply_and_die(change) -> None:
        await apply(change)
        raise EngineDiedError("The engine's process died.")

    server.on_loop(lambda: setattr(server.engine, "apply", apply_and_die))
    with pytest.raises(openai.InternalServerError):
        client.responses.create(input="hi", background=True)
    server.on_loop(lambda: setattr(server.engine, "apply", apply))
    first = client.responses.create(input="hi", background=True, extra_headers=RETRY)
    again = client.responses.create(input="hi", background=True)
    assert first.id != again.id
    assert len(server.harness.services.history.unfinished_background()) == 2


def test_a_replay_keeps_an_ending_id_that_has_text(server, client):
    """The ending id need not be special to the tokenizer."""

    def end_with_a_mark(turn) -> None:
        turn.feed("hello")
        turn.feed("", tuple(b"!"))
        turn.finish()

    def prepare() -> None:
        server.engine.script = end_with_a_mark
        limits = replace(server.engine.info.limits, eos_token_ids=tuple(b"!"))
        server.engine.info = replace(server.engine.info, limits=limits)

    server.on_loop(prepare)
    for _ in range(2):
        events = list(client.responses.create(input="hi", stream=True, extra_headers=keyed()))
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "hello"
    replayed = list(client.responses.retrieve(events[-1].response.id, stream=True))
    assert [event.to_dict() for event in replayed] == [event.to_dict() for event in events]


def test_a_client_that_leaves_ends_its_turn(server, client):
    server.on_loop(lambda: setattr(server.engine, "script", None))
    with client.responses.create(input="hi", stream=True) as stream:
        next(iter(stream))
        turn = turn_of(server)
    wait_until(lambda: turn.cancelled)
    leave(server, lambda: turn_of(server, 1), input="hi")
    wait_until(lambda: server.engine.turns[1].cancelled)
    wait_until(lambda: server.harness.services.limits.num_in_engine == 0)
    assert server.engine.num_committed == 0 and len(server.harness.services.resolver.index) == 0


@pytest.mark.parametrize(("seconds", "is_same"), [(60, True), (300, False)])
def test_after_a_restart_a_retry_gets_what_was_committed_shortly_before(tmp_path, seconds, is_same):
    path = tmp_path / "history.sqlite"
    with LiveServer(path, say("hello")) as server, server.client() as client:
        first = client.responses.create(input="hi")
    with LiveServer(path, say("hello"), start_s=START_S + seconds) as server, server.client() as client:
        again = client.responses.create(input="hi", extra_headers=RETRY)
        assert (again.id == first.id) == is_same
        other = client.responses.create(input="hi")
        assert other.id not in (first.id, again.id)  # it was not marked as a retry


@pytest.mark.parametrize("stream", [False, True])
def test_after_a_restart_a_retry_gets_the_old_answer_once_and_only_for_a_while(tmp_path, stream):
    def ask(client, text: str, **options) -> str:
        answer = client.responses.create(input=text, stream=stream, **options)
        return list(answer)[-1].response.id if stream else answer.id

    path = tmp_path / "history.sqlite"
    with LiveServer(path, say("hello")) as server, server.client() as client:
        first, late = ask(client, "hi"), ask(client, "ho")

    with LiveServer(path, say("hello"), start_s=START_S + 60) as server, server.client() as client:
        assert ask(client, "hi", extra_headers=RETRY) == first
        assert ask(client, "hi", extra_headers=RETRY) != first
        server.on_loop(lambda: server.harness.clock.advance(UNDELIVERED_LIFETIME_S))
        assert ask(client, "ho", extra_headers=RETRY) != late


async def at_once(owner, work, *args):
    """Run the read at once, as for a history in a file."""
    return work(*args)


def test_a_retry_whose_answer_was_lost_too_may_be_repeated():
    """Covers lost answers, and turns that were in the history before the start."""

    class History:
        def response(self, owner: str, response_id: str) -> object:
            return response_id

        def by_body(self, owner: str, sha256: str, since_s: float) -> object:
            return Record()

    class Record:
        background, completed_at_s, response_id = False, 990.0, "resp_before"

    async def ask() -> None:
        repeats = IdempotencyStore(History(), 1000.0, at_once)
        repeats.add_undelivered("ann", "a", "resp_a", 1001.0)
        assert await repeats.by_body("ann", "a", 1002.0) == "resp_a"
        assert (await repeats.by_body("ann", "a", 1002.0)).response_id == "resp_before"
        assert await repeats.by_body("ann", "a", 1002.0) is None
        repeats.add_undelivered("ann", "a", "resp_before", 1003.0)
        assert await repeats.by_body("ann", "a", 1004.0) == "resp_before"
        assert await repeats.by_body("ann", "a", 1005.0) is None

    asyncio.run(ask())


def test_a_retry_gets_the_answer_that_its_client_did_not_wait_for(tmp_path):
    """The client leaves between the commit and the first byte of the answer."""

    def open_(server, headers: dict | None = None):
        return server.harness.open("POST", "/v1/responses", {"input": "hi"}, headers)

    async def leave(server) -> None:
        asked = open_(server)
        asked.takes.clear()
        while server.engine.num_committed == 0 or server.harness.services.limits.num_in_engine:
            await asyncio.sleep(0)
        asked.leave()
        asked.takes.set()
        await asked.task

    async def retry(server) -> bytes:
        return (await open_(server, RETRY).whole())[2]

    with LiveServer(tmp_path / "history.sqlite", say("hello")) as server:
        server.wait_for(leave(server))
        assert b"hello" in server.wait_for(retry(server)) and server.engine.num_committed == 1
        assert b"hello" in server.wait_for(retry(server)) and server.engine.num_committed == 2


def test_answers_without_a_retry_are_dropped():
    repeats = IdempotencyStore(None, 0.0, at_once)
    for number in range(100):
        repeats.add_undelivered("ann", str(number), f"resp_{number}", float(number))
    repeats.add_undelivered("ann", "later", "resp_later", 50.0 + UNDELIVERED_LIFETIME_S)
    assert repeats.num_undelivered == 50


def test_a_value_is_remembered_until_it_expires():
    recent: TtlCache[str, int] = TtlCache(10.0, 5)
    recent.put("a", 1, 100.0)
    assert recent.get("a", 109.5) == 1 and recent.get("b", 100.0) is None
    assert recent.get("a", 110.0) is None
    recent.put("a", 2, 109.0)
    assert recent.get("a", 118.5) == 2 and len(recent) == 1, "its time began anew"
    recent.put("b", 3, 118.5)
    assert len(recent) == 2
    recent.put("c", 4, 119.0)
    assert len(recent) == 2 and recent.get("b", 119.0) == 3, "what is over takes no room"


def test_only_the_latest_values_are_remembered():
    recent: TtlCache[str, int] = TtlCache(1000.0, 3)
    for time_s, key in enumerate("abcad"):
        recent.put(key, time_s, float(time_s))
    assert [recent.get(key, 5.0) for key in "abcd"] == [3, None, 2, 4]


def test_a_replaced_value_is_not_dropped():
    recent: TtlCache[str, int] = TtlCache(10.0, 3)
    recent.put("a", 1, 0.0)
    recent.put("a", 2, 0.0)
    recent.drop("a", 1)
    recent.drop("b", 1)
    assert recent.get("a", 0.0) == 2
    recent.drop("a", 2)
    assert len(recent) == 0


@pytest.mark.parametrize("background", [False, True])
def test_the_same_key_at_once_with_a_conversation_gets_one_response(tmp_path, monkeypatch, background):
    """Planning takes long here, so the second request arrives while the first one has the lock only."""
    began, goes_on = threading.Event(), threading.Event()
    plan = request_context

    def slow(*args, **kwargs):
        began.set()
        assert goes_on.wait(TIMEOUT_S)
        return plan(*args, **kwargs)

    with LiveServer(tmp_path / "history.sqlite", say("hello")) as server, server.client() as client:
        conversation = client.conversations.create().id
        is_long = WorkEstimate(INLINE_CHARACTERS + 1)
        monkeypatch.setattr("pensieve_jax.server.openai.responses.create.reading", lambda *_: is_long)
        monkeypatch.setattr("pensieve_jax.server.openai.responses.plan.request_context", slow)
        ask = partial(client.responses.create, input="hi", background=background, extra_headers=keyed())
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(ask, conversation=conversation)
            assert began.wait(TIMEOUT_S)
            by_key, asked = server.responses._idempotency.by_key, threading.Event()

            async def noted(*args):
                asked.set()
                return await by_key(*args)

            monkeypatch.setattr(server.responses._idempotency, "by_key", noted)
            second = pool.submit(ask, conversation=conversation)
            assert asked.wait(TIMEOUT_S)
            other = pool.submit(client.responses.create, input="ho", conversation=conversation)
            with pytest.raises(openai.ConflictError) as refused:
                other.result(TIMEOUT_S)
            assert refused.value.code == "conversation_locked"
            goes_on.set()
            assert first.result(TIMEOUT_S).id == second.result(TIMEOUT_S).id
        wait_until(lambda: not server.responses.locks and not server.responses._idempotency.num_running)
        assert len(server.engine.turns) == 1


def test_requests_with_one_key_share_the_error_that_refuses_them(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("hello")) as server, server.client() as client:
        conversation = client.conversations.create().id
        ask = partial(client.responses.create, input="hi", extra_headers=keyed())
        server.on_loop(lambda: server.responses.locks.add(("", conversation)))
        for _ in range(2):
            with pytest.raises(openai.ConflictError) as refused:
                ask(conversation=conversation)
            assert refused.value.code == "conversation_locked"
        server.on_loop(server.responses.locks.clear)
        with pytest.raises(openai.NotFoundError):
            ask(previous_response_id="resp_" + "0" * 32)
        assert ask(conversation=conversation).output_text == "hello", "the key was not used up"
