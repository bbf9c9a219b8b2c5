"""Turns whose grammars are compiled beside steps: they wait, are refused alone, and can be cancelled."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
from typing import cast

import pytest

from pensieve_jax import InvalidRequestError, SamplingParams, StructuredOutput, prompts
from pensieve_jax.core.errors import GrammarFailedError, GrammarQueueFullError, HistoryError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.engine_process import compiling
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import Submit, sent_spec
from pensieve_jax.server.engine_process.wire import FrameWriter
from pensieve_jax.text import grammar
from pensieve_jax.text.grammar import Grammars
from tests.engine.harness import Harness
from tests.server.engine_process.fakes import (
    TIMEOUT_S,
    TOKENIZER,
    FakeEngines,
    expected,
    fake_engine,
    run,
    spec,
    until,
)


class HeldBack:
    """Compilations that wait until they are let go.

    Attributes:
        num_begun: compilations so far.
        in_engine: forms that the engine's own thread compiled, which delays every stream.
    """

    def __init__(self, patch: pytest.MonkeyPatch, only: str = "") -> None:
        """Hold back all compilations, or those of the form with the text `only`."""
        self.may_go, self.num_begun = threading.Event(), 0
        self.in_engine: list[StructuredOutput] = []
        compile_once = Grammars._compile

        def held(grammars: Grammars, form: StructuredOutput) -> object:
            self.num_begun += 1
            if threading.current_thread().name == "engine":
                self.in_engine.append(form)
            if not only or form.text == only:
                assert self.may_go.wait(TIMEOUT_S)
            return compile_once(grammars, form)

        patch.setattr(Grammars, "_compile", held)


def masked(form: StructuredOutput, max_tokens: int = 9) -> TurnSpec:
    return TurnSpec([5, 6], SamplingParams(max_tokens=max_tokens, structured=form, seed=1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_grammars_are_compiled_at_a_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they take the cores of the steps."""
    found: list[int] = []
    compile_once = Grammars._compile

    def noted(grammars: Grammars, form: StructuredOutput) -> object:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        return compile_once(grammars, form)

    monkeypatch.setattr(Grammars, "_compile", noted)

    async def work() -> None:
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            assert (await engine.submit(masked(StructuredOutput.choice(["a"]))).result()).text == "a"

    own = os.getpriority(os.PRIO_PROCESS, 0)
    run(work())
    assert found == [min(own + 10, 19)] and os.getpriority(os.PRIO_PROCESS, 0) == own


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


def message_of(*forms: StructuredOutput) -> Submit:
    return Submit([sent_spec(number, masked(form)) for number, form in enumerate(forms)])


def test_a_notice_that_comes_late_is_read() -> None:
    """A grammar is compiled before the notice of it is sent, so its message may be gone by then."""
    watched: list[socket.socket] = []
    turns = compiling.CompilingTurns(cast(Grammars, Compiler()), watched.append)
    form = StructuredOutput.regex("b")
    message = message_of(form)
    assert turns.grammars_of(message, [form]) is None
    waiting = list(turns._compiling.values())
    grammars = {form: waiting[0].result(TIMEOUT_S)}
    assert list(turns.take_ready()) == [(message, grammars)]
    assert turns.grammars_of(message, [form, None], grammars) == grammars
    turns._notify(waiting[0])
    assert list(turns.take_ready()) == []
    with pytest.raises(BlockingIOError):  # else every poll of the engine's process would return at once
        watched[0].recv(1)
    turns.close()


def test_a_message_that_is_forgotten_leaves_what_others_wait_for() -> None:
    class Blocked(Compiler):
        def compile(self, form: StructuredOutput) -> object:
            assert may_go.wait(TIMEOUT_S)
            return form

    may_go = threading.Event()
    turns = compiling.CompilingTurns(cast(Grammars, Blocked()), lambda end: None)
    forms = [StructuredOutput.regex(letter) for letter in "abcd"]
    first, second = message_of(*forms), message_of(*forms[2:3])
    for message, asked in ((first, forms), (second, forms[2:3])):
        assert turns.grammars_of(message, asked) is None
    waiting = dict(turns._compiling)
    while not all(waiting[form].running() for form in forms[:2]):
        pass
    turns.forget(first)
    assert list(turns._compiling) == forms[:3], "two are compiling, and one is wanted"
    assert waiting[forms[3]].cancelled()
    may_go.set()
    assert waiting[forms[2]].result(TIMEOUT_S)
    assert list(turns.take_ready()) == [(second, {forms[2]: forms[2]})]
    turns.close()


