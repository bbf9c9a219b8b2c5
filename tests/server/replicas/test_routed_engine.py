"""Turns over several replicas: their placement, what happens when a replica dies, and merged answers."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import gc

import pytest

from pensieve_jax.balance.ring import hash_of
from pensieve_jax.core.errors import (
    EngineClosedError,
    EngineDiedError,
    HistoryUnavailableError,
    InvalidRequestError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Output, Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import new_turn_id, root_of
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import (
    DeleteConversation,
    DeleteResponse,
    EndResponse,
    Expire,
)
from pensieve_jax.server.engine_process.messages import Call
from pensieve_jax.server.replicas import routed_engine
from pensieve_jax.server.replicas.links import REPORT, UnreadableMessageError, decoded_answer, encoded
from pensieve_jax.server.replicas.placement import RootPlacer
from tests.deadlines import TIMEOUT_S
from tests.history.drafts import draft_of
from tests.server.fakes import FakeTurn, say
from tests.server.replicas.fakes import FakeReplicas, routed, spec_of


def run(test):
    async def with_deadline():
        async with asyncio.timeout(TIMEOUT_S):
            await test()

    asyncio.run(with_deadline())


async def turn_on(replicas: FakeReplicas, name: str, number: int = 0) -> FakeTurn:
    """Return a turn that a replica received."""
    engine = replicas.engines[name]
    while len(engine.turns) <= number:
        engine.submitted.clear()
        await engine.submitted.wait()
    return engine.turns[number]


def output(text: str, *, reason="stop", **usage) -> Output:
    counts = {
        "prompt_tokens": 3,
        "reused_gpu_tokens": 0,
        "swapped_in_tokens": 0,
        "recomputed_tokens": 0,
        "prefilled_tokens": 3,
        "output_tokens": len(text),
    }
    return Output(None, tuple(text.encode()), text, reason, Usage(**(counts | usage)), 7)


def test_each_replica_with_an_engine_tells_what_its_memory_holds():
    async def test():
        replicas = FakeReplicas(3)
        for name, memory in (("r1", "KV cache: 1 GiB"), ("r2", "KV cache: 2 GiB")):
            one = replicas.engines[name]
            one.info = dataclasses.replace(one.info, description={"cache": {"summary": memory}})
        engine = await routed(replicas)
        first, *others = engine.memory_in_words
        assert first.startswith("KV cache: 37.2 GiB") and others == ["KV cache: 1 GiB", "KV cache: 2 GiB"]

    run(test)


def test_a_turn_and_its_continuations_run_where_their_root_belongs():
    async def test():
        replicas = FakeReplicas(3, say("hi"))
        engine = await routed(replicas)
        roots = {}
        for name in replicas.engines:
            first = spec_of()
            roots[root_of(first.node.turn_id)] = name
            replicas.place = dict(roots)
            behind = spec_of(parent_id=first.node.turn_id)
            for spec in (first, behind):
                found = await engine.submit(spec).result()
                assert found.text == "hi"
        assert replicas.keys == [(root, name) for root, name in roots.items() for _ in range(2)]

    run(test)


def test_deltas_arrive_as_they_are_sent_and_the_output_is_the_replicas():
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        turn = engine.submit(spec_of(logprobs=1))
        there = await turn_on(replicas, "r0")
        await turn.accepted()
        there.feed("ab")
        first = await anext(turn)
        there.feed("cd")
        second = await anext(turn)
        there.finish("length")
        with pytest.raises(StopAsyncIteration):
            await anext(turn)
        assert (first.text, second.text) == ("ab", "cd")
        assert first.token_ids == tuple(b"ab") and [one.token_id for one in second.logprobs] == list(b"cd")
        assert turn.output == there.output and turn.usage == there.output.usage

    run(test)


def test_each_delta_of_a_message_keeps_its_own_logprobs():
    async def test():
        replicas = FakeReplicas(1, batch_s=0.02)
        engine = await routed(replicas)
        turn = engine.submit(spec_of(logprobs=1))
        there = await turn_on(replicas, "r0")
        await turn.accepted()
        for piece in "abcdef":  # the first is sent at once, the others together
            there.feed(piece)
            await asyncio.sleep(0)
        there.finish("length")
        found = [one async for one in turn]
        said = [one.token_id for delta in found for one in delta.logprobs]
        assert said == list(b"abcdef") == [one for delta in found for one in delta.token_ids]

    run(test)


def test_polling_continues_when_the_replicas_cannot_be_asked(monkeypatch):
    async def test():
        monkeypatch.setattr(routed_engine, "POLL_S", 0.001)
        replicas = FakeReplicas(1, say("hi"))
        engine = await routed(replicas)
        ask_all, answers = replicas.ask_all, ["away", "none", "there"]

        async def asked(question):
            answer = answers.pop(0) if answers else "there"
            if answer == "away":
                raise EngineDiedError("cannot be asked")
            return [] if answer == "none" else await ask_all(question)

        replicas.ask_all = asked
        watching = asyncio.ensure_future(engine.watch())
        while answers or engine.state != "ready":
            await asyncio.sleep(0.001)
        assert not watching.done() and (await engine.submit(spec_of()).result()).text == "hi"
        watching.cancel()

    run(test)


def test_an_unexpected_error_is_not_reported_as_a_cancelled_turn(caplog):
    class FailingStream:
        def __aiter__(self):
            return self

        async def __anext__(self):
            raise RuntimeError("a bug")

        def cancel(self):
            pass

    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        replicas.run = lambda key, submission: FailingStream()
        with pytest.raises(EngineDiedError, match="see the log"):
            await engine.submit(spec_of()).result()

    run(test)
    assert "a bug" in caplog.text


def test_a_turn_is_not_a_child_of_its_request_in_ray():
    """Ray cancels what a request started when its client leaves; it finds these calls through the context."""
    request = contextvars.ContextVar("request", default="none")
    seen = []

    async def test():
        replicas = FakeReplicas(1, say("hi"))
        engine = await routed(replicas)
        run_there, ask_there = replicas.run, replicas.ask

        def run_here(key, submission):
            seen.append(request.get())
            return run_there(key, submission)

        async def ask_here(key, question):
            seen.append(request.get())
            return await ask_there(key, question)

        replicas.run, replicas.ask = run_here, ask_here
        request.set("one")
        await engine.submit(spec_of()).result()
        await engine.apply(Expire(now_s=0.0))

    run(test)
    assert seen == ["none", "none"]


def test_a_refusal_is_raised_at_acceptance_with_the_replicas_text():
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        replicas.engines["r0"].refuse.append(UnknownTurnError("0" * 32))
        turn = engine.submit(spec_of())
        with pytest.raises(UnknownTurnError) as caught:
            await turn.accepted()
        assert caught.value.turn_id == "0" * 32
        assert len(replicas.lines) == 1  # no other replica is tried

    run(test)


def test_a_turn_whose_replica_dies_runs_again_with_the_same_id_and_seed_and_tells_nothing_twice():
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        turn = engine.submit(spec_of(logprobs=0))
        one = await turn_on(replicas, "r0")
        one.feed("hel")
        assert (await anext(turn)).text == "hel"
        replicas.kill("r0")
        other = await turn_on(replicas, "r1")
        assert other.spec.node == one.spec.node
        assert other.spec.params == one.spec.params and other.spec.params.seed is not None
        other.feed("he")
        other.feed("llo")
        delta = await anext(turn)
        assert (delta.text, delta.token_ids) == ("lo", tuple(b"lo"))
        assert [one.token_id for one in delta.logprobs] == list(b"lo")
        other.feed(" you")
        other.finish()
        assert (await anext(turn)).text == " you"
        assert (await turn.result()).text == "hello you"
        assert engine.num_run_again == 1

    run(test)


@pytest.mark.parametrize(
    "replay", [("hex", "lo"), ("he",), ("hell", (104, 101, 108, 109))], ids=["text", "shorter", "ids"]
)
def test_a_replay_with_different_tokens_fails_the_turn(replay):
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        (await turn_on(replicas, "r0")).feed("hell")
        await anext(turn)
        replicas.kill("r0")
        other = await turn_on(replicas, "r1")
        if isinstance(replay[-1], tuple):
            other.feed(*replay)
        else:
            for piece in replay:
                other.feed(piece)
        other.finish()
        with pytest.raises(EngineDiedError, match="a different reply"):
            await turn.result()

    run(test)


class Names(RootPlacer):
    """Names of roots that record their calls."""

    def __init__(self) -> None:
        super().__init__(hash_of)
        self.seen, self.under_way = [], []

    def update(self, replicas, info, stats=None):
        self.seen.append(dict(replicas))
        super().update(replicas, info, stats)

    def sent(self, key, replies):
        self.under_way += [(key, reply) for reply in replies]
        super().sent(key, replies)

    def ended(self, replies):
        for reply in replies:
            self.under_way = [one for one in self.under_way if one[1] is not reply]
        super().ended(replies)


@pytest.mark.parametrize("how", ["well", "cancelled", "refused"])
def test_the_root_names_are_told_of_every_turn_and_of_replicas_that_accept_turns(how):
    async def test():
        replicas, names = FakeReplicas(2), Names()
        replicas.engines["r1"].state = "starting"
        engine = await routed(replicas, names=names)
        assert names.seen[-1] == {"r0": True, "r1": False}
        if how == "refused":
            replicas.engines["r0"].refuse.append(UnknownTurnError("0" * 32))
        spec = spec_of()
        turn = engine.submit(spec)
        assert [key for key, _ in names.under_way] == [root_of(spec.node.turn_id)]
        if how == "cancelled":
            await turn.cancel()
        elif how == "well":
            (await turn_on(replicas, "r0")).finish("length")
            await turn.result()
        while names.under_way:
            await asyncio.sleep(0)

    run(test)


def test_a_replay_with_different_tokens_is_cancelled_on_its_replica():
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        (await turn_on(replicas, "r0")).feed("hell")
        await anext(turn)
        replicas.kill("r0")
        other = await turn_on(replicas, "r1")
        other.feed("no")
        with pytest.raises(EngineDiedError):
            await turn.result()
        await turn.cancel()
        while not other.cancelled:
            await asyncio.sleep(0)

    run(test)


def test_a_committed_turn_is_returned_from_the_history_and_does_not_run_again():
    async def test():
        replicas = FakeReplicas(2)
        asked = []

        async def kept(spec):
            asked.append(spec.node.turn_id)
            return output("hello", recomputed_tokens=2)

        engine = await routed(replicas, kept)
        turn = engine.submit(spec_of())
        (await turn_on(replicas, "r0")).feed("hel")
        await anext(turn)
        replicas.kill("r0")
        assert (await anext(turn)).text == "lo"
        found = await turn.result()
        assert found.usage.recomputed_tokens == 2 and asked == [turn.turn_id]
        assert replicas.engines["r1"].turns == []

    run(test)


def test_an_unseen_commit_is_found_once_the_replay_is_refused():
    """The engine's process outlives its replica for a moment."""

    async def test():
        replicas = FakeReplicas(2)
        answers = [None, output("hello")]

        async def kept(spec):
            return answers.pop(0)

        engine = await routed(replicas, kept)
        turn = engine.submit(spec_of())
        (await turn_on(replicas, "r0")).feed("hel")
        await anext(turn)
        replicas.engines["r1"].refuse.append(InvalidRequestError("turn_id", turn.turn_id, "a new one"))
        replicas.kill("r0")
        assert (await turn.result()).text == "hello"

    run(test)


