"""Turns whose grammars are compiled beside steps: they wait, are refused alone, and can be cancelled."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import cast

import pytest

from pensieve_jax import InvalidRequestError, SamplingParams, StructuredOutput
from pensieve_jax.core.errors import GrammarFailedError, GrammarQueueFullError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.engine_process import compiling
from pensieve_jax.server.engine_process.messages import Submit, sent_spec
from pensieve_jax.text.grammar import Grammars
from tests.server.engine_process.fakes import TIMEOUT_S, FakeEngines, expected, fake_engine, run, spec, until


class HeldBack:
    """Compilations that wait until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_go, self.num_begun = threading.Event(), 0
        compile_once = Grammars._compile

        def held(grammars: Grammars, form: StructuredOutput) -> object:
            self.num_begun += 1
            assert self.may_go.wait(TIMEOUT_S)
            return compile_once(grammars, form)

        patch.setattr(Grammars, "_compile", held)


def masked(form: StructuredOutput, max_tokens: int = 9) -> TurnSpec:
    return TurnSpec([5, 6], SamplingParams(max_tokens=max_tokens, structured=form, seed=1))


def test_other_turns_run_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        held = HeldBack(monkeypatch)
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            waiting = engine.submit(masked(StructuredOutput.choice(["a"])))
            other = await engine.submit(spec([5, 6, 7])).result()
            assert other.token_ids == expected(engines.harness, spec([5, 6, 7]))
            assert not waiting.done
            held.may_go.set()
            output = await waiting.result()
            assert (output.text, output.finish_reason) == ("a", "stop")
            again = await engine.submit(masked(StructuredOutput.choice(["a"]))).result()
            assert again.text == "a" and held.num_begun == 1, "it is kept"

    run(work())


def test_a_refused_grammar_refuses_its_message_alone() -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            bad = engine.submit(masked(StructuredOutput.regex("(((")))
            good = engine.submit(masked(StructuredOutput.regex("b")))
            with pytest.raises(InvalidRequestError, match="unclosed group"):
                await bad.result()
            assert (await good.result()).text == "b"

    run(work())


def test_an_error_of_the_library_refuses_its_message_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_once = Grammars._compile

    def broken(grammars: Grammars, form: StructuredOutput) -> object:
        if form.text == "broken":
            raise ZeroDivisionError
        return compile_once(grammars, form)

    monkeypatch.setattr(Grammars, "_compile", broken)

    async def work() -> None:
        async with fake_engine() as engine:
            bad = engine.submit(masked(StructuredOutput.regex("broken")))
            good = engine.submit(masked(StructuredOutput.regex("b")))
            with pytest.raises(GrammarFailedError, match="could not be compiled"):
                await bad.result()
            assert (await good.result()).text == "b"

    run(work())
    assert "a grammar could not be compiled" in caplog.text


class Compiler:
    """Grammars that are compiled at once and never kept."""

    def kept(self, form: StructuredOutput) -> None:
        return None

    def compile(self, form: StructuredOutput) -> object:
        return object()


def test_a_notice_that_comes_late_is_read() -> None:
    """A grammar is compiled before the notice of it is sent, so its message may be gone by then."""
    watched: list[socket.socket] = []
    turns = compiling.CompilingTurns(cast(Grammars, Compiler()), watched.append)
    assert turns.hold(Submit([sent_spec(1, masked(StructuredOutput.regex("b")))]))
    waiting = list(turns._compiling.values())
    assert [one.result(TIMEOUT_S) for one in waiting]
    assert [error for _, error in turns.take_ready()] == [None]
    turns._notify(waiting[0])
    assert list(turns.take_ready()) == []
    with pytest.raises(BlockingIOError):  # else every poll of the engine's process would return at once
        watched[0].recv(1)
    turns.close()


def test_a_turn_is_cancelled_while_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        held = HeldBack(monkeypatch)
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            waiting = engine.submit(masked(StructuredOutput.regex("a{900}"), max_tokens=1000))
            await until(lambda: held.num_begun == 1)
            cancelling = asyncio.ensure_future(waiting.cancel())
            await asyncio.sleep(0)  # it is sent
            held.may_go.set()
            await cancelling
            output = await waiting.result()
            assert output.finish_reason == "cancelled"
            await until(lambda: not engines.harness.engine.has_unfinished)

    run(work())


def test_too_many_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        held = HeldBack(monkeypatch)
        monkeypatch.setattr(compiling, "MAX_COMPILING", 3)
        async with fake_engine() as engine:
            turns = [engine.submit(masked(StructuredOutput.choice([letter]))) for letter in "abccd"]
            with pytest.raises(GrammarQueueFullError, match="3 grammars are compiling"):
                await turns[4].result()
            held.may_go.set()
            assert [(await turn.result()).text for turn in turns[:4]] == ["a", "b", "c", "c"]
            assert (await engine.submit(masked(StructuredOutput.choice(["d"]))).result()).text == "d"

    run(work())


def test_a_server_that_stops_does_not_wait_for_what_was_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        held = HeldBack(monkeypatch)
        async with fake_engine() as engine:
            for letter in "abcd":
                engine.submit(masked(StructuredOutput.choice([letter])))
            await until(lambda: held.num_begun == 2)
            held.may_go.set()
        assert held.num_begun <= 4

    run(work())
