"""Turns over a socket pair, run by an engine on the fake runner: results, refusals, stalls and ends."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pensieve_jax import (
    AsyncEngine,
    ContextLengthError,
    ConversationBusyError,
    EngineClosedError,
    EngineDiedError,
    InvalidRequestError,
    SamplingParams,
    UnknownConversationError,
    UnknownTurnError,
)
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history import open_store
from pensieve_jax.history.server_tables.changes import (
    EndResponse,
    HistoryChange,
    QueueResponse,
    ResponseDraft,
    StartResponse,
    TakeBackStart,
)
from pensieve_jax.server.engine_process import wire
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import (
    Apply,
    Call,
    Report,
    Submit,
    sent_change,
    sent_spec,
)
from pensieve_jax.server.engine_process.supervisor import RestartPolicy
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError
from pensieve_jax.server.metrics import _COUNTERS, _GAUGES
from tests.engine.harness import Harness
from tests.history.drafts import draft_of
from tests.server.engine_process.fakes import (
    TIMEOUT_S,
    TOKENIZER,
    Brake,
    FakeEngines,
    expected,
    fake_engine,
    run,
    spec,
    until,
)


def test_a_turn_returns_what_the_engine_computes() -> None:
    async def work() -> None:
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            assert engine.state == "ready" and engine.epoch == 1 and engine.info.model_name == "fake"
            turn = engine.submit(spec([5, 6, 7], conversation_id="a"))
            await turn.accepted()
            deltas = [delta async for delta in turn]
            output = await turn.result()
            assert output == turn.output and turn.usage == output.usage
            assert output.token_ids == expected(engines.harness, spec([5, 6, 7]))
            assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
            assert "".join(delta.text for delta in deltas) == output.text
            again = await engine.submit(spec([8], conversation_id="a")).result()
            assert again.token_ids == expected(engines.harness, spec([8]), (5, 6, 7, *output.token_ids))
            assert again.usage.reused_gpu_tokens > 0
        assert engine.state == "dead"
        with pytest.raises(EngineClosedError):
            engine.submit(spec([5]))

    run(work())


def test_every_counter_that_metrics_show_is_reported_and_increases() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            outputs = [await engine.submit(spec([5, 6], conversation_id="a")).result() for _ in range(2)]
            num_tokens = sum(len(output.token_ids) for output in outputs)
            await until(lambda: engine.last_stats.get("num_delta_tokens", 0) > 0)
            stats = engine.last_stats
            assert {*_GAUGES, *_COUNTERS} <= set(stats)
            assert 0 < stats["num_deltas"] <= stats["num_delta_tokens"] <= num_tokens
            assert stats["num_steps"] > 0
            assert stats["engine_thread_s"] > 0

    run(work())


def test_text_and_messages_are_encoded_in_the_engine_process() -> None:
    async def work() -> None:
        engines = FakeEngines()
        params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
        async with fake_engine(engines) as engine:
            output = await engine.submit("hello", params, conversation_id="a").result()
            ids = TOKENIZER.encode("hello", add_bos=True)
            assert output.token_ids == expected(engines.harness, spec(ids, max_tokens=4))
            chat = engine.submit([{"role": "user", "content": "hello"}], params, conversation_id="b")
            assert len((await chat.result()).token_ids) == 4
            with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content|prompt\[0\]\.content"):
                await engine.submit([{"role": "user"}], params).accepted()

    run(work())


def test_logprobs_arrive_with_their_tokens() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            plain, asked = engine.submit_all([spec([5]), spec([5], logprobs=2)])
            deltas = [delta async for delta in asked]
            output = await asked.result()
            assert output.logprobs is not None and len(output.logprobs) == 6
            assert sum((delta.logprobs or () for delta in deltas), ()) == output.logprobs
            assert [delta.logprobs async for delta in plain if delta.logprobs is not None] == []

    run(work())


def test_a_turn_raises_the_engines_refusal() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            long = engine.submit(spec([5] * 5000))
            with pytest.raises(ContextLengthError, match="5000 tokens") as caught:
                await long.accepted()
            assert caught.value.field == "prompt"
            with pytest.raises(ContextLengthError):
                await long.result()
            with pytest.raises(ContextLengthError):
                await anext(aiter(long))
            first = engine.submit(spec([5], conversation_id="a", max_tokens=300))
            busy = engine.submit(spec([6], conversation_id="a"))
            with pytest.raises(ConversationBusyError, match="'a'"):
                await busy.accepted()
            good, bad = engine.submit_all([spec([5]), spec([-1])])
            for turn in (good, bad):
                with pytest.raises(InvalidRequestError):
                    await turn.accepted()
            with pytest.raises(InvalidRequestError, match="sampling_params"):
                engine.submit([5], {"temperature": 1})  # type: ignore[arg-type]
            await first.cancel()

    run(work())


def test_the_reason_of_a_failed_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Clients get no details of it."""

    async def work() -> None:
        engines = FakeEngines()
        reason = StepFailedError("the device failed")
        engines.prepare = lambda harness: harness.runner.faults.update(launch=lambda: reason)
        async with fake_engine(engines) as engine:
            for turn in engine.submit_all([spec([5]), spec([6])]):
                with pytest.raises(StepFailedError, match="the device failed"):
                    await turn.result()

    run(work())
    assert caplog.text.count("the device failed") == 1