def test_logprobs_of_a_turn_from_the_history_are_not_invented():
    async def test():
        replicas = FakeReplicas(2)

        async def kept(spec):
            return output("hello")

        engine = await routed(replicas, kept)
        turn = engine.submit(spec_of(logprobs=0))
        await turn_on(replicas, "r0")
        await turn.accepted()
        replicas.kill("r0")
        with pytest.raises(EngineDiedError, match="log-probabilities"):
            await turn.result()

    run(test)


def test_a_second_death_fails_the_turn():
    async def test():
        replicas = FakeReplicas(3)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        await turn_on(replicas, "r0")
        await turn.accepted()
        replicas.kill("r0")
        await turn_on(replicas, "r1")
        replicas.kill("r1")
        with pytest.raises(EngineDiedError):
            await turn.result()
        assert replicas.engines["r2"].turns == []

    run(test)


def background_spec() -> TurnSpec:
    """Return the turn of a background response."""
    spec = spec_of()
    draft = draft_of(spec.node.turn_id, owner="", expires_at_s=2.0, background=True)
    return dataclasses.replace(spec, node=dataclasses.replace(spec.node, attachment=draft))


@pytest.mark.parametrize("how", ["the replica is lost", "its engine dies"])
def test_a_background_turn_is_not_run_again_after_a_death(how):
    """Its caller counts the deaths."""

    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        turn = engine.submit(background_spec())
        there = await turn_on(replicas, "r0")
        await turn.accepted()
        if how == "its engine dies":
            there.fail(EngineDiedError("The engine's process died."))
        else:
            replicas.kill("r0")
        with pytest.raises(EngineDiedError):
            await turn.result()
        assert not replicas.engines["r1"].turns

    run(test)


