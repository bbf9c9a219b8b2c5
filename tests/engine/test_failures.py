"""External failures: a step on the device, a full disk, Ctrl-C. Conversations survive them all."""

from __future__ import annotations

import functools
import threading
import weakref

import pytest

from pensieve_jax.core.errors import (
    EngineClosedError,
    HistoryError,
    InvalidRequestError,
    PensieveError,
    StepFailedError,
)
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine import submission
from pensieve_jax.engine.loop import unobserved
from pensieve_jax.engine.turn import ReplyState
from pensieve_jax.scheduler.request import RequestStatus
from pensieve_jax.text import byte_tokenizer
from tests.engine.harness import Harness, small_config


def two_running_turns(harness, num_steps=3):
    """Return two conversations with a committed turn each, and another turn of each that runs."""
    harness.turn("a", 20, seed=1, max_tokens=5)
    harness.turn("b", 20, seed=2, max_tokens=5)
    facts = [harness.facts(harness.prompt(9, seed=i), name, max_tokens=8) for i, name in enumerate("ab", 3)]
    turns = [harness.submit(one, name) for one, name in zip(facts, "ab", strict=True)]
    harness.step(num_steps)
    return turns, facts


def check_usable(harness, facts):
    """Check that both turns can be sent again, with equal results."""
    turns = [harness.submit(one, name) for one, name in zip(facts, "ab", strict=True)]
    outputs = harness.run(*turns)
    assert [output.token_ids for output in outputs] == [harness.expected(one) for one in facts]
    harness.check_empty()


@pytest.mark.parametrize("where", ["launch", "choose", "fetch", "completed", "swap_out", "swap_in"])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_failed_step_fails_the_running_turns_only(where, num_steps):
    harness = Harness()
    turns, facts = two_running_turns(harness, num_steps)
    histories = [harness.history(name) for name in "ab"]
    harness.runner.faults[where] = lambda: StepFailedError("the device failed")
    num_resets = harness.runner.num_resets
    for _ in range(3):
        if not turns[0].done:
            ended = harness.step()
    assert set(ended) == set(turns)
    assert all(isinstance(turn.error, StepFailedError) and turn.output is None for turn in turns)
    assert [harness.history(name) for name in "ab"] == histories
    assert harness.engine.stats()["num_turns_failed"] == 2
    check_usable(harness, facts)
    assert harness.runner.num_resets == num_resets + 1


def test_a_failed_turn_keeps_no_frames():
    """A turn object keeps nothing that its failed step worked on, including arrays on a device."""

    class Array:
        pass

    refs = []

    def cause():
        array = Array()
        refs.append(weakref.ref(array))
        raise ValueError("the runtime's own")

    def fail():
        array = Array()
        refs.append(weakref.ref(array))
        try:
            cause()
        except ValueError as error:
            raise StepFailedError("the device failed") from error

    harness = Harness()
    turns, facts = two_running_turns(harness)
    harness.runner.faults["launch"] = fail
    mine = None
    try:
        raise LookupError("the caller's own")
    except LookupError as error:
        harness.step()
        mine = error
    assert [ref() for ref in refs] == [None, None]
    assert str(turns[0].error.__cause__) == "the runtime's own", "the reason is kept"
    assert mine.__traceback__ is not None, "what the caller handles meanwhile is the caller's"
    check_usable(harness, facts)


def test_waiting_turns_survive_a_failed_step():
    harness = Harness(small_config(max_num_running=1))
    facts = [harness.facts(harness.prompt(9, seed=i), name, max_tokens=8) for i, name in enumerate("ab")]
    running, waiting = (harness.submit(one, name) for one, name in zip(facts, "ab", strict=True))
    harness.step(2)
    harness.runner.faults["launch"] = lambda: StepFailedError("the device failed")
    assert harness.step() == [running]
    assert harness.run(waiting)[0].token_ids == harness.expected(facts[1])