def test_calls_return_plain_values_and_raise_the_engines_errors() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            await engine.submit(spec([5] * 40, conversation_id="a")).result()
            assert (await engine.call("stats"))["num_turns_finished"] == 1
            explained = await engine.call("explain", "a")
            assert explained["num_tokens"] == 46
            assert [chunk["tier"] for chunk in explained["chunks"]] == ["gpu"] * 3
            await engine.call("truncate", "a", 20)
            assert (await engine.call("conversations"))[0]["num_tokens"] == 20
            await engine.call("forget_state", "a")
            await engine.call("end", "a")
            with pytest.raises(UnknownConversationError, match="'a'"):
                await engine.call("end", "a")
            for name, arguments in (("close", ()), ("end", ()), ("end", ("a", "b")), ("__init__", ())):
                with pytest.raises(InvalidRequestError):
                    await engine.call(name, *arguments)

    run(work())


def test_an_idle_engine_applies_changes_of_state() -> None:
    async def work() -> None:
        async with fake_engine(cpu_pages=8) as engine:
            node = TurnNode(turn_id=new_turn_id(), owner="ada")
            turn = TurnSpec([5] * 40, SamplingParams(max_tokens=6, ignore_eos=True), node=node)
            await engine.submit(turn).result()
            told = await engine.call("chunk_map", "ada")
            (branch,) = told["branches"]
            assert (branch["turn_id"], branch["num_tokens"], branch["states"]) == (node.turn_id, 46, "3g")
            assert told["free_gpu_pages"] == told["gpu_pages"] - 3 and told["free_cpu_pages"] == 8
            assert (await engine.call("chunk_map", "bob"))["branches"] == []
            assert await engine.call("push_out_turn", "ada", node.turn_id) == 3
            while (await engine.call("chunk_map", "ada"))["branches"][0]["states"] != "3c":
                pass
            explained = await engine.call("explain_turn", "ada", node.turn_id)
            assert [chunk["tier"] for chunk in explained["chunks"]] == ["cpu"] * 3
            assert explained["conversation_id"] == node.turn_id
            with pytest.raises(UnknownTurnError):
                await engine.call("explain_turn", "bob", node.turn_id)
            await engine.call("forget_turn_state", "ada", node.turn_id)
            with pytest.raises(UnknownTurnError):
                await engine.call("push_out_turn", "bob", node.turn_id)

    run(work())


def test_a_cancelled_turn_leaves_no_trace() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            turn = engine.submit(spec([5], conversation_id="a", max_tokens=400))
            await anext(aiter(turn))
            await turn.cancel()
            assert turn.output is not None and turn.output.finish_reason == "cancelled"
            assert await engine.call("conversations") == []
            await turn.cancel()
            await engine.submit(spec([5], conversation_id="a")).result()

    run(work())