class Unreachable:
    """Result stream of a submission that no replica got."""

    def __aiter__(self):
        return self

    async def __anext__(self):
        raise EngineDiedError("No replica is left.")

    def cancel(self):
        pass


@pytest.mark.parametrize("how", ["no replica is left", "the replica shuts down"])
def test_a_background_turn_that_did_not_run_at_a_death_is_told_apart(how):
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        if how == "no replica is left":
            replicas.run = lambda key, submission: Unreachable()
            turn = engine.submit(background_spec())
        else:
            turn = engine.submit(background_spec())
            there = await turn_on(replicas, "r0")
            await turn.accepted()
            there.finish("cancelled")
        with pytest.raises(EngineClosedError):
            await turn.result()

    run(test)


def test_an_engine_that_dies_inside_its_replica_counts_as_the_replicas_death():
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        (await turn_on(replicas, "r0")).fail(EngineDiedError("its process died"))
        again = await turn_on(replicas, "r0", 1)
        again.feed("ok")
        again.finish()
        assert (await turn.result()).text == "ok"

    run(test)


def test_a_replica_that_shuts_down_and_cancels_a_turn_does_not_end_it():
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        (await turn_on(replicas, "r0")).finish("cancelled")
        again = await turn_on(replicas, "r0", 1)
        again.finish()
        assert (await turn.result()).finish_reason == "stop"

    run(test)