@pytest.mark.parametrize("options", [{}, {"frequency_penalty": 0.5, "repetition_penalty": 1.5}], ids=str)
def test_a_suspended_turn_survives_a_failed_step(options):
    """Its token in flight is lost with the step, and sampled again with the same id; so are its counts."""
    harness = Harness(small_config(gpu_pages=3, reserve_fraction=0.0))
    early = harness.facts(harness.prompt(14, seed=1), "early", max_tokens=20)
    late = harness.facts(harness.prompt(10, seed=2), "late", max_tokens=12, **options)
    turns = [harness.submit(early, "early"), harness.submit(late, "late")]
    while not (harness.scheduled and harness.scheduled[-1].suspended):
        if len(harness.scheduled) > 2:
            harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")
        harness.on_step = functools.partial(_only_fail_on_suspension, harness)
        harness.step()
        harness.on_step = unobserved
    assert turns[0].error is not None and turns[1].error is None
    assert harness.run(turns[1])[0].token_ids == harness.expected(late)
    harness.check_empty()


def _only_fail_on_suspension(harness, output):
    if not output.suspended:
        harness.runner.faults.clear()


def test_a_history_that_cannot_be_written_fails_that_turn_only():
    harness = Harness()
    turns, facts = two_running_turns(harness, 0)
    longer = harness.facts(harness.prompt(5), "c", max_tokens=20)
    other = harness.submit(longer, "c")
    harness.store.faults["commit"] = lambda: HistoryError("the disk is full")
    harness.step(9)
    assert all(isinstance(turn.error, HistoryError) for turn in turns) and other.error is None
    assert harness.run(other)[0].token_ids == harness.expected(longer)
    assert [len(harness.history(name)) for name in "ab"] == [25, 25]
    check_usable(harness, facts)


def test_a_failed_commit_of_a_first_turn_leaves_no_conversation():
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(5), "a", max_tokens=1), "a")
    harness.store.faults["commit"] = lambda: HistoryError("the disk is full")
    harness.drain()
    assert isinstance(turn.error, HistoryError) and harness.engine.conversations.listing() == []
    harness.check_empty()


@pytest.mark.parametrize(
    "where", ["launch", "choose", "fetch", "completed", "swap_out", "swap_in done", "expedite"]
)
@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_ctrl_c_in_a_step_loses_running_turns_only(where, num_steps):
    """The store holds exactly the committed turns, and the continuation equals the reference."""
    harness = Harness()
    turns, facts = two_running_turns(harness, num_steps)
    histories = [harness.history(name) for name in "ab"]
    harness.runner.faults[where] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            harness.engine.step()
    assert [harness.history(name) for name in "ab"] == histories
    harness.step()
    assert all(isinstance(turn.error, StepFailedError) for turn in turns)
    check_usable(harness, facts)


@pytest.mark.parametrize("where", ["commit", "committed"])
def test_ctrl_c_around_a_commit(where):
    """Before the write the turns are lost; after it they are in the history and can be continued."""
    harness = Harness()
    turns, facts = two_running_turns(harness, 0)
    harness.store.faults[where] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        harness.drain()
    kept = where == "committed"
    for name, one in zip("ab", facts, strict=True):
        reply = (*one.prompt, *harness.expected(one)) if kept else ()
        assert harness.history(name) == (*one.history, *reply)
    assert len(harness.store.load("a").turns) == (2 if kept else 1)
    harness.step()
    assert all(turn.done for turn in turns)
    if kept:
        for seed in (6, 7):
            harness.turn("a", 4, seed=seed, max_tokens=4)
            harness.turn("b", 4, seed=seed, max_tokens=4)
        assert len(harness.store.load("b").turns) == 4
        harness.check_empty()
    else:
        check_usable(harness, facts)