@pytest.mark.parametrize("how", ["break", "task", "del"])
def test_a_dropped_turn_is_cancelled(how: str) -> None:
    brakes: list[Brake] = []
    engines = FakeEngines()
    engines.prepare = lambda harness: brakes.append(Brake(harness, 10))

    async def work() -> None:
        async with fake_engine(engines) as engine:
            if how == "break":
                async for _ in engine.submit(spec([5], max_tokens=400)):
                    break
            elif how == "task":

                async def consume() -> None:
                    async for _ in engine.submit(spec([5], max_tokens=400)):
                        started.set()

                started = asyncio.Event()
                task = asyncio.create_task(consume())
                await started.wait()
                task.cancel()
                await asyncio.wait([task])
                del task
            else:
                turn = engine.submit(spec([5], max_tokens=400))
                await turn.accepted()
                del turn
            gc.collect()
            await until_cancelled(engine, brakes[0])
            assert (await engine.call("stats"))["num_running"] == 0

    async def until_cancelled(engine: AsyncEngine, brake: Brake) -> None:
        """Allow two steps per answer: the held step, and the one before it, which is not reported yet."""
        for _ in range(100):
            stats = asyncio.ensure_future(engine.call("stats"))
            await asyncio.sleep(0)  # it has been sent
            brake.let(2)
            if (await stats)["num_turns_cancelled"] == 1:
                return
        raise AssertionError("it runs on")

    run(work())


def test_a_turn_with_a_waiter_needs_no_other_reference() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            found: list[int] = []

            async def consume() -> None:
                output = await engine.submit(spec([5], max_tokens=50)).result()
                found.append(len(output.token_ids))

            asyncio.ensure_future(consume())  # noqa: RUF006
            while not found:
                gc.collect()
                await asyncio.sleep(0)
            assert found == [50]

    run(work())


def test_unread_deltas_are_merged_into_one() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            turn = engine.submit(spec([5], max_tokens=100))
            output = await turn.result()
            (delta,) = [delta async for delta in turn]
            assert delta.token_ids == output.token_ids and delta.text == output.text

    run(work())


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_disconnect_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)

    async def client(engine: AsyncEngine, number: int) -> tuple[int, ...]:
        turn = engine.submit(spec([number + 1], max_tokens=rng.randrange(1, 60)))
        async for _ in turn:
            if rng.random() < 0.02:
                await turn.cancel()
            elif rng.random() < 0.02:
                raise asyncio.CancelledError
        return turn.output.token_ids if turn.output.finish_reason != "cancelled" else ()

    async def work() -> None:
        engines = FakeEngines(cpu_pages=8)
        async with fake_engine(engines) as engine:
            before = await engine.call("census")
            tasks = [asyncio.create_task(client(engine, number)) for number in range(100)]
            for _ in range(30):
                await asyncio.sleep(0)
                rng.choice(tasks).cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(one, tuple) and one for one in done)
            for number, ids in enumerate(done):
                if isinstance(ids, tuple) and ids:
                    assert ids == expected(engines.harness, spec([number + 1], max_tokens=len(ids)))
            del tasks, done
            gc.collect()
            while (await engine.call("stats"))["num_running"] or engine._connection._turns:
                await asyncio.sleep(0)
            stats = await engine.call("stats")
            assert stats["num_waiting"] == 0 and stats["num_live_conversations"] == 0, f"seed {seed}"
            while await engine.call("census") != before:
                pass
            connection = engine._connection
            assert not (connection._waiting or connection._calls or connection._idle)

    run(work())


def test_draining_refuses_new_turns_and_ends_those_that_take_too_long() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            done = engine.submit(spec([5]))
            await engine.drain(TIMEOUT_S)
            assert done.output is not None and engine.state == "draining"
            with pytest.raises(EngineClosedError, match="draining"):
                engine.submit(spec([5]))
        async with fake_engine() as engine:
            long = engine.submit(spec([5], max_tokens=1500))
            await engine.drain(0.0)
            assert long.output is not None and long.output.finish_reason == "cancelled"

    run(work())


@pytest.mark.parametrize("deadline_s", ["x", None, -1, float("nan"), float("inf"), True])
def test_a_drain_deadline_must_be_seconds(deadline_s: object) -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            with pytest.raises(InvalidRequestError, match="deadline_s is "):
                await engine.drain(deadline_s)  # type: ignore[arg-type]
            assert engine.state == "ready"

    run(work())


def test_after_the_error_of_an_engines_death_the_engine_is_not_ready() -> None:
    """It was still "ready", and `submit` itself raised EngineDiedError instead of the turn."""

    async def work() -> None:
        engines = FakeEngines()
        engines.prepare = lambda harness: brakes.append(Brake(harness, 3))
        brakes: list[Brake] = []
        async with fake_engine(engines) as engine:
            turn = engine.submit(spec([5], max_tokens=1500))
            await turn.accepted()
            seen: list[object] = []

            async def wait() -> None:
                try:
                    await turn.result()
                except EngineDiedError:
                    seen.append(engine.state)
                    with pytest.raises(EngineClosedError, match="starting"):
                        engine.submit(spec([5]))

            waiting = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            assert engine._connection is not None
            engine._connection.abort()
            gone = engine.submit(spec([5]))  # its waiters have not been notified yet
            for look in (gone.accepted, gone.result, lambda: anext(aiter(gone))):
                with pytest.raises(EngineDiedError):
                    await look()
            await waiting
            assert seen == ["starting"]
            brakes[0].let(1500)
            await until(lambda: engine.epoch == 2)

    run(work())