def test_a_turn_whose_parent_died_with_its_replica_fails_while_it_can_start_from_messages():
    """Before acceptance the server starts again from the messages. Later the client must resend."""

    async def test():
        for says_something in (False, True):
            replicas = FakeReplicas(2)
            engine = await routed(replicas)
            turn = engine.submit(spec_of(parent_id=new_turn_id(), durable=False))
            there = await turn_on(replicas, "r0")
            if says_something:
                there.feed("a")
                await anext(turn)
            else:
                there._accepted.clear()
            replicas.engines["r1"].refuse.append(UnknownTurnError("0" * 32))
            replicas.kill("r0")
            with pytest.raises(EngineDiedError if says_something else (EngineDiedError, UnknownTurnError)):
                await turn.result()

    run(test)


def test_a_turn_of_a_named_conversation_does_not_run_again():
    """It may be committed under an id that the front end does not know."""

    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        turn = engine.submit(TurnSpec([1], SamplingParams(), conversation_id="one"))
        assert turn.turn_id.startswith("turn-")
        await turn_on(replicas, "r0")
        replicas.kill("r0")
        with pytest.raises(EngineDiedError):
            await turn.result()
        assert replicas.keys == [("one", "r0")]

    run(test)


def test_an_unavailable_history_fails_the_turn_with_that_reason():
    async def test():
        replicas = FakeReplicas(2)

        async def kept(spec):
            raise HistoryUnavailableError("away")

        engine = await routed(replicas, kept)
        turn = engine.submit(spec_of())
        await turn_on(replicas, "r0")
        replicas.kill("r0")
        with pytest.raises(HistoryUnavailableError):
            await turn.result()

    run(test)


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_an_abandoned_turn_is_cancelled_on_its_replica(how):
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        there = await turn_on(replicas, "r0")
        await turn.accepted()
        if how == "cancel":
            await turn.cancel()
            with pytest.raises(EngineClosedError):
                await turn.result()
        else:
            del turn
            gc.collect()
        while not there.cancelled:
            await asyncio.sleep(0)
        assert replicas.lines[0].is_cancelled

    run(test)


