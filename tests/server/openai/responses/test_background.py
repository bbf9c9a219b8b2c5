"""Background responses: queued before the answer, then run, cancelled, followed, and run again."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from pensieve_jax.core.errors import (
    EngineDiedError,
    HistoryBusyError,
    HistoryError,
    HistoryMismatchError,
    StepFailedError,
)
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.server_tables import responses_table
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    DeleteResponse,
    Expire,
    QueueResponse,
    StartResponse,
)
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.openai.responses import background
from pensieve_jax.server.openai.responses.background import BackgroundResponses
from tests.deadlines import wait_until
from tests.server.fakes import say
from tests.server.live import START_S, LiveServer


def turn_of(server, index: int = -1):
    """Return the engine's turn, once it exists."""
    wait_until(lambda: len(server.engine.turns) > (index if index >= 0 else 0))
    return server.engine.turns[index]


def feed(server, turn, *pieces: str, end: bool = False) -> None:
    def work() -> None:
        for piece in pieces:
            turn.feed(piece)
        if end:
            turn.feed("", (257,))
            turn.finish()

    server.on_loop(work)


def ended(client, response_id: str):
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def test_a_response_is_queued_running_and_completed(server, client):
    queued = client.responses.create(input="hi", background=True)
    assert queued.status == "queued" and queued.background and queued.output == [] and queued.usage is None
    turn = turn_of(server)
    of_it = [change for change in server.engine.changes if not isinstance(change, Expire)]
    assert list(map(type, of_it)) == [QueueResponse, StartResponse]
    assert f"resp_{turn.turn_id}" == queued.id and turn.spec.params.seed is not None
    feed(server, turn, "hel")
    wait_until(lambda: client.responses.retrieve(queued.id).status == "in_progress")
    feed(server, turn, "lo", end=True)
    done = ended(client, queued.id)
    assert done.output_text == "hello" and done.status == "completed" and done.id == queued.id
    following = client.responses.create(input="and", previous_response_id=queued.id, background=True)
    feed(server, turn_of(server, 1), "so", end=True)
    assert ended(client, following.id).output_text == "so"


def test_it_continues_when_its_client_leaves(server, client):
    with client.responses.create(input="hi", background=True, stream=True) as stream:
        first = next(iter(stream))
    turn = turn_of(server)
    feed(server, turn, "hello", end=True)
    assert ended(client, first.response.id).output_text == "hello"
    assert not turn.cancelled