def test_grammars_that_are_evicted_before_their_turns_are_queued_are_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were compiled in the engine's thread, and every stream waited for that."""
    forms = [StructuredOutput.choice([letter]) for letter in "abcd"]

    async def work() -> None:
        monkeypatch.setattr(grammar, "MAX_KEPT", 1)
        held = HeldBack(monkeypatch, only=forms[2].text)
        async with fake_engine() as engine:
            assert (await engine.submit(masked(forms[0])).result()).text == "a"
            waiting = engine.submit_all([masked(form) for form in forms[:3]])  # the first one is kept
            assert (await engine.submit(masked(forms[3])).result()).text == "d"
            held.may_go.set()
            assert [(await turn.result()).text for turn in waiting] == ["a", "b", "c"]
        assert not held.in_engine and held.num_begun == 4

    run(work())


def test_a_form_that_the_prompt_moves_is_compiled_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat model's form begins behind its reasoning, as the engine's process finds out."""
    moved = StructuredOutput.choice(["moved"])

    def placed(params: SamplingParams, *_: object) -> SamplingParams:
        return dataclasses.replace(params, structured=moved)

    async def work() -> None:
        monkeypatch.setattr(prompts, "with_placed_form", placed)
        held = HeldBack(monkeypatch, only="nothing")
        async with fake_engine() as engine:
            params = SamplingParams(max_tokens=9, structured=StructuredOutput.choice(["a"]), seed=1)
            turn = engine.submit([{"role": "user", "content": "Hi"}], params)
            assert (await turn.result()).text == "moved"
        assert not held.in_engine

    run(work())


def test_a_turn_is_cancelled_while_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, and the grammar is not waited for."""

    async def work() -> None:
        held = HeldBack(monkeypatch)
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            waiting = engine.submit(masked(StructuredOutput.regex("a{900}"), max_tokens=1000))
            await until(lambda: held.num_begun == 1)
            await waiting.cancel()
            output = await waiting.result()
            assert (output.finish_reason, output.token_ids, output.seed) == ("cancelled", (), 1)
            assert output.usage.prompt_tokens == 2 == output.usage.prompt_tokens + output.usage.output_tokens
            held.may_go.set()
            again = await engine.submit(masked(StructuredOutput.regex("b"))).result()
            assert again.text == "b" and not engine._connection._turns
            assert (await engine.call("stats"))["num_turns_finished"] == 1

    run(work())


def test_one_of_several_turns_is_cancelled_while_a_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grammar of the cancelled turn is wrong, and the other turn goes on."""

    async def work() -> None:
        held = HeldBack(monkeypatch)
        async with fake_engine() as engine:
            forms = [StructuredOutput.regex("((("), StructuredOutput.choice(["a"])]
            gone, stays = engine.submit_all([masked(form) for form in forms])
            await until(lambda: held.num_begun == 2)
            await gone.cancel()
            assert not stays.done
            held.may_go.set()
            assert (await stays.result()).text == "a"
            assert gone.output is not None and gone.output.finish_reason == "cancelled"

    run(work())


def test_draining_does_not_wait_for_grammars_that_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine was killed where a grammar took longer than it has time to cancel its turns."""

    async def work() -> None:
        held = HeldBack(monkeypatch)
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            turns = [engine.submit(masked(StructuredOutput.choice([letter]))) for letter in "abcd"]
            await until(lambda: held.num_begun == 2)
            await engine.drain(0.0)
            assert [turn.output.finish_reason for turn in turns if turn.output] == ["cancelled"] * 4
            held.may_go.set()
        assert engines.harness.engine.closed and held.num_begun == 2

    run(work())


def test_an_engine_that_cannot_close_its_history_stops_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldBack(monkeypatch)
    harness = Harness(tokenizer=TOKENIZER)
    front, engine_end = socket.socketpair()
    server = EngineServer(harness.engine, TOKENIZER, engine_end)
    front.sendall(FrameWriter().frame(message_of(*(StructuredOutput.regex(letter) for letter in "abc"))))
    server.run_once()
    front.close()
    close = harness.engine.close

    def broken() -> None:
        held.may_go.set()
        close()
        raise HistoryError("it cannot be written")

    monkeypatch.setattr(harness.engine, "close", broken)
    with pytest.raises(HistoryError):
        server.run()
    sockets = server._compiling._sockets
    assert sockets is not None and [end.fileno() for end in sockets] == [-1, -1]
    with pytest.raises(RuntimeError, match="after shutdown"):
        server._compiling._threads.submit(print)


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