def test_choices_of_one_context_run_together_and_one_may_leave():
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        first = spec_of()
        second = spec_of(new_turn_id(first.node.turn_id))
        alone = spec_of()
        replicas.place[root_of(alone.node.turn_id)] = "r1"
        turns = engine.submit_all([first, alone, second])
        assert [turn.turn_id for turn in turns] == [spec.node.turn_id for spec in (first, alone, second)]
        for number in range(2):
            await turn_on(replicas, "r0", number)
        await turns[0].accepted()
        await turns[0].cancel()
        assert not replicas.lines[0].is_cancelled
        there = await turn_on(replicas, "r0", 1)
        there.feed("b")
        there.finish()
        assert (await turns[2].result()).text == "b"
        assert len(replicas.lines) == 2

    run(test)


def test_a_turn_that_is_sent_twice_belongs_to_the_last_sender():
    """A front end that died left it running."""

    async def test():
        replicas = FakeReplicas(1)
        one, other = await routed(replicas), await routed(replicas)
        spec = spec_of()
        lost = one.submit(spec)
        there = await turn_on(replicas, "r0")
        await lost.accepted()
        turn = other.submit(spec)
        again = await turn_on(replicas, "r0", 1)
        assert there.cancelled
        again.feed("ok")
        again.finish()
        assert (await turn.result()).text == "ok"

    run(test)


def test_draining_waits_and_then_cancels():
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        turn = engine.submit(spec_of())
        there = await turn_on(replicas, "r0")
        await turn.accepted()
        await engine.drain(0.0)
        assert there.cancelled and engine.state == "draining"
        with pytest.raises(EngineClosedError):
            engine.submit(spec_of())

    run(test)


def test_changes_go_where_the_root_of_their_target_belongs():
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        turn_id = new_turn_id()
        changes = [
            DeleteResponse(owner="", response_id=f"resp_{turn_id}"),
            EndResponse(owner="", response_id=f"resp_{turn_id}", status="failed", completed_at_s=1.0),
            DeleteConversation(owner="", conversation_id="conv_1"),
            Expire(now_s=1.0),
        ]
        for change in changes:
            await engine.apply(change)
        assert [key for key, _ in replicas.keys] == [root_of(turn_id), root_of(turn_id), "conv_1", "expire"]
        assert replicas.engines["r0"].changes == changes

    run(test)


def test_calls_go_to_all_replicas_and_their_answers_are_merged():
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        for number, one in enumerate(replicas.engines.values(), start=1):
            one.last_stats = {"num_steps": number, "num_gpu_pages": 10}
            one.answers |= {
                "stats": {"num_steps": number, "seconds": 0.5},
                "distributions": {"commit_s": [[1, number], 2.0]},
                "chunk_map": {"chunk_tokens": 32, "gpu_pages": 8, "branches": [number]},
                "conversations": [{"conversation_id": "a", "last_active_s": number}],
                "push_out_turn": number,
                "explain_turn": {"chunks": [{"start": 0, "end": number, "tier": "gpu", "drop": None}]},
            }
        await engine.refresh()
        by_replica = {name: {"state": "ready", **one.last_stats} for name, one in replicas.engines.items()}
        own = {"num_turns_run_again": 0, "replicas": by_replica}
        assert await engine.call("stats") == {"num_steps": 3, "seconds": 1.0, **own}
        assert await engine.call("distributions") == {"commit_s": ([2, 3], 4.0)}
        assert await engine.call("chunk_map", "me") == {
            "chunk_tokens": 32,
            "gpu_pages": 16,
            "branches": [1, 2],
        }
        assert await engine.call("conversations") == [{"conversation_id": "a", "last_active_s": 2}]
        assert await engine.call("push_out_turn", "me", new_turn_id()) == 3
        (chunk,) = (await engine.call("explain_turn", "me", new_turn_id()))["chunks"]
        assert chunk["end"] == 2, "that of the replica which has more"
        assert engine.last_stats == {"num_steps": 3, "num_gpu_pages": 20, **own}
        replicas.place["mine"] = "r1"
        replicas.engines["r1"].answers["end"] = None
        await engine.call("end", "mine")
        assert replicas.engines["r1"].calls[-1] == ("end", ("mine",))

    run(test)


