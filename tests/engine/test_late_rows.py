"""Masks that follow a turn's own ids: the order of launches, failures, and what a mask must not depend on."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from pensieve_jax.core.errors import GrammarFailedError, StepFailedError
from pensieve_jax.engine import late_rows
from pensieve_jax.engine.late_rows import JoinedRows, LateRows
from pensieve_jax.scheduler import Scheduler
from tests.engine.fake_runner import VOCAB_SIZE, dense_continuation
from tests.engine.harness import Harness, small_config
from tests.seeds import new_seed

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


def timed_steps(harness, clock):
    """Run all turns; returns the seconds that each step's masks took."""
    taken = []
    while harness.engine.has_unfinished:
        began_s = clock[0]
        harness.step()
        taken.append(clock[0] - began_s)
        harness.engine.check_integrity()
        assert len(taken) < 1000, "a turn does not end"
    harness.check_empty()
    return taken


def slow_harness(**config):
    """Return a harness and its clock of masks."""
    clock, harness = [0.0], Harness(small_config(**config))
    harness.engine._late_rows.now_s = lambda: clock[0]
    return harness, clock


def test_a_slow_row_fails_alone_and_delays_no_step_for_long():
    harness, clock = slow_harness()
    slow = [submitted(harness, f"s{i}", Slow(clock, 0.02), seed=i)[0] for i in range(5)]
    quick, facts = submitted(harness, "q", Slow(clock, 0.0005), seed=9)
    assert max(timed_steps(harness, clock)) < 0.1
    assert quick.result().token_ids == expected(facts, Residues())
    for turn in slow:
        assert isinstance(turn.error, GrammarFailedError)
        assert "the masks of the reply took 0.12 s for 6 tokens, which is too long" in str(turn.error)


def test_rows_behind_one_that_becomes_slow_wait_and_only_that_one_fails():
    """Its masks were the quickest of all, so it went first."""
    harness, clock = slow_harness()
    slow = submitted(harness, "s", Slow(clock, 0.06, num_quick=4), seed=1)[0]
    others = [submitted(harness, f"o{i}", Slow(clock, 0.002), seed=i) for i in range(6)]
    assert max(timed_steps(harness, clock)) < 0.1
    assert isinstance(slow.error, GrammarFailedError)
    assert "a mask of the reply took 60 ms; the limit is 45 ms" in str(slow.error)
    for turn, facts in others:
        assert turn.result().token_ids == expected(facts, Residues())


def test_rows_that_become_slow_together_delay_no_step_for_long():
    harness, clock = slow_harness(max_num_running=16)
    slow = [submitted(harness, f"s{i}", Slow(clock, 0.05, num_quick=3), seed=i)[0] for i in range(12)]
    others = [submitted(harness, f"o{i}", row, seed=i) for i, row in enumerate([Slow(clock, 0.0001), None])]
    taken = timed_steps(harness, clock)
    assert 0.04 < max(taken) < 0.1
    assert all(isinstance(turn.error, GrammarFailedError) for turn in slow)
    for turn, facts in others:
        assert turn.result().token_ids == expected(facts, None if turn is others[1][0] else Residues())


def test_rows_that_take_too_long_together_wait_by_turns():
    """Nine rows of 10 ms need three steps for each token, and none is to blame."""
    harness, clock = slow_harness(max_num_running=16)
    sent = [submitted(harness, f"s{i}", Slow(clock, 0.01), seed=i, max_tokens=8) for i in range(9)]
    free, facts = submitted(harness, "f", seed=7, max_tokens=20)
    taken = timed_steps(harness, clock)
    assert max(taken) < 0.05 and len(taken) < 8 * 3 + 4
    for turn, its_facts in sent:
        assert turn.result().token_ids == expected(its_facts, Residues())
    assert free.result().token_ids == expected(facts)


def test_a_slow_row_beside_quick_ones_does_not_wait_for_ever():
    harness, clock = slow_harness(max_num_running=16)
    quick = [submitted(harness, f"q{i}", Slow(clock, 0.005), seed=i, max_tokens=20) for i in range(8)]
    slow, facts = submitted(harness, "s", Slow(clock, 0.02), seed=3, max_tokens=2)
    num_steps = 0
    while not slow.done:
        harness.step()
        num_steps += 1
    assert num_steps < 16
    assert slow.result().token_ids == expected(facts, Residues())
    timed_steps(harness, clock)
    for turn, its_facts in quick:
        assert turn.result().token_ids == expected(its_facts, Residues())


class Erratic(Residues):
    """Row whose masks take a random time, so that rows wait in any step."""

    def __init__(self, clock, rng) -> None:
        super().__init__()
        self.clock, self.rng = clock, rng

    def fill(self, words: np.ndarray) -> bool:
        self.clock[0] += self.rng.choice([1e-5, 0.01, 0.03, 0.044])
        return super().fill(words)


@pytest.mark.parametrize("gpu_pages", [9, 40])
@pytest.mark.parametrize("fault", [None, "launch", "choose", "fetch"])
def test_rows_that_wait_in_random_steps_equal_the_reference(gpu_pages, fault, monkeypatch):
    """Prompts of all lengths in a chunk, history, suspensions, forks, and a step that fails."""
    seed = new_seed()
    rng = random.Random(seed)
    monkeypatch.setattr(late_rows, "ROW_S", 1e9)
    harness, clock = slow_harness(gpu_pages=gpu_pages, cpu_pages=20, max_num_running=6)
    for number in range(2):
        harness.turn(f"c{number}", 20 + number, seed=9, max_tokens=3)
        harness.engine.fork(f"c{number}", f"c{number + 2}")
    rows = [Erratic(clock, rng) if i % 3 else None for i in range(9)]
    sent = [
        submitted(harness, f"c{i}", row, seed=i, max_tokens=rng.randrange(1, 30), prompt=rng.randrange(1, 40))
        for i, row in enumerate(rows)
    ]
    harness.step(rng.randrange(1, 12))
    if fault is not None:
        harness.runner.faults[fault] = lambda: StepFailedError("the device failed")
    assert max(timed_steps(harness, clock)) < 0.09
    for row, (turn, facts) in zip(rows, sent, strict=True):
        if turn.error is not None:
            assert fault is not None and isinstance(turn.error, StepFailedError)
            continue
        assert turn.output.token_ids == expected(facts, None if row is None else Residues())


def keeps_discarded_ids(patch):
    """Give the rows the ids that mean nothing."""
    accept = LateRows.accept
    patch.setattr(LateRows, "accept", lambda self, *args: accept(self, *args[:3]))


def takes_no_sample_back(patch):
    patch.setattr(Scheduler, "take_back_sample", lambda self, request: None)


@pytest.mark.parametrize("fault", [keeps_discarded_ids, takes_no_sample_back])
def test_planted_faults_of_waiting_rows_are_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_rows_that_take_too_long_together_wait_by_turns()


@pytest.mark.parametrize("fault", [accepts_late, masks_of_other_rows, rows_never_wait])
def test_planted_faults_are_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_in_company()
