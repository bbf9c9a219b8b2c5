"""Ctrl-C at every line that the host runs: every turn keeps an owner, and only running turns are lost.

`make test` interrupts a twelfth of the package's lines at their first run, and long tests all others. These
also interrupt later runs of lines, one in `INTERRUPTS_STRIDE` (with 1 all, in a quarter of an hour of a
core), and interrupt some again during the cleanup after the first interrupt. `INTERRUPTS_SEED` determines
the first line.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from pensieve_jax import LLM, SamplingParams
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.store import CUT_FINISH_REASON
from pensieve_jax.text import byte_tokenizer
from tests.engine.fake_transfers import Delays
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import TurnFacts
from tests.fake_llm import llm_of
from tests.interruption import Interruption, Line
from tests.seeds import enough

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)
CONFIG = small_config(gpu_pages=14, cpu_pages=8, swap_out_fraction=0.5)
LEARNED = small_config(gpu_pages=14, cpu_pages=8, swap_out_fraction=0.5, policy="learned")
DELAYS = Delays(seed=1, laziness=0.5)
HELLO = [{"role": "user", "content": "hello"}]
LONG_TEXT = "a text that fills some pages " * 3


class SmallEngine(NamedTuple):
    """An engine with two conversations in its history, too small for the requested work."""

    llm: LLM
    harness: Harness


def new_engine(patch: pytest.MonkeyPatch, *, learned: bool = False) -> SmallEngine:
    config = LEARNED if learned else CONFIG
    tokenizer = byte_tokenizer()  # a used one has texts already, so that other lines run
    harness = Harness(config, tokenizer=tokenizer, delays=DELAYS)
    small = SmallEngine(llm_of(patch, harness, tokenizer), harness)
    small.llm.generate([LONG_TEXT], PARAMS, conversation_ids=["b"])
    return small


# The interrupted calls: each gets a new engine, and holds no turn once it has raised.


def generate(llm: LLM) -> None:
    llm.generate(["x", LONG_TEXT, [5, 6]], PARAMS, conversation_ids=["a", "c", None])


def chat(llm: LLM) -> None:
    llm.chat(HELLO, PARAMS, conversation_id="a")


def chat_of_several(llm: LLM) -> None:
    llm.chat([HELLO, HELLO], PARAMS, conversation_ids=["a", "c"])


def stream(llm: LLM) -> None:
    for _ in llm.stream("x", PARAMS, conversation_id="a"):
        pass


def stream_of_chat(llm: LLM) -> None:
    with llm.stream_chat(HELLO, PARAMS, conversation_id="a") as deltas:
        for _ in deltas:
            pass


def two_streams(llm: LLM) -> None:
    """Close one stream and drop the other, while a third turn runs."""
    turns = llm.submit([LONG_TEXT], PARAMS, conversation_ids=["b"])
    one = llm.stream("x", PARAMS, conversation_id="a")
    other = llm.stream([5, 6], PARAMS, conversation_id="c")
    next(one)
    one.close()
    next(other)
    del other
    while not turns[0].done:
        llm.step()


def steps(llm: LLM) -> None:
    turns = llm.submit(["x", LONG_TEXT, HELLO], PARAMS, conversation_ids=["b", "c", "a"])
    llm.step()
    llm.cancel(turns[0])
    while llm.unfinished:
        llm.step()


def conversations(llm: LLM) -> None:
    """Run the operations between turns."""
    prefix = llm.share_prefix(LONG_TEXT)
    llm.generate(["x"], PARAMS, conversation_ids=["c"], prefix=prefix)
    llm.release_prefix(prefix)
    str(llm.explain("c"))
    llm.truncate("a", 9)
    llm.engine.push_out("b")
    llm.engine.forget_state("c")
    llm.end("b")


def trees(llm: LLM) -> None:
    """Run placed turns: choices, forks, a resent history, and their calls."""
    engine, ids = llm.engine, list(range(1, 41))
    first = [TurnNode(turn_id=new_turn_id()) for _ in range(2)]
    turns = engine.submit([TurnSpec(ids, PARAMS, node=node) for node in first])
    while not all(turn.done for turn in turns):
        engine.step()
    behind = [
        TurnNode(turn_id=new_turn_id(node.turn_id), parent_id=node.turn_id) for node in (*first, first[0])
    ]
    again = TurnNode(turn_id=new_turn_id(), owner="", durable=False)
    turns = engine.submit([TurnSpec([7], PARAMS, node=node) for node in behind])
    turns += engine.submit([TurnSpec([*ids, 8], PARAMS, node=again)])
    engine.step()
    engine.cancel(turns[2])
    while not all(turn.done for turn in turns):
        engine.step()
    engine.chunk_map("")
    engine.explain_turn("", first[0].turn_id)
    engine.push_out_turn("", first[0].turn_id)
    engine.forget_turn_state("", behind[0].turn_id)
    engine.fork("b", "d", 20)
    llm.end("d")


def learning(llm: LLM) -> None:
    """Run an order that learns: turns are sent, answered and withdrawn, and it is reset."""
    llm.generate(["x"], PARAMS, conversation_ids=["a"])
    turns = llm.submit([LONG_TEXT], PARAMS, conversation_ids=["b"])
    llm.step()
    llm.cancel(turns[0])
    llm.generate([LONG_TEXT], PARAMS, conversation_ids=["c"])
    llm.forget_experience()
    llm.close()


def recovery(llm: LLM) -> None:
    """Run the call after an interrupt in a step: it starts over."""
    generate(llm)


def close(llm: LLM) -> None:
    held = llm.submit(["x"], PARAMS, conversation_ids=["c"])
    llm.step()
    llm.close()
    assert held


CHATS = {"chat", "chat_of_several", "stream_of_chat", "steps"}
# Their own frames hold no turns, so their errors may be kept. The others hold what they submitted until then.
BLOCKING = {"generate", "chat", "chat_of_several", "conversations", "recovery"}
NUM_SECOND_INTERRUPTS = 15
STRIDE = int(os.environ.get("INTERRUPTS_STRIDE", enough(180, 20)))


def interrupt_a_step(small: SmallEngine) -> None:
    small.harness.runner.faults["launch"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        generate(small.llm)


CALLS: dict[str, Callable[[LLM], None]] = {
    call.__name__: call
    for call in (
        generate,
        chat,
        chat_of_several,
        stream,
        stream_of_chat,
        two_streams,
        steps,
        conversations,
        trees,
        learning,
        recovery,
        close,
    )
}


def prepared(patch: pytest.MonkeyPatch, name: str) -> SmallEngine:
    small = new_engine(patch, learned=name == "learning")
    if name in CHATS:
        small.llm.chat(HELLO, PARAMS, conversation_id="a")
    else:
        small.llm.generate(["hello"], PARAMS, conversation_ids=["a"])
    if name == "recovery":
        interrupt_a_step(small)
    return small


# The checks afterwards.


def check(small: SmallEngine) -> None:
    """Check that nothing runs, the history has whole turns, and every conversation can be continued."""
    llm, harness = small
    if llm.engine.closed:
        return
    assert llm.unfinished == (), "a turn is left without an owner"
    assert not busy(small)
    harness.engine.check_integrity()
    for info in llm.conversations():
        check_history(small, info.conversation_id)
    facts = [harness.facts(harness.prompt(5, seed=1), name, max_tokens=2) for name in "abc"]
    outputs = harness.run(*(harness.submit(one, name) for one, name in zip(facts, "abc", strict=True)))
    assert [output.token_ids for output in outputs] == [harness.expected(one) for one in facts]
    harness.check_empty()


def busy(small: SmallEngine) -> list[str]:
    table = small.harness.engine.conversations
    return [name for name in "abc" if table.is_busy(name)]


def check_history(small: SmallEngine, conversation_id: str) -> None:
    _, harness = small
    history: tuple[int, ...] = ()
    for turn in harness.store.load(conversation_id).turns:
        history = history[: turn.keep]
        facts = TurnFacts(history, turn.prompt_token_ids, PARAMS, 0, harness.max_context_tokens)
        is_whole = turn.finish_reason != CUT_FINISH_REASON
        if is_whole:
            facts.check_end(turn.output_token_ids, turn.finish_reason, harness.bench.eos_token_ids)
        harness.bench.check_tokens(facts, turn.output_token_ids, whole=is_whole)
        history += turn.prompt_token_ids + turn.output_token_ids
    assert harness.history(conversation_id) == history


def interrupt(patch: pytest.MonkeyPatch, name: str, *at: int) -> Interruption:
    """Interrupt a call at these lines and check the result."""
    with (
        patch.context() as of_this_engine
    ):  # otherwise thousands of engines would be kept until the test ends
        small = prepared(of_this_engine, name)
    interruption = Interruption(*at)
    kept: BaseException | None = None
    try:
        with interruption:
            CALLS[name](small.llm)
    except KeyboardInterrupt as error:
        if name in BLOCKING and len(at) == 1:
            kept = error  # and with it every frame, as an interactive session does
    try:
        check(small)
    except AssertionError as error:
        raise AssertionError(f"{name}, interrupted at lines {at}: {interruption.come}") from error
    del kept
    return interruption


def lines_of(patch: pytest.MonkeyPatch, name: str) -> Interruption:
    """Run a call without an interrupt, recording all lines."""
    small = prepared(patch, name)
    with Interruption() as lines:
        CALLS[name](small.llm)
    check(small)
    return lines


_first_lines: dict[str, dict[Line, int]] = {}


def first_lines(patch: pytest.MonkeyPatch, name: str) -> dict[Line, int]:
    """Return, by line, the number at which a call runs it first; every call is run once."""
    if name not in _first_lines:
        _first_lines[name] = lines_of(patch, name).first
    return _first_lines[name]


@pytest.mark.parametrize(
    "rest", [False, pytest.param(True, marks=pytest.mark.long)], ids=["a twelfth", "rest"]
)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_the_first_run_of_a_line(
    monkeypatch: pytest.MonkeyPatch, name: str, rest: bool
) -> None:
    calls = list(CALLS)
    before: set[Line] = set().union(*(first_lines(monkeypatch, one) for one in calls[: calls.index(name)]))
    lines = first_lines(monkeypatch, name)
    todo = [(line, number) for line, number in lines.items() if line not in before]
    assert todo
    some = strided(len(todo), 1, 12)
    numbers = [number for number in range(1, len(todo) + 1) if number not in some] if rest else some
    for line, number in (todo[n - 1] for n in numbers):
        assert interrupt(monkeypatch, name, number).come == [line]
    print(f"{name}: {len(numbers)} of {len(todo)} new lines of {len(lines)}, 0 conversations busy")


@pytest.mark.parametrize("name", CALLS)
def test_a_second_interrupt_during_the_cleanup(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seed = int(os.environ.get("INTERRUPTS_SEED", "0"))
    print(f"INTERRUPTS_SEED={seed}")
    chance = random.Random(seed)
    num_lines = lines_of(monkeypatch, name).num_lines
    for number in chance.sample(range(1, num_lines + 1), NUM_SECOND_INTERRUPTS):
        interrupt(monkeypatch, name, number, number + chance.randint(1, 12))


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_run_of_a_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    numbers = strided(lines_of(monkeypatch, name).num_lines, 1, STRIDE)
    for number in numbers:
        assert interrupt(monkeypatch, name, number).come
    print(f"{name}: {len(numbers)} lines, 0 conversations busy")


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_two_interrupts_at_any_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    numbers, num_twice = strided(lines_of(monkeypatch, name).num_lines, 5, STRIDE), 0
    for number in numbers:
        num_twice += len(interrupt(monkeypatch, name, number, number + 1 + number % 7).come) == 2
    print(f"{name}: {len(numbers)} lines, {num_twice} interrupted again, 0 conversations busy")


def strided(num_lines: int, times: int, stride: int) -> range:
    """Return one in `times` strides of the lines 1 to `num_lines`, from an offset that the seed gives."""
    seed = int(os.environ.get("INTERRUPTS_SEED", "0"))
    print(f"INTERRUPTS_SEED={seed} INTERRUPTS_STRIDE={stride}")
    return range(1 + random.Random(seed).randrange(times * stride), num_lines + 1, times * stride)
