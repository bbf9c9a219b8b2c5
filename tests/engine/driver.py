"""Runs a scenario through an engine and checks everything that can be checked from outside.

After every step: `check_integrity`. For every turn that ends: tokens, end, seed, logprobs and usage against
the reference and against what was really computed. Whatever fails is sent again later and must then be
equal. At the end no turn is left, every conversation's history is what its turns were, in memory and in the
store, and every page is free once all conversations are ended.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import (
    ContextLengthError,
    ConversationBusyError,
    HistoryError,
    InvalidRequestError,
    PensieveError,
    StepFailedError,
    UnknownConversationError,
)
from pensieve_jax.engine.validation import TurnSpec
from tests.engine.harness import MAX_STEPS, Harness
from tests.engine.oracles import Bench, FakeBench, TurnFacts
from tests.engine.outcomes import COUNTED, Running, check_cancelled, check_output, check_usage, facts_of
from tests.engine.scenarios import FAULT_PLACES, NUM_CONVERSATIONS, Draft, Op, Scenario


class Driver:
    """One engine, its model of what every conversation holds, and the turns that run.

    Attributes:
      histories: committed token ids by conversation.
      running: submitted turns that have not ended.
      lost: turns that failed, to be sent again.
      num_checked: turns that ended well and were equal.
      totals: usage added up.
    """

    def __init__(self, scenario: Scenario, bench: Bench, folder: Path | None) -> None:
        self._scenario = scenario
        self._bench = bench
        self._path = folder / "history.sqlite" if folder else None
        self._clock = VirtualClock(1000.0)
        self.histories: dict[str, tuple[int, ...]] = {}
        self.running: list[Running] = []
        self.lost: list[tuple[TurnFacts, str]] = []
        self.num_checked = 0
        self.totals: Counter[str] = Counter()
        self._open()

    def _open(self) -> None:
        self.harness = Harness(
            self._scenario.config,
            bench=self._bench,
            path=self._path,
            clock=self._clock,
            max_model_tokens=self._scenario.max_model_tokens,
        )
        self.engine, self.store = self.harness.engine, self.harness.store

    # Operations

    def apply(self, op: Op) -> None:
        getattr(self, f"_{op.kind}")(op)
        self.engine.check_integrity()

    def _submit(self, op: Op) -> None:
        drafts = [self._draft(draft) for draft in op.drafts]
        ids = [conversation_id for _, conversation_id in drafts if conversation_id is not None]
        refused: type[PensieveError] | None = None
        if len(set(ids)) < len(ids) or any(self._is_busy(conversation_id) for conversation_id in ids):
            refused = ConversationBusyError
        elif any(facts.max_output_len < 1 for facts, _ in drafts):
            refused = ContextLengthError
        specs = [TurnSpec(facts.prompt, facts.params, conversation_id) for facts, conversation_id in drafts]
        if refused is None:
            turns = self.engine.submit(specs)
            self.running += (Running(turn, *draft) for turn, draft in zip(turns, drafts, strict=True))
            return
        self._expect((refused, ConversationBusyError, ContextLengthError), lambda: self.engine.submit(specs))
        for conversation_id in set(ids) & set(self.histories):
            if refused is ContextLengthError:  # what a client would do
                self._truncate_to(conversation_id, len(self.histories[conversation_id]) // 2)

    def _step(self, op: Op) -> None:
        for _ in range(op.number):
            self.step()

    def _think(self, op: Op) -> None:
        self._clock.advance(op.number**2 / 10)

    def _cancel(self, op: Op) -> None:
        if self.running:
            cancelled = self.running.pop(op.number % len(self.running))
            self.engine.cancel(cancelled.turn)
            check_cancelled(cancelled, self._bench)

    def _truncate(self, op: Op) -> None:
        conversation_id = f"c{op.number % NUM_CONVERSATIONS}"
        history = self.histories.get(conversation_id, ())
        num_tokens = len(history) * op.number // 100
        if self._is_busy(conversation_id):
            error: type[PensieveError] | None = ConversationBusyError
        else:
            error = None if conversation_id in self.histories else UnknownConversationError
        if error is not None:
            self._expect(error, lambda: self.engine.truncate(conversation_id, num_tokens))
            return
        self._expect(InvalidRequestError, lambda: self.engine.truncate(conversation_id, len(history) + 1))
        self._truncate_to(conversation_id, num_tokens)

    def _truncate_to(self, conversation_id: str, num_tokens: int) -> None:
        self.engine.truncate(conversation_id, num_tokens)
        self.histories[conversation_id] = self.histories[conversation_id][:num_tokens]

    def _end(self, op: Op) -> None:
        conversation_id = f"c{op.number % NUM_CONVERSATIONS}"
        if self._is_busy(conversation_id):
            self._expect(ConversationBusyError, lambda: self.engine.end(conversation_id))
        elif conversation_id not in self.histories:
            self._expect(UnknownConversationError, lambda: self.engine.end(conversation_id))
        else:
            self.engine.end(conversation_id)
            del self.histories[conversation_id]

    def _fail(self, op: Op) -> None:
        """Make a later call fail: a step on the device, or a commit."""
        if op.number % 3 == 2:
            self.store.faults["commit"] = lambda: HistoryError("the disk is full")
        else:
            self.harness.runner.faults[FAULT_PLACES[op.number % 3]] = lambda: StepFailedError(
                "the device failed"
            )

    def _interrupt(self, op: Op) -> None:
        place = FAULT_PLACES[op.number % len(FAULT_PLACES)]
        faults = self.store.faults if "commit" in place else self.harness.runner.faults
        faults[place] = KeyboardInterrupt

    def _restart(self, _: Op) -> None:
        if self._path is not None:
            self.engine.close()
            for cancelled in self.running:
                check_cancelled(cancelled, self._bench)
            self.running = []
            self._open()
            self.check_histories()

    # Steps and their outcome

    def step(self) -> None:
        num_commits = len(self.store.commits)
        try:
            ended = self.engine.step()
        except KeyboardInterrupt:
            self._recover(
                {turn.conversation_id for turns in self.store.commits[num_commits:] for turn in turns}
            )
            return
        self.engine.check_integrity()
        by_turn = {running.turn: running for running in self.running}
        assert {turn for turn in by_turn if turn.done} == set(ended), "ended and reported turns differ"
        for turn in ended:
            self.running.remove(by_turn[turn])
            self._settle(by_turn[turn])

    def _recover(self, committed_ids: set[str]) -> None:
        """After an interrupt every turn is lost, but for those that were committed: they are history."""
        self.engine.expire_idle()
        self.engine.check_integrity()
        for running in self.running:
            assert running.turn.done, "a turn outlived an interrupted step"
            if running.conversation_id in committed_ids:
                self._add_to_history(
                    running, self.store.load(running.conversation_id).turns[-1].output_token_ids
                )
            else:
                self._lose(running)
        self.running = []
        self.check_histories()

    def _settle(self, running: Running) -> None:
        turn = running.turn
        if turn.error is not None:
            assert isinstance(turn.error, StepFailedError | HistoryError)
            self._lose(running)
            return
        check_output(running, self._bench)
        num_granted = self.harness.num_granted.pop(turn.request)
        check_usage(running, num_granted, stateful=self._scenario.config.stateful)
        for name in COUNTED:
            self.totals[name] += getattr(turn.output.usage, name)
        self._add_to_history(running, turn.output.token_ids)
        self.num_checked += 1

    def _add_to_history(self, running: Running, token_ids: tuple[int, ...]) -> None:
        facts = running.facts
        self._bench.check_tokens(facts, token_ids, whole=True)
        if running.conversation_id is not None:
            self.histories[running.conversation_id] = (*facts.history, *facts.prompt, *token_ids)

    def _lose(self, running: Running) -> None:
        if running.conversation_id is not None:
            self.lost.append((running.facts, running.conversation_id))

    # The end

    def finish(self) -> None:
        """Run what is left, send again what was lost, check all histories, and free every page."""
        self.drain()
        for facts, conversation_id in self.lost:
            if facts.history != self.histories.get(conversation_id, ()):
                continue  # another turn or a truncation came between
            turn = self.engine.submit([TurnSpec(facts.prompt, facts.params, conversation_id)])[0]
            self.running.append(Running(turn, facts, conversation_id))
            self.drain()
        self.check_histories()
        self.harness.check_empty()

    def drain(self) -> None:
        self.harness.runner.faults.clear()
        self.store.faults.clear()
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.running and not self.engine.has_unfinished, "turns do not end"

    def check_histories(self) -> None:
        """Engine and store hold exactly what was committed."""
        assert {info.conversation_id for info in self.engine.conversations.listing()} == set(self.histories)
        for conversation_id, history in self.histories.items():
            assert tuple(self.engine.conversations.record(conversation_id).token_ids.tolist()) == history
            if not self._is_busy(conversation_id):
                live = self.engine.conversations.get(conversation_id).conversation
                assert tuple(live.token_ids) == history

    # Helpers

    def _draft(self, draft: Draft) -> tuple[TurnFacts, str | None]:
        conversation_id = None if draft.conversation < 0 else f"c{draft.conversation}"
        history = self.histories.get(conversation_id, ()) if conversation_id else ()
        return facts_of(draft, history, self._bench, self.harness.max_context_tokens), conversation_id

    def _is_busy(self, conversation_id: str) -> bool:
        return any(running.conversation_id == conversation_id for running in self.running)

    def _expect(self, errors, call) -> None:
        try:
            call()
        except errors:
            return
        raise AssertionError(f"{errors} was not raised")


def run_scenario(scenario: Scenario, bench: Bench | None = None) -> Driver:
    """Run one scenario from start to end; raises AssertionError for what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(scenario, bench or FakeBench(), Path(folder) if scenario.durable else None)
        for op in scenario.ops:
            driver.apply(op)
        driver.finish()
        driver.engine.close()
        return driver