def test_the_engine_is_restarted_up_to_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            for number in range(1, 7):
                turn = engine.submit(spec([5], max_tokens=1500))
                call = asyncio.ensure_future(engine.call("stats"))
                await turn.accepted()
                await call
                engines.handles[-1].kill()
                with pytest.raises(EngineDiedError):
                    await turn.result()
                await until(lambda n=number: engine.epoch == n + 1 or engine.state == "dead")
            assert engine.state == "dead" and engine.epoch == 6
            with pytest.raises(EngineClosedError, match="dead"):
                engine.submit(spec([5]))
            with pytest.raises(EngineClosedError):
                await engine.call("stats")

    run(work())
    assert "given up" in caplog.text


def test_restarts_wait_longer_each_time() -> None:
    restarts = RestartPolicy(first_delay_s=1.0, longest_delay_s=5.0)
    assert [restarts.delay_s(number) for number in range(5)] == [0.0, 1.0, 2.0, 4.0, 5.0]


# A front end that sends unreadable messages, or does not read.


def test_an_unreadable_message_is_refused_to_its_sender_only() -> None:
    """The engine assumed that its front end was dead, and ended all turns."""

    async def work() -> None:
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            other = engine.submit(spec([5], max_tokens=300))
            await other.accepted()
            connection = engine._connection
            assert connection is not None
            bad = msgspec.structs.replace(sent_spec(1001, spec([5])), conversation_id=42)
            good = sent_spec(1002, spec([5]))
            behind = sent_spec(1003, spec([6]))
            turns = [*connection.submit([(bad, None), (good, None)]), *connection.submit([(behind, None)])]
            for turn in turns[:2]:  # all or none
                with pytest.raises(WireError, match="Expected `str"):
                    await turn.accepted()
            assert (await turns[2].result()).finish_reason == "length"
            for bad_call in (Call(1004, 5, []), Apply(1005, 5, msgspec.Raw(b"\xc0"))):  # type: ignore[arg-type]
                with pytest.raises(WireError, match="Expected `str"):
                    await connection._answer(bad_call.number, bad_call)
            assert (await other.result()).finish_reason == "length"
            assert (engine.state, engine.epoch) == ("ready", 1)

    run(work())