def test_a_stream_is_the_same_from_any_starting_point(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    created, queued = next(stream), next(stream)
    assert (created.type, queued.type) == ("response.created", "response.queued")
    turn = turn_of(server)
    feed(server, turn, "a\u00e9", "\U0001f600 b")  # two bytes, and four, for one character each
    live = [created, queued, *(next(stream) for _ in range(4))]
    response_id = created.response.id
    late = iter(client.responses.retrieve(response_id, stream=True, starting_after=4))
    feed(server, turn, "c", end=True)
    live += list(stream)
    assert [event.sequence_number for event in live] == list(range(len(live)))
    deltas = [event.delta for event in live if event.type == "response.output_text.delta"]
    assert deltas == ["a", "\u00e9", "\U0001f600", " ", "b", "c"]
    ended(client, response_id)
    kept = [event.to_dict() for event in client.responses.retrieve(response_id, stream=True)]
    assert [event.to_dict() for event in live] == kept
    assert [event.to_dict() for event in late] == kept[5:]


def test_after_a_restart_it_runs_again_with_the_same_seed_and_sequence_numbers(tmp_path):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        stream = iter(client.responses.create(input="hi", background=True, stream=True))
        first = next(stream)
        turn = turn_of(server)
        feed(server, turn, "hel")
        before = [first, *(next(stream) for _ in range(5))]
        seed, node, prompt = turn.spec.params.seed, turn.spec.node, turn.spec.prompt_token_ids
    with LiveServer(path, start_s=START_S + 5) as server, server.client() as client:
        turn = turn_of(server)
        assert (turn.spec.params.seed, list(turn.spec.prompt_token_ids)) == (seed, list(prompt))
        assert (turn.spec.node.turn_id, turn.spec.node.chain) == (node.turn_id, node.chain)
        feed(server, turn, "hello", end=True)
        assert ended(client, first.response.id).output_text == "hello"
        events = [event.to_dict() for event in client.responses.retrieve(first.response.id, stream=True)]
        assert events[: len(before)] == [event.to_dict() for event in before]


def test_it_survives_the_engines_death(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    first = next(stream)
    turn = turn_of(server)
    feed(server, turn, "hel")
    server.on_loop(lambda: turn.fail(EngineDiedError("The engine's process died.")))
    wait_until(lambda: len(server.engine.turns) == 2)
    again = server.engine.turns[1]
    assert again.spec.params == turn.spec.params
    feed(server, again, "hello", end=True)
    assert ended(client, first.response.id).output_text == "hello"
    rest = list(stream)
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "hello"


def test_a_response_that_was_committed_before_the_engine_died_does_not_run_again(server, client):
    queued = client.responses.create(input="hi", background=True)
    turn = turn_of(server)

    def commit_and_die() -> None:
        turn.feed("hello")
        turn.finish()
        turn.output = None
        turn.fail(EngineDiedError("The engine's process died."))

    server.on_loop(commit_and_die)
    assert ended(client, queued.id).output_text == "hello"
    wait_until(lambda: not server.responses.background._runs)
    assert len(server.engine.turns) == 1


def test_a_failed_response_reports_its_error(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    first = next(stream)
    turn = turn_of(server)
    server.on_loop(lambda: turn.fail(StepFailedError("A step failed.")))
    failed = ended(client, first.response.id)
    assert failed.status == "failed" and failed.error.code == "server_error"
    assert failed.error.message.startswith("A step failed on the device")
    assert [event.type for event in stream][-2:] == ["error", "response.failed"]
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(input="and", previous_response_id=failed.id)
    assert raised.value.param == "previous_response_id"


def test_a_cancelled_response_ends(server, client):
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    first = next(stream)
    turn = turn_of(server)
    feed(server, turn, "hel")
    cancelled = client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled" and turn.cancelled
    assert client.responses.cancel(first.response.id).to_dict() == cancelled.to_dict()
    assert client.responses.retrieve(first.response.id).status == "cancelled"
    rest = list(stream)
    assert rest[-1].response.status == "cancelled"
    wait_until(lambda: not server.responses.background._runs)


@pytest.mark.parametrize("end", ["cancelled", "failed", "left"])
def test_a_stream_resumed_after_an_end_without_a_reply_has_that_end(server, client, end):
    """The deltas are gone, so the end alone follows the last event that the client got."""
    stream = iter(client.responses.create(input="hi", background=True, stream=True))
    response_id = next(stream).response.id
    turn = turn_of(server)
    feed(server, turn, "hello")
    last = [next(stream) for _ in range(7)][-1].sequence_number
    if end == "cancelled":
        client.responses.cancel(response_id)
    elif end == "failed":
        server.on_loop(lambda: turn.fail(StepFailedError("A step failed.")))
        ended(client, response_id)
    else:
        server.on_loop(lambda: (setattr(server.engine, "state", "draining"), turn.finish("cancelled")))
        wait_until(lambda: not server.responses.background._runs)
    types = {
        "cancelled": ["response.incomplete"],
        "failed": ["error", "response.failed"],
        "left": ["error"],
    }
    for starting_after in (last, last + 100):
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=starting_after))
        numbers = [event.sequence_number for event in rest]
        assert [event.type for event in rest] == types[end]
        assert numbers == list(range(starting_after + 1, starting_after + 1 + len(rest)))
    whole = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in whole] == list(range(len(whole)))


