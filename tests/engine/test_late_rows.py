"""Masks that follow a turn's own ids: the order of launches, failures, and what a mask must not depend on."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from pensieve_jax.core.errors import GrammarFailedError, StepFailedError
from pensieve_jax.engine.late_rows import JoinedRows, LateRows
from tests.engine.fake_runner import VOCAB_SIZE, dense_continuation
from tests.engine.harness import Harness, small_config

NUM_CLASSES = 5


class Residues:
    """Row that forbids two of five classes of ids, by a hash of all ids so far.

    Attributes:
        fails: what raises at the n-th id: "accept", "fill", "empty" or nothing.
    """

    waits = True

    def __init__(self, fails: str | None = None, at: int = -1) -> None:
        self.fails, self.at = fails, at
        self.num_accepted = self.state = 0

    def accept(self, token_id: int) -> None:
        if self.fails == "accept" and self.num_accepted == self.at:
            raise GrammarFailedError("the row failed")
        self.num_accepted += 1
        self.state = (31 * self.state + token_id + 7) % 1009

    def fill(self, words: np.ndarray) -> bool:
        if self.fails == "fill" and self.num_accepted == self.at:
            raise GrammarFailedError("the row failed")
        bits = np.ones(32 * len(words), bool)
        bits[self.state % NUM_CLASSES :: NUM_CLASSES] = False
        bits[(self.state // 7) % NUM_CLASSES :: NUM_CLASSES] = False
        if self.fails == "empty" and self.num_accepted == self.at:
            bits[:] = False
        words &= np.packbits(bits, bitorder="little").view(np.int32)
        return True


class Unmasked:
    """Row that never masks anything and waits for nothing."""

    waits = False

    def accept(self, token_id: int) -> None: ...

    def fill(self, words: np.ndarray) -> bool:
        return False


def expected(facts, row=None):
    """Return the reply of the dense reference within the masks of a new row."""
    context, params = [*facts.history, *facts.prompt], facts.params
    found = dense_continuation(context, params, facts.seed, params.max_tokens, lambda number: True, row)
    return tuple(found.token_ids)


def submitted(harness, name, row=None, *, seed, max_tokens=12, prompt=30, temperature=0.7):
    """Submit a turn; returns it with its facts."""
    facts = harness.facts(
        harness.prompt(prompt, seed), name, seed, max_tokens=max_tokens, temperature=temperature
    )
    turn = harness.submit(facts, name)
    if row is not None:
        harness.engine._late_rows.add(turn.request, row)
    return turn, facts


def test_a_choice_waits_for_ids_only_where_a_mask_needs_them():
    harness = Harness()
    turn, facts = submitted(harness, "a", Residues(), seed=1, max_tokens=4)
    (output,) = harness.run(turn)
    assert output.token_ids == expected(facts, Residues()) != expected(facts)
    events = harness.runner.events
    assert events[:2] == [("launch", 0), ("choose", 0)], "no id is in flight"
    for step_id in range(1, 4):
        at = events.index(("launch", step_id))
        assert events[at : at + 3] == [("launch", step_id), ("fetch", step_id - 1), ("choose", step_id)]
    other = Harness()
    turn, facts = submitted(other, "a", Unmasked(), seed=1, max_tokens=4)
    (output,) = other.run(turn)
    assert output.token_ids == expected(facts)
    at = other.runner.events.index(("launch", 1))
    assert other.runner.events[at : at + 3] == [("launch", 1), ("choose", 1), ("fetch", 0)]


def run_in_company(gpu_pages=40, fault=None, at=3):
    """Run masked turns beside others; returns a check for each, of those that did not fail."""
    config = small_config(gpu_pages=gpu_pages, cpu_pages=20, max_num_running=4)
    harness = Harness(config)
    for name in ("old 0", "old 1"):
        harness.turn(name, 40, seed=9, max_tokens=3)
    rows = [Residues() if i % 2 else None for i in range(6)]
    sent = [submitted(harness, f"c{i}", row, seed=i, max_tokens=20) for i, row in enumerate(rows)]
    harness.step(at)
    if fault is not None:
        harness.runner.faults[fault] = lambda: StepFailedError("the device failed")
    harness.drain()
    num_suspensions = 0
    for row, (turn, facts) in zip(rows, sent, strict=True):
        if turn.error is not None:
            assert fault is not None and isinstance(turn.error, StepFailedError)
            continue
        num_suspensions += turn.output.usage.num_suspensions
        assert turn.output.token_ids == expected(facts, None if row is None else Residues())
    assert any(turn.error is None for (turn, _) in sent)
    harness.check_empty()
    return num_suspensions


def test_masked_rows_in_company_equal_the_reference():
    assert run_in_company() == 0


def test_masked_rows_that_are_suspended_equal_the_reference():
    assert run_in_company(gpu_pages=12) > 0


@pytest.mark.parametrize("fault", ["launch", "choose", "fetch"])
@pytest.mark.parametrize("at", range(1, 24, 2))
def test_masked_rows_after_a_failed_step_equal_the_reference(fault, at):
    run_in_company(gpu_pages=12, fault=fault, at=at)


def test_ids_that_came_before_a_failed_choice_are_kept():
    """The turn that ends with them is committed, although the next choice could not be started."""
    harness = Harness()
    short, facts = submitted(harness, "a", Residues(), seed=1, max_tokens=3)
    long, _ = submitted(harness, "b", Residues(), seed=2)
    harness.step(3)
    harness.runner.faults["choose"] = lambda: StepFailedError("the device failed")
    assert set(harness.step()) == {short, long}
    assert short.result().token_ids == expected(facts, Residues())
    assert isinstance(long.error, StepFailedError)
    harness.check_empty()


def test_ctrl_c_before_a_late_choice_loses_running_turns_only():
    harness = Harness()
    harness.turn("a", 20, seed=1, max_tokens=5)
    turn, _ = submitted(harness, "a", Residues(), seed=2)
    harness.step(3)
    harness.runner.faults["choose"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    turn_again, facts = submitted(harness, "a", Residues(), seed=2)
    assert isinstance(turn.error, StepFailedError)
    (output,) = harness.run(turn_again)
    assert output.token_ids == expected(facts, Residues())
    harness.check_empty()


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("fails", ["accept", "fill", "empty"])
def test_a_row_that_fails_ends_its_turn_alone(fails, at):
    harness = Harness()
    broken, _ = submitted(harness, "a", Residues(fails, at), seed=1)
    others = [submitted(harness, name, row, seed=3) for name, row in (("b", Residues()), ("c", None))]
    harness.drain()
    assert isinstance(broken.error, GrammarFailedError)
    assert others[0][0].result().token_ids == expected(others[0][1], Residues())
    assert others[1][0].result().token_ids == expected(others[1][1])
    harness.check_empty()


def test_a_cancelled_turn_leaves_no_row():
    harness = Harness()
    turn, _ = submitted(harness, "a", Residues(), seed=1)
    harness.step(3)
    harness.engine.cancel(turn)
    assert not harness.engine._late_rows._rows
    harness.drain()
    events = harness.runner.events
    assert events.index(("choose", 2)) > events.index(("fetch", 1)), "it was late"
    harness.turn("b", 5, seed=2, max_tokens=3)
    assert events.index(("choose", 4)) < events.index(("fetch", 3)), "and no later turn is"


def test_joined_rows_allow_what_all_allow():
    harness = Harness()
    turn, facts = submitted(harness, "a", JoinedRows([Unmasked(), Residues(), Residues()]), seed=1)
    (output,) = harness.run(turn)
    assert output.token_ids == expected(facts, Residues())
    assert JoinedRows([Unmasked(), Residues()]).waits and not JoinedRows([Unmasked()]).waits
    words = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    assert not JoinedRows([Unmasked()]).fill(words) and (words == -1).all()


def accepts_late(patch):
    """Fill the masks of step N+1 before the ids of step N are accepted."""
    accept, words = LateRows.accept, LateRows.words
    late = []

    def words_first(self, sampling, num_rows):
        found = words(self, sampling, num_rows)
        for job in late:
            job()
        late.clear()
        return found

    patch.setattr(LateRows, "accept", lambda self, *args: late.append(functools.partial(accept, self, *args)))
    patch.setattr(LateRows, "words", words_first)


def masks_of_other_rows(patch):
    words = LateRows.words

    def shifted(self, sampling, num_rows):
        found = words(self, sampling, num_rows)
        count = len(sampling)
        if found is not None:
            found[:count] = np.roll(found[:count], 1, axis=0)
        return found

    patch.setattr(LateRows, "words", shifted)


def rows_never_wait(patch):
    patch.setattr(LateRows, "wait_for_ids", lambda self, sampling: False)


class Slow(Residues):
    """Row whose masks take some seconds of the thread's time, by a clock that the test moves.

    The first `num_quick` masks take almost none.
    """

    def __init__(self, clock, seconds, num_quick=0) -> None:
        super().__init__()
        self.clock, self.seconds, self.num_quick = clock, seconds, num_quick

    def fill(self, words: np.ndarray) -> bool:
        self.num_quick -= 1
        self.clock[0] += 1e-5 if self.num_quick >= 0 else self.seconds
        return super().fill(words)


def test_slow_rows_fail_before_they_delay_a_step_for_long():
    """Quick rows go first; slow ones fail where the step's time or their own is used up."""
    clock = [0.0]
    harness = Harness()
    harness.engine._late_rows.now_s = lambda: clock[0]
    slow = [submitted(harness, f"s{i}", Slow(clock, 0.02), seed=i)[0] for i in range(5)]
    quick, facts = submitted(harness, "q", Slow(clock, 0.0005), seed=9)
    begins = []
    while harness.engine.has_unfinished:
        begins.append(clock[0])
        harness.step()
    assert quick.result().token_ids == expected(facts, Residues())
    taken = [after - before for before, after in itertools.pairwise(begins)]
    assert max(taken) < 0.1
    errors = [str(turn.error) for turn in slow]
    assert all(isinstance(turn.error, GrammarFailedError) for turn in slow)
    assert any("a step took more than 45 ms" in error for error in errors)
    assert any("too long" in error for error in errors)
    harness.check_empty()


def test_rows_that_become_slow_together_delay_one_step_at_most():
    clock = [0.0]
    harness = Harness()
    harness.engine._late_rows.now_s = lambda: clock[0]
    turns = [submitted(harness, f"s{i}", Slow(clock, 0.05, num_quick=3), seed=i)[0] for i in range(12)]
    begins = []
    while harness.engine.has_unfinished:
        begins.append(clock[0])
        harness.step()
    taken = [after - before for before, after in itertools.pairwise(begins)]
    assert 0.04 < max(taken) < 0.1
    assert sum(isinstance(turn.error, GrammarFailedError) for turn in turns) >= 10
    harness.check_empty()


@pytest.mark.parametrize("fault", [accepts_late, masks_of_other_rows, rows_never_wait])
def test_planted_faults_are_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_in_company()