def test_a_front_end_that_never_reads_stops_no_step_and_costs_no_memory() -> None:
    harness = Harness(tokenizer=TOKENIZER)
    front, engine_end = socket.socketpair()
    for end in (front, engine_end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = EngineServer(harness.engine, TOKENIZER, engine_end)
    specs = [spec([5 + n], conversation_id=f"c{n}", max_tokens=900) for n in range(4)]
    front.sendall(FrameWriter().frame(Submit([sent_spec(n, one) for n, one in enumerate(specs)])))
    server.run_once()
    while harness.engine.has_unfinished:
        server.run_once()
    assert harness.engine.stats()["num_turns_finished"] == 4
    held = len(server._unsent) + sum(len(ending.output.text) for ending in server._report.endings)
    assert held < 4 * 900 * 4 + 8192  # the replies, and a message
    assert not server._report.numbers

    thread = threading.Thread(target=server.run)
    thread.start()
    reader, outputs, ids = FrameReader(Report), {}, {n: [] for n in range(4)}
    while len(outputs) < 4:
        for report in reader.feed(front.recv(1 << 16)):
            for number, new in zip(report.numbers, report.token_ids, strict=True):
                ids[number] += [new] if isinstance(new, int) else new
            outputs |= {ending.number: ending.output for ending in report.endings}
    front.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and harness.engine.closed
    for number, one in enumerate(specs):
        assert outputs[number].token_ids == expected(harness, one)
        assert tuple(ids[number]) == outputs[number].token_ids[: len(ids[number])]


def test_a_front_end_that_reads_late_gets_merged_deltas() -> None:
    harness = Harness(tokenizer=TOKENIZER)
    front, engine_end = socket.socketpair()
    engine_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = EngineServer(harness.engine, TOKENIZER, engine_end)
    front.sendall(
        FrameWriter().frame(Submit([sent_spec(n, spec([n + 1], max_tokens=1500)) for n in range(8)]))
    )
    for _ in range(1200):
        server.run_once()
    reader, sizes = FrameReader(Report), []
    front.setblocking(False)

    def read() -> bool:
        try:
            data = front.recv(1 << 16)
        except BlockingIOError:
            return False
        for report in reader.feed(data):
            sizes.extend(1 if isinstance(new, int) else len(new) for new in report.token_ids)
        return True

    for _ in range(200):
        if not read():
            break
        server.run_once()
    assert max(sizes) > 50, "nothing was merged"
    while server._unsent or read():
        server._send()
        read()
    assert (len(sizes), sum(sizes)) == (server._num_deltas, server._num_delta_tokens)
    front.close()
    server.run_once()
    server.run_once()
    assert server._front_left
    engine_end.close()
    harness.engine.close()


def test_the_engine_ends_with_its_front_end_whatever_the_bytes() -> None:
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PJX1\x00\x00\x00\x05hello",
        bytes(FrameWriter().frame(["Submit", [["x"]]])),
        bytes(FrameWriter().frame(["Nothing", 1])),
        b"PJX1\xff\xff\xff\xff",
        b"PJX",
    ):
        harness = Harness(tokenizer=TOKENIZER)
        brake = Brake(harness, 10)
        front, engine_end = socket.socketpair()
        thread = threading.Thread(target=EngineServer(harness.engine, TOKENIZER, engine_end).run)
        thread.start()
        frame = FrameWriter().frame(Submit([sent_spec(1, spec([5], max_tokens=1500))]))
        front.sendall(frame)
        reader = FrameReader(Report)
        while not any(report.accepted for report in reader.feed(front.recv(1 << 16))):
            pass
        front.sendall(garbage)
        if len(garbage) < 8:
            front.close()
        brake.let(1500)  # more than it runs before it notices
        thread.join(TIMEOUT_S)
        assert not thread.is_alive() and harness.engine.closed, garbage
        assert harness.engine.stats()["num_turns_cancelled"] == 1
        front.close()


def queued_response(harness: Harness) -> tuple[TurnNode, ResponseDraft]:
    """Queue a background response, and return its turn's node and its draft."""
    node = TurnNode(turn_id=new_turn_id(None))
    draft = draft_of(node.turn_id, owner="", expires_at_s=2.0, background=True)
    harness.store.apply(QueueResponse(draft=draft, job=b"job"))
    return node, draft


@pytest.mark.parametrize("ends", [True, False], ids=["the front end leaves", "it sends garbage"])
def test_an_engine_that_outlives_its_front_end_takes_the_starts_of_its_responses_back(
    tmp_path: Path, ends: bool
) -> None:
    """A front end that was killed cannot say that the responses did not kill the engine."""
    harness = Harness(tokenizer=TOKENIZER, path=tmp_path / "chats.sqlite")
    front, engine_end = socket.socketpair()
    server = EngineServer(harness.engine, TOKENIZER, engine_end)
    specs = []
    for number in range(2):
        node, draft = queued_response(harness)
        harness.store.apply(StartResponse(owner="", response_id=draft.response_id, starts=number + 1))
        one = spec([5 + number], max_tokens=900)
        specs.append(replace(one, node=replace(node, attachment=draft)))
    front.sendall(FrameWriter().frame(Submit([sent_spec(n, one) for n, one in enumerate(specs)])))
    server.run_once()
    assert len(server._turns) == 2
    if ends:
        front.close()
    else:
        front.sendall(b"garbage!" * 4)
    server.run()
    front.close()
    with open_store(tmp_path / "chats.sqlite", fingerprint="test") as store:
        query = "SELECT starts FROM responses ORDER BY starts"
        starts = [row[0] for row in store.read(lambda history: history.execute(query).fetchall())]
    assert starts == ([0, 1] if ends else [1, 2])


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["never submitted", "its turn has failed"])
def test_an_engine_takes_starts_back_whose_turns_it_does_not_have(
    tmp_path: Path, is_interrupted: bool
) -> None:
    """A front end may be killed between the count of a run and its turn, or after the turn."""
    harness = Harness(tokenizer=TOKENIZER, path=tmp_path / "chats.sqlite")
    front, engine_end = socket.socketpair()
    server = EngineServer(harness.engine, TOKENIZER, engine_end)
    drafts = [queued_response(harness) for _ in range(4)]
    running, taken_back, ended, fresh = (draft.response_id for _, draft in drafts)
    changes: list[HistoryChange] = [
        *(StartResponse(owner="", response_id=one, starts=2) for one in (running, taken_back, ended)),
        TakeBackStart(owner="", response_id=taken_back),
        EndResponse(owner="", response_id=ended, status="cancelled", completed_at_s=1.0),
        StartResponse(owner="", response_id=fresh, starts=1),
    ]
    front.sendall(b"".join(FrameWriter().frame(sent_change(n, one)) for n, one in enumerate(changes)))
    server.run_once()
    if is_interrupted:
        node, draft = drafts[0]
        one = spec([5], max_tokens=900)
        one = replace(one, node=replace(node, attachment=draft))
        front.sendall(FrameWriter().frame(Submit([sent_spec(9, one)])))
        server.run_once()
        server._engine.cancel(server._turns[9])
        server._tell_end(9, server._turns[9])
    front.close()
    server.run()
    with open_store(tmp_path / "chats.sqlite", fingerprint="test") as store:
        query = "SELECT response_id, starts FROM responses"
        starts = dict(store.read(lambda history: history.execute(query).fetchall()))
    assert starts == {running: 1, taken_back: 1, ended: 2, fresh: 0}