@pytest.mark.parametrize("where", ["launch", "choose", "fetch", "commit", "committed"])
def test_ctrl_c_then_another_process_opens_the_history(where, tmp_path):
    """Closing after an interrupt releases the file; every commit is there, and can be continued."""
    path = tmp_path / "history.sqlite"
    harness = Harness(path=path)
    turns, _ = two_running_turns(harness, 2)
    faults = harness.store.faults if "commit" in where else harness.runner.faults
    faults[where] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        harness.drain()
    histories = [harness.history(name) for name in "ab"]
    harness.engine.close()
    assert all(turn.done for turn in turns)
    again = Harness(path=path)
    assert [again.history(name) for name in "ab"] == histories
    for name in "ab":
        output = again.turn(name, 6, seed=9, max_tokens=4)
        assert output.usage.recomputed_tokens == len(histories[0]) - 1
    again.engine.close()


def test_a_closed_engine_refuses_calls():
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(5), "a"), "a")
    harness.step(2)
    harness.engine.close()
    harness.engine.close()
    assert turn.output.finish_reason == "cancelled"
    engine = harness.engine
    for call in (
        engine.step,
        engine.take_deltas,
        engine.expire_idle,
        engine.forget_experience,
        lambda: engine.end("a"),
        lambda: engine.submit([]),
        lambda: engine.share_prefix([1]),
        lambda: engine.explain("a"),
        lambda: engine.explain_turn("", "a" * 32),
        lambda: engine.chunk_map(""),
        lambda: engine.unfinished,
        lambda: engine.conversations,
        lambda: engine.cache,
    ):
        with pytest.raises(EngineClosedError):
            call()


def test_an_unreported_finished_turn_is_found(monkeypatch):
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(5), "a"), "a")
    (request,) = harness.engine._ledger.replies
    with monkeypatch.context() as patch:
        patch.setattr(harness.engine._loop, "check_integrity", lambda: None)
        harness.engine.check_integrity()
        patch.setattr(request, "status", RequestStatus.FINISHED)
        with pytest.raises(AssertionError, match="a finished turn was not reported"):
            harness.engine.check_integrity()
    harness.run(turn)


def fail_resets(harness, monkeypatch, count):
    """Make the next `count` resets run out of memory; return a counter of resets."""
    reset, calls = harness.runner.reset, []

    def fail():
        calls.append(None)
        if len(calls) <= count:
            raise StepFailedError("no memory for new pools")
        reset()

    monkeypatch.setattr(harness.runner, "reset", fail)
    return calls


def test_an_allocation_of_pools_that_failed_is_retried_at_the_next_step(monkeypatch):
    """The running turns get the step's own error at once; waiting turns and host memory are kept."""
    harness = Harness(small_config(max_num_running=1, cpu_pages=40))
    harness.turn("old", 60, max_tokens=3)
    harness.engine.push_out("old")
    harness.turn(None, 5, max_tokens=1)
    harness.finish_copies()
    facts = [harness.facts(harness.prompt(9, seed=i), name, max_tokens=8) for i, name in enumerate("ab")]
    running, waiting = (harness.submit(one, name) for one, name in zip(facts, "ab", strict=True))
    harness.step(2)
    fail_resets(harness, monkeypatch, 2)
    harness.runner.faults["launch"] = lambda: StepFailedError("the device failed")
    assert harness.step() == [running]
    assert str(running.error) == "the device failed" and not waiting.done
    for _ in range(2):
        with pytest.raises(StepFailedError, match="no memory"):
            harness.engine.step()
        harness.engine.check_integrity()
    assert harness.run(waiting)[0].token_ids == harness.expected(facts[1])
    assert harness.turn("old", 5, max_tokens=2).usage.swapped_in_tokens > 48
    harness.check_empty()