def test_counters_are_those_of_the_replicas_that_are_ready():
    """A page that shows them must not fail because one of two replicas starts its engine again."""

    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        starting, other = replicas.engines.values()
        starting.state = "starting"
        starting.last_stats, other.last_stats = {"num_steps": 5}, {"num_steps": 3}
        other.answers["stats"] = {"num_steps": 3}

        async def refuse(*_):
            raise EngineClosedError("starting")

        starting.call = refuse
        await engine.refresh()
        found = await engine.call("stats")
        assert found["num_steps"] == 3
        assert {name: one["state"] for name, one in found["replicas"].items()} == {
            "r0": "starting",
            "r1": "ready",
        }
        other.call = refuse
        with pytest.raises(EngineClosedError):
            await engine.call("stats")

    run(test)


def test_a_turn_is_unknown_only_if_no_replica_knows_it_and_lost_replicas_do_not_count():
    async def test():
        replicas = FakeReplicas(3)
        engine = await routed(replicas)
        turn_id = new_turn_id()

        def answer_with(name, error):
            async def call(*_):
                if error is not None:
                    raise error
                return 2

            replicas.engines[name].call = call

        answer_with("r0", UnknownTurnError(turn_id))
        answer_with("r1", EngineClosedError("starting"))
        answer_with("r2", None)
        assert await engine.call("push_out_turn", "me", turn_id) == 2
        answer_with("r2", UnknownTurnError(turn_id))
        with pytest.raises(UnknownTurnError):
            await engine.call("push_out_turn", "me", turn_id)
        answer_with("r1", HistoryUnavailableError("away"))
        with pytest.raises(HistoryUnavailableError):
            await engine.call("push_out_turn", "me", turn_id)

    run(test)


def test_a_call_to_one_replica_waits_while_its_engine_restarts():
    async def test():
        replicas = FakeReplicas(1)
        engine = await routed(replicas)
        there = replicas.engines["r0"]
        there.state = "starting"
        change = DeleteConversation(owner="", conversation_id="conv_1")
        applying = asyncio.ensure_future(engine.apply(change))
        turn = engine.submit(spec_of())  # the front end has not polled since
        while not replicas.lines:
            await asyncio.sleep(0)
        assert there.changes == [] and there.turns == []
        there.state = "ready"
        await applying
        (await turn_on(replicas, "r0")).finish()
        await turn.result()
        assert there.changes == [change]

    run(test)


def test_the_description_of_the_replicas_is_kept_up_to_date():
    async def test():
        replicas = FakeReplicas(2)
        engine = await routed(replicas)
        assert engine.info.max_num_running == 8 and engine.state == "ready"
        replicas.kill("r0")
        replicas.engines["r1"].state = "starting"
        await engine.refresh()
        assert engine.info.max_num_running == 4 and engine.state == "starting"
        with pytest.raises(EngineClosedError):
            engine.submit(spec_of())
        replicas.engines["r1"].last_heard_s = 30.0
        await engine.refresh()
        assert 30 <= engine.last_heard_s < 31
        replicas.kill("r1")
        with pytest.raises(EngineClosedError):
            await engine.call("stats")
        with pytest.raises(EngineDiedError):
            await engine.call("end", "one")

    run(test)


def test_an_invalid_message_is_an_error():
    async def test():
        replicas = FakeReplicas(1)
        with pytest.raises(UnreadableMessageError):
            await replicas.ask("", b"\xc1")
        with pytest.raises(UnreadableMessageError):
            encoded(object())
        answer = decoded_answer(await replicas.ask("", encoded(Call(1, REPORT, []))))
        assert answer.number == 1 and answer.error is None

    run(test)
