"""A history that is far: nobody waits for what another request reads, and what is read late is read anew."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pensieve_jax.server.api.repeats import Repeats
from tests.server.api.live import LiveServer
from tests.server.api.test_background import ended, feed, turn_of, wait_until
from tests.server.api.test_repeats import at_once
from tests.server.fakes import say


class Slow:
    """A reader that waits where it is told to."""

    is_far = True

    def __init__(self, reader) -> None:
        self._reader = reader
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_inside = 0

    def __getattr__(self, name):
        found = getattr(self._reader, name)

        def read(*args, **options):
            self.num_inside += 1
            try:
                assert threading.current_thread().name.startswith("aside")
                assert self.is_open.wait(20)
                return found(*args, **options)
            finally:
                self.num_inside -= 1

        return read if callable(found) else found


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("hello")) as server:
        server.slow = Slow(server.harness.services.history)
        server.on_loop(lambda: use(server))
        yield server


def use(server) -> None:
    server.harness.services.history = server.slow
    server.responses._repeats._history = server.slow
    server.harness.services.resolver.index._source._reader = server.slow


READS = {
    "response": lambda client, found: client.responses.retrieve(found["response"]),
    "stream": lambda client, found: list(client.responses.retrieve(found["response"], stream=True)),
    "input items": lambda client, found: list(client.responses.input_items.list(found["response"])),
    "deletion": lambda client, found: client.responses.delete(found["response"]),
    "next turn": lambda client, found: client.responses.create(
        input="and", previous_response_id=found["response"]
    ),
    "next completion": lambda client, found: client.completions.create(
        model="fake", prompt="x", extra_body={"previous_response_id": found["response"]}
    ),
    "reference": lambda client, found: client.responses.create(
        input=[{"type": "item_reference", "id": found["item"]}]
    ),
    "key": lambda client, found: client.responses.create(input="a", extra_headers={"idempotency-key": "k"}),
    "retry": lambda client, found: client.responses.create(
        input="hi", extra_headers={"x-stainless-retry-count": "1"}
    ),
    "conversation": lambda client, found: client.conversations.retrieve(found["conversation"]),
    "items": lambda client, found: list(client.conversations.items.list(found["conversation"])),
    "append": lambda client, found: client.conversations.items.create(
        found["conversation"], items=[{"role": "user", "content": "b"}]
    ),
    "turn of a conversation": lambda client, found: client.responses.create(
        input="c", conversation=found["conversation"]
    ),
    "chat": lambda client, found: client.chat.completions.create(
        model="fake",
        messages=[{"role": role, "content": "hi"} for role in ("user", "assistant", "user")],
    ),
}


@pytest.mark.parametrize("read", list(READS))
def test_others_are_answered_while_one_waits_for_the_history(server, read):
    """The reader asserts that it is asked in a thread."""
    with server.client() as client:
        first = client.responses.create(input="hi")
        found = {
            "response": first.id,
            "item": first.output[0].id,
            "conversation": client.conversations.create(items=[{"role": "user", "content": "a"}]).id,
        }
        server.slow.is_open.clear()
        results = []
        asking = threading.Thread(target=lambda: results.append(READS[read](client, found)))
        asking.start()
        wait_until(lambda: server.slow.num_inside)
        with server.client() as other:
            assert other.models.list().data and other.responses.create(input="ho", store=False).output_text
        assert not results
        server.slow.is_open.set()
        asking.join(20)
        assert results


def test_a_response_that_ends_while_it_is_read_is_not_run_again(tmp_path):
    with LiveServer(tmp_path / "history.sqlite") as server, server.client() as client:
        server.slow = Slow(server.harness.services.history)
        server.on_loop(lambda: use(server))
        queued = client.responses.create(input="hi", background=True)
        turn = turn_of(server)
        feed(server, turn, "hel")
        wait_until(lambda: client.responses.retrieve(queued.id).status == "in_progress")
        background, key = server.responses.background, ("", queued.id)
        run = server.on_loop(lambda: background._runs[key])
        num_reads = 0

        def stale(*args):
            nonlocal num_reads
            num_reads += 1
            found = server.slow._reader.response(*args)
            if num_reads == 1:  # by the time that this arrives it has ended
                feed(server, turn, "lo", end=True)
                wait_until(lambda: key not in background._runs)
            return found

        record = server.wait_for(background.current("", stale, *key))
        assert num_reads == 2 and record.status == "completed" and run.has_ended
        assert server.on_loop(lambda: background.adopt(record)) is None
        assert ended(client, queued.id).output_text == "hello"


def test_of_two_with_a_key_one_runs_however_late_the_history_answers():
    """The other began, or ended, while the first waited for what the history had said before."""

    class History:
        def __init__(self) -> None:
            self.kept = None

        def idempotent(self, owner, key, now_s):
            return self.kept

        def response(self, owner, response_id):
            return response_id

    class Kept:
        body_sha256, became = "a", "resp_a"

    class Run:
        body_sha256 = "a"

    async def ask(meanwhile) -> object:
        history, looks = History(), []

        async def read(owner, work, *args):
            found = await at_once(owner, work, *args)
            looks.append(found)
            if len(looks) == 1:
                meanwhile(repeats, history)
            return found

        repeats = Repeats(history, 0.0, read)
        return await repeats.by_key("ann", "k", "a", 1.0)

    run = Run()

    def begins(repeats, history) -> None:
        repeats.start("ann", "k", run)

    def ends(repeats, history) -> None:
        repeats.start("ann", "k", run)
        history.kept = Kept()
        repeats.end("ann", "k")

    assert asyncio.run(ask(lambda *_: None)) is None
    assert asyncio.run(ask(begins)) is run
    assert asyncio.run(ask(ends)) == "resp_a"