def test_without_pools_everything_but_steps_works(monkeypatch):
    """Nothing hangs: each step raises the reason, and waiting turns can be cancelled."""
    harness = Harness(small_config(max_num_running=1))
    harness.turn("old", 20, max_tokens=3)
    specs = [TurnSpec(harness.prompt(9), SamplingParams(max_tokens=8), name) for name in "ab"]
    running, waiting = harness.engine.submit(specs)
    harness.step(2)
    calls = fail_resets(harness, monkeypatch, 10**6)
    harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")
    assert harness.step() == [running]
    harness.engine.truncate("old", 10)
    (another,) = harness.engine.submit([TurnSpec(harness.prompt(5), SamplingParams(), "c")])
    assert harness.engine.unfinished == (waiting, another)
    harness.engine.cancel(waiting)
    with pytest.raises(StepFailedError, match="no memory"):
        harness.engine.step()
    assert harness.engine.has_unfinished and waiting.output.finish_reason == "cancelled"
    num_calls = len(calls)
    harness.engine.close()
    assert another.output.finish_reason == "cancelled" and len(calls) == num_calls


def test_ctrl_c_is_recovered_from_although_new_pools_do_not_fit(monkeypatch):
    """The recovery does not use the device, so no other error replaces the interrupt."""
    harness = Harness()
    turns, facts = two_running_turns(harness)
    fail_resets(harness, monkeypatch, 1)
    harness.runner.faults["launch"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    for turn in turns:
        harness.engine.cancel(turn)
        assert "interrupted" in str(turn.error)
    with pytest.raises(StepFailedError, match="no memory"):
        harness.engine.step()
    check_usable(harness, facts)


def test_a_submission_that_fails_half_way_queues_nothing(monkeypatch):
    harness = Harness()
    table = harness.engine.conversations
    get_or_create = table.get_or_create
    specs = [TurnSpec(harness.prompt(5), SamplingParams(), name) for name in "ab"]

    def fail_on_the_second(conversation_id):
        if conversation_id == "b":
            raise HistoryError("the history cannot be read")
        return get_or_create(conversation_id)

    monkeypatch.setattr(table, "get_or_create", fail_on_the_second)
    with pytest.raises(HistoryError):
        harness.engine.submit(specs)
    assert not harness.engine.has_unfinished
    harness.check_empty()


@pytest.mark.parametrize("names", ["a", "ab", "old"])
def test_a_turn_that_is_refused_late_is_not_queued(monkeypatch, names):
    """Its reply could not be created: its request is removed, and its conversation is not busy."""
    harness = Harness(tokenizer=byte_tokenizer())
    harness.turn("old", 20, max_tokens=3)
    names = [names] if names == "old" else list(names)
    specs = [TurnSpec(harness.prompt(5), SamplingParams(), name) for name in names]
    made = []

    class Refusing(ReplyState):
        def __init__(self, request, tokenizer, *rest):
            made.append(tokenizer)
            if tokenizer is not None and len(made) == len(names):
                raise InvalidRequestError("stop[0]", "", "a non-empty string")
            super().__init__(request, tokenizer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(submission, "ReplyState", Refusing)
        with pytest.raises(InvalidRequestError, match=r"stop\[0\]"):
            harness.engine.submit(specs)
    assert not harness.engine.has_unfinished
    assert not any(harness.engine.conversations.is_busy(name) for name in names)
    harness.run(*harness.engine.submit(specs))
    harness.turn("old", 5, max_tokens=3)
    harness.check_empty()


def test_a_call_from_a_second_thread_is_refused_during_a_call():
    harness = Harness()
    refused = []

    def call():
        with pytest.raises(PensieveError, match="Another thread"):
            harness.engine.step()
        refused.append(True)

    def in_a_step(_):
        harness.on_step = unobserved
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    harness.on_step = in_a_step
    harness.turn("a", 5, max_tokens=4)
    assert refused


def test_a_second_close_completes_one_that_was_interrupted(tmp_path):
    path = tmp_path / "history.sqlite"
    harness = Harness(path=path)
    harness.turn("a", 5, max_tokens=4)
    close = harness.store.close

    def interrupted():
        harness.store.close = close
        raise KeyboardInterrupt

    harness.store.close = interrupted
    with pytest.raises(KeyboardInterrupt):
        harness.engine.close()
    harness.engine.close()
    Harness(path=path).engine.close()
