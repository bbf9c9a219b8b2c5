"""A remote history: requests do not wait for each other's reads, and stale reads are repeated."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from pensieve_jax.server.openai.responses.retries import IdempotencyStore
from pensieve_jax.server.workers import IO_THREADS
from tests.deadlines import TIMEOUT_S, wait_until
from tests.server.fakes import say
from tests.server.live import LiveServer
from tests.server.openai.responses.test_background import ended, feed, turn_of
from tests.server.openai.responses.test_retries import at_once


class Slow:
    """A reader that waits on demand."""

    is_remote = True

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
                assert threading.current_thread().name == "io-work"
                assert self.is_open.wait(TIMEOUT_S)
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
    server.responses._idempotency._history = server.slow
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
    """The reader asserts that it is called in a thread."""
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
        asking.join(TIMEOUT_S)
        assert results


NEEDS_NO_HISTORY = {
    "response": lambda client: client.responses.create(input="ho", store=False),
    "chat": lambda client: client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}]
    ),
    "completion": lambda client: client.completions.create(model="fake", prompt="x"),
    "long text": lambda client: client.responses.input_tokens.count(input="x" * 30_000),
}


@pytest.mark.parametrize("ask", list(NEEDS_NO_HISTORY))
def test_a_hanging_history_blocks_only_requests_that_need_it(server, ask):
    with server.client() as client:
        first = client.responses.create(input="hi")
        server.slow.is_open.clear()
        asking = [threading.Thread(target=client.responses.retrieve, args=(first.id,)) for _ in range(20)]
        for thread in asking:
            thread.start()
        wait_until(lambda: server.slow.num_inside == IO_THREADS)
        with server.client() as other:
            assert NEEDS_NO_HISTORY[ask](other)
        server.slow.is_open.set()
        for thread in asking:
            thread.join(TIMEOUT_S)


def test_two_requests_of_one_key_that_are_planned_at_the_same_time_run_once(server):
    with server.client() as client:
        first = client.responses.create(input="hi")
        server.slow.is_open.clear()
        answers = []

        def ask() -> None:
            with server.client() as other:
                answers.append(
                    other.responses.create(
                        input="a", previous_response_id=first.id, extra_headers={"idempotency-key": "k"}
                    )
                )

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        wait_until(lambda: server.slow.num_inside >= 2)
        server.slow.is_open.set()
        for thread in asking:
            thread.join(TIMEOUT_S)
        assert len({one.id for one in answers}) == 1 and len(answers) == len(server.engine.turns) == 2


def test_a_lookup_ends_although_others_keep_ending():
    class History:
        def idempotent(self, owner, key, now_s):
            return None

    class Run:
        body_sha256 = "b"

    async def ask() -> int:
        looks = []

        async def read(owner, work, *args):
            looks.append(await at_once(owner, work, *args))
            repeats.start("bob", "other", Run())
            repeats.end("bob", "other")
            return looks[-1]

        repeats = IdempotencyStore(History(), 0.0, read)
        assert await repeats.by_key("ann", "k", "a", 1.0) is None
        return len(looks)

    assert asyncio.run(ask()) == 1


def test_work_that_waits_forever_does_not_keep_the_process_from_ending():
    program = """if True:
        import asyncio, threading
        from pensieve_jax.server.workers import run_io
        async def main():
            task = asyncio.ensure_future(run_io("", threading.Event().wait))
            await asyncio.sleep(0)
            task.cancel()
        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_S)


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
            if num_reads == 1:  # it has ended by the time that this answer arrives
                feed(server, turn, "lo", end=True)
                wait_until(lambda: key not in background._runs)
            return found

        record = server.wait_for(background.current("", stale, *key))
        assert num_reads == 2 and record.status == "completed" and run.has_ended
        assert server.on_loop(lambda: background.run_queued(record)) is None
        assert ended(client, queued.id).output_text == "hello"


def test_one_of_two_requests_with_a_key_runs_however_late_the_history_answers():
    """The other began or ended while the first waited for an answer that the history had given before."""

    class History:
        def __init__(self) -> None:
            self.stored = None

        def idempotent(self, owner, key, now_s):
            return self.stored

        def response(self, owner, response_id):
            return response_id

    class StoredKey:
        body_sha256, result_id = "a", "resp_a"

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

        repeats = IdempotencyStore(history, 0.0, read)
        return await repeats.by_key("ann", "k", "a", 1.0)

    run = Run()

    def begins(repeats, history) -> None:
        repeats.start("ann", "k", run)

    def ends(repeats, history) -> None:
        repeats.start("ann", "k", run)
        history.stored = StoredKey()
        repeats.end("ann", "k")

    assert asyncio.run(ask(lambda *_: None)) is None
    assert asyncio.run(ask(begins)) is run
    assert asyncio.run(ask(ends)) == "resp_a"