def test_only_background_responses_are_cancelled(server, client):
    server.on_loop(lambda: setattr(server.engine, "script", lambda turn: (turn.feed("x"), turn.finish())))
    done = client.responses.create(input="hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(done.id)
    queued = client.responses.create(input="hi", background=True)
    ended(client, queued.id)
    assert client.responses.cancel(queued.id).status == "completed"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_" + "0" * 32)


def test_deleted_while_it_runs(server, client):
    queued = client.responses.create(input="hi", background=True)
    turn = turn_of(server)
    client.responses.delete(queued.id)
    assert turn.cancelled
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(queued.id)


def test_a_response_cannot_be_continued_before_its_end(server, client):
    queued = client.responses.create(input="hi", background=True)
    turn_of(server)
    with pytest.raises(openai.ConflictError) as raised:
        client.responses.create(input="and", previous_response_id=queued.id)
    assert raised.value.code == "response_in_progress"
    assert raised.value.response.headers["retry-after"] == "1"


def test_it_locks_its_conversation(server, client):
    made = client.conversations.create()
    queued = client.responses.create(input="hi", conversation=made.id, background=True)
    turn = turn_of(server)
    for refused in (
        lambda: client.responses.create(input="and", conversation=made.id),
        lambda: client.conversations.items.create(made.id, items=[{"role": "user", "content": "x"}]),
        lambda: client.conversations.delete(made.id),
    ):
        with pytest.raises(openai.ConflictError) as raised:
            refused()
        assert raised.value.code == "conversation_locked"
        assert raised.value.response.headers["retry-after"] == "1"
    feed(server, turn, "hello", end=True)
    ended(client, queued.id)
    wait_until(lambda: not server.responses.locks)
    texts = [item.content[0].text for item in client.conversations.items.list(made.id, order="asc")]
    assert texts == ["hi", "hello"]


def test_a_too_long_context_is_not_queued(server, client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(input="x" * 5000, background=True)
    assert raised.value.code == "context_length_exceeded"
    assert not server.engine.changes[1:]  # the first change is the expiry's


def test_a_server_that_shuts_down_leaves_it_to_the_next_one(tmp_path):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        stream = iter(client.responses.create(input="hi", background=True, stream=True))
        first = next(stream)
        turn = turn_of(server)
        (run,) = server.on_loop(lambda: list(server.responses.background._runs.values()))

        def drain() -> None:
            server.engine.state = "draining"
            turn.finish("cancelled")

        server.on_loop(drain)
        rest = list(stream)
        assert rest[-1].type == "error" and "continues" in rest[-1].message
        assert run.error.headers == {"retry-after": "30"}, "the longest wait that is ever asked for"
        assert client.responses.retrieve(first.response.id).status == "queued"
    with LiveServer(path) as server, server.client() as client:
        feed(server, turn_of(server), "hello", end=True)
        assert ended(client, first.response.id).output_text == "hello"


def test_foreground_requests_go_first(server, client):
    first = client.responses.create(input="hi", background=True)
    turn_of(server)
    limits = server.harness.services.limits
    server.on_loop(lambda: limits._num_waiting_of.update(other=1))
    second = client.responses.create(input="ho", background=True)
    wait_until(lambda: client.responses.retrieve(second.id).status == "queued")
    assert len(server.engine.turns) == 1
    server.on_loop(limits._num_waiting_of.clear)
    feed(server, turn_of(server, 1), "hello", end=True)
    assert ended(client, second.id).output_text == "hello"
    feed(server, server.engine.turns[0], "hello", end=True)
    assert ended(client, first.id).output_text == "hello"


def test_a_queued_response_that_has_not_started_reports_that_in_its_stream(tmp_path, monkeypatch):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        queued = client.responses.create(input="hi", background=True)
        turn_of(server)
    # the state before the server looked for unfinished ones
    monkeypatch.setattr(HistoryReader, "unfinished_background", lambda _: [])
    with LiveServer(path) as server, server.client() as client:
        server.on_loop(lambda: setattr(server.engine, "state", "draining"))
        events = list(client.responses.retrieve(queued.id, stream=True))
        assert (events[-1].type, events[-1].code) == ("error", "overloaded")
        assert client.responses.retrieve(queued.id).status == "queued"


def test_a_failure_that_could_not_be_written_is_written_later(server, client):
    queued = client.responses.create(input="hi", background=True)
    turn = turn_of(server)
    apply, refused = server.engine.apply, []

    async def refuse_twice(change) -> None:
        if len(refused) < 2:
            refused.append(change)
            raise HistoryError("The disk is full.")
        await apply(change)

    def fail() -> None:
        server.engine.apply = refuse_twice
        turn.fail(StepFailedError("A step failed."))

    server.on_loop(fail)
    failed = ended(client, queued.id)
    assert (failed.status, len(refused)) == ("failed", 2)
    assert failed.error.message.startswith("A step failed on the device")
    wait_until(lambda: not server.responses.background._runs)


def test_a_history_that_cannot_be_read_at_the_start_is_read_later(tmp_path, monkeypatch):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        queued = client.responses.create(input="hi", background=True)
        turn_of(server)
    read, refused = HistoryReader.unfinished_background, []

    def refuse_once(reader):
        if not refused:
            refused.append(reader)
            raise HistoryError("The file is locked.")
        return read(reader)

    monkeypatch.setattr(HistoryReader, "unfinished_background", refuse_once)
    with LiveServer(path, start_s=START_S + 5) as server, server.client() as client:
        feed(server, turn_of(server), "hello", end=True)
        assert ended(client, queued.id).output_text == "hello"


@pytest.mark.parametrize("num_times", [1, 3])
def test_unfinished_responses_run_although_the_history_failed_at_first(
    tmp_path, monkeypatch, caplog, num_times
):
    path = tmp_path / "history.sqlite"
    with LiveServer(path) as server, server.client() as client:
        queued = client.responses.create(input="hi", background=True)
        turn_of(server)
    reconcile, refused = BackgroundResponses.reconcile, []

    async def refuse(background):
        if len(refused) < num_times:
            refused.append(background)
            raise HistoryMismatchError("The database has another model's tables.")
        await reconcile(background)

    monkeypatch.setattr(BackgroundResponses, "reconcile", refuse)
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    with LiveServer(path, start_s=START_S + 5) as server, server.client() as client:
        feed(server, turn_of(server), "hello", end=True)
        assert ended(client, queued.id).output_text == "hello"
    told = [record for record in caplog.records if "could not be run; trying again" in record.message]
    assert len(told) == 1 and isinstance(told[0].exc_info[1], HistoryMismatchError)


def test_a_stopped_runner_of_unfinished_responses_is_logged(tmp_path, monkeypatch, caplog):
    async def broken(background):
        raise KeyError("nobody expected it")

    monkeypatch.setattr(BackgroundResponses, "reconcile", broken)
    with LiveServer(tmp_path / "history.sqlite"):
        wait_until(lambda: "restart the server" in caplog.text)


def test_expired_responses_are_deleted_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(responses_table, "MAX_EXPIRED", 1)
    path = tmp_path / "history.sqlite"
    with LiveServer(path, say("hello")) as server, server.client() as client:
        ids = [client.responses.create(input="hi").id for _ in range(3)]
    settings, start_s = ServerSettings(confirm_clock="2026-10-22"), START_S + 31 * 24 * 3600
    with LiveServer(path, start_s=start_s, settings=settings) as server, server.client() as client:
        wait_until(lambda: len(server.engine.changes) == 3)
        for response_id in ids:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)


def test_a_queued_response_survives_the_deletion_of_its_parent(tmp_path):
    """The parent is deleted while nothing runs yet, as when foreground requests go first."""
    path = tmp_path / "history.sqlite"
    with LiveServer(path, say("hello")) as server, server.client() as client:
        first = client.responses.create(input="hi")
        limits = server.harness.services.limits
        server.on_loop(lambda: limits._num_waiting_of.update(other=1))
        second = client.responses.create(input="ho", previous_response_id=first.id, background=True)
        client.responses.delete(first.id)
        server.on_loop(limits._num_waiting_of.clear)
        assert ended(client, second.id).output_text == "hello"


def test_an_expired_turn_is_not_continued_by_its_messages(tmp_path):
    path = tmp_path / "history.sqlite"
    with LiveServer(path, say("hello")) as server, server.client() as client:
        first = client.responses.create(input="hi")
        # an expiry sends the same change, without notice
        forget = DeleteResponse(owner="", response_id=first.id)
        server.wait_for(server.engine.apply(forget))
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        again = client.responses.create(input=[*said, {"role": "user", "content": "ho"}], background=True)
        assert ended(client, again.id).output_text == "hello"
        assert server.engine.turns[-1].spec.node.parent_id is None


def test_a_change_on_its_way_is_a_conflict_of_the_request_and_fails_no_queued_response(server, client):
    """The engine applies an append that was sent before the response locked the conversation."""
    made = client.conversations.create().id
    engine, apply = server.engine, server.engine.apply
    sent, released, applied = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def in_order(change) -> None:
        if isinstance(change, AppendItems):
            sent.set()
            await released.wait()
            await apply(change)
            applied.set()
            return
        if isinstance(change, QueueResponse):
            released.set()
            await applied.wait()
        await apply(change)

    server.on_loop(lambda: setattr(engine, "apply", in_order))
    asked = [{"role": "user", "content": "first"}]
    append = threading.Thread(target=lambda: client.conversations.items.create(made, items=asked))
    append.start()
    server.wait_for(sent.wait())
    with pytest.raises(openai.ConflictError) as raised:
        client.responses.create(input="hi", conversation=made, background=True)
    append.join()
    assert raised.value.code == "conversation_locked"
    wait_until(lambda: server.on_loop(lambda: server.responses.background.num_running) == 0)
    assert not engine.turns
    queued = client.responses.create(input="hi", conversation=made, background=True)
    feed(server, turn_of(server), "hello", end=True)
    assert ended(client, queued.id).status == "completed"


def test_a_lock_of_another_program_fails_no_background_response(server, client, monkeypatch):
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    queued = client.responses.create(input="hi", background=True)
    turn = turn_of(server)
    server.on_loop(lambda: turn.fail(HistoryBusyError("locked")))
    feed(server, turn_of(server, 1), "hello", end=True)
    assert ended(client, queued.id).output_text == "hello"