@pytest.mark.parametrize("kind", ["prompt_logprobs", "logprobs"])
def test_a_long_ending_does_not_hold_back_other_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was one message: while the socket took it piece by piece, no other turn got a token."""
    monkeypatch.setattr(wire, "PART_BYTES", 1024)
    harness = Harness()
    front, engine_end = socket.socketpair()
    front.setblocking(False)
    server = EngineServer(harness.engine, None, engine_end)
    prompt = harness.prompt(300 if kind == "prompt_logprobs" else 3, 1)
    params = {"max_tokens": 1, kind: 2} if kind == "prompt_logprobs" else {"max_tokens": 150, kind: 2}
    specs = [spec([5], max_tokens=400), spec(list(prompt), **params), spec([6], max_tokens=1, logprobs=2)]
    front.sendall(FrameWriter().frame(Submit([sent_spec(n, one) for n, one in enumerate(specs[:2])])))
    reader, ids, outputs, num_parts = FrameReader(Report), [], {}, 0
    while not server._parts:
        server.run_once()
        list(reader.feed(front.recv(1 << 20)))
    front.sendall(FrameWriter().frame(Submit([sent_spec(2, specs[2])])))
    while len(outputs) < 3:
        num_ids = len(ids)
        was_pending = bool(server._parts)
        server.run_once()
        data = front.recv(1 << 20)
        assert len(data) < 2048
        for report in reader.feed(data):
            for number, new in zip(report.numbers, report.token_ids, strict=True):
                ids += [] if number else [new] if isinstance(new, int) else new
            outputs |= {ending.number: ending.output for ending in report.endings}
            assert 1 not in outputs or 2 in outputs, "a short ending waited for a long one"
        if was_pending:
            num_parts += 1
            assert len(ids) > num_ids, "the other turn got no token"
    assert num_parts > 5
    assert outputs[1].token_ids == expected(harness, specs[1])
    facts = harness.facts(prompt, **params)
    facts = type(facts)((), tuple(prompt), specs[1].params, 1, facts.max_total_tokens)
    if kind == "prompt_logprobs":
        harness.bench.check_prompt(facts, outputs[1].prompt_logprobs)
    else:
        assert len(outputs[1].logprobs) == 150
    assert outputs[0].token_ids == expected(harness, specs[0])
    front.close()
    server.run()


def test_a_long_ending_is_sent_while_no_turn_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 256)
    harness = Harness()
    front, engine_end = socket.socketpair()
    server = EngineServer(harness.engine, None, engine_end)
    one = spec(list(harness.prompt(300, 1)), max_tokens=0, prompt_logprobs=2)
    front.sendall(FrameWriter().frame(Submit([sent_spec(1, one)])))
    thread = threading.Thread(target=server.run)
    thread.start()
    reader, endings = FrameReader(Report), []
    front.settimeout(TIMEOUT_S)
    while not endings:
        for report in reader.feed(front.recv(1 << 16)):
            endings += report.endings
    front.close()
    thread.join(TIMEOUT_S)
    assert len(endings[0].output.prompt_logprobs) == 300
