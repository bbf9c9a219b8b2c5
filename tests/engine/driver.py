"""Runs a scenario through an engine: one method per operation, with the refusals that each must give.

The checks after every step and for every turn are in `turn_driver`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest

from pensieve_jax.cache import EvictionClass
from pensieve_jax.core.errors import (
    ContextLengthError,
    ConversationBusyError,
    HistoryError,
    InvalidRequestError,
    PensieveError,
    StepFailedError,
    UnknownConversationError,
)
from pensieve_jax.scheduler import buckets
from tests.engine.draft_oracle import plant_oracle
from tests.engine.oracles import Bench, FakeBench, TurnFacts, spec_of
from tests.engine.outcomes import Running, check_cancelled, facts_of, mixture_of
from tests.engine.scenarios import (
    FAILING_PLACES,
    INTERRUPTED_PLACES,
    NUM_CONVERSATIONS,
    Draft,
    Op,
    Scenario,
)
from tests.engine.turn_driver import TurnDriver


class Driver(TurnDriver):
    """A `TurnDriver` that executes a scenario's operations."""

    def apply(self, op: Op) -> None:
        getattr(self, f"_{op.kind}")(op)
        if op.kind not in ("step", "think"):  # the others are checked where they happen, or change nothing
            self.engine.check_integrity()

    def _submit(self, op: Op) -> None:
        drafts = [self._draft(draft) for draft in op.drafts]
        ids = [conversation_id for _, conversation_id in drafts if conversation_id is not None]
        refused: type[PensieveError] | None = None
        if len(set(ids)) < len(ids) or any(self.is_busy(conversation_id) for conversation_id in ids):
            refused = ConversationBusyError
        elif any(facts.room < 1 for facts, _ in drafts):
            refused = ContextLengthError
        specs = [spec_of(facts, conversation_id) for facts, conversation_id in drafts]
        if refused is None:
            turns = self.harness.submit_all(specs)
            self.running += (Running(turn, *draft) for turn, draft in zip(turns, drafts, strict=True))
            self.totals.update(mixture_of(turn) for turn in turns)
            self.totals["num_turns_with_a_prefix"] += sum(
                turn.request.sequence.num_shared > 0 for turn in turns
            )
            return
        self._expect((refused, ConversationBusyError, ContextLengthError), lambda: self.engine.submit(specs))
        for conversation_id in set(ids) & set(self.histories):
            if refused is ContextLengthError:  # as a client would
                self._truncate_to(conversation_id, len(self.histories[conversation_id]) // 2)

    def _step(self, op: Op) -> None:
        for _ in range(op.number):
            self.step()
            if not self.engine.has_unfinished and not self.harness.num_copies:
                return  # the other operations would do nothing

    def _think(self, op: Op) -> None:
        self.clock.advance(op.number**2 / 10)

    def _cancel(self, op: Op) -> None:
        if self.running:
            cancelled = self.running.pop(op.number % len(self.running))
            self.engine.cancel(cancelled.turn)
            check_cancelled(cancelled, self.bench)

    def _retract(self, op: Op) -> None:
        """Cancel a turn and cut its conversation; prefer one that is being copied in."""
        arriving = [r for r in self.running if r.turn.request.sequence.num_by_class[EvictionClass.ARRIVING]]
        for running in (arriving or self.running)[:1]:
            self._cancel(Op("cancel", self.running.index(running)))
            history = self.histories.get(running.conversation_id or "", ())
            if history:
                self._truncate_to(running.conversation_id, len(history) * op.number // 100)

    def _truncate(self, op: Op) -> None:
        conversation_id = f"c{op.number % NUM_CONVERSATIONS}"
        history = self.histories.get(conversation_id, ())
        num_tokens = len(history) * op.number // 100
        if self.is_busy(conversation_id):
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
        if self.is_busy(conversation_id):
            self._expect(ConversationBusyError, lambda: self.engine.end(conversation_id))
        elif conversation_id not in self.histories:
            self._expect(UnknownConversationError, lambda: self.engine.end(conversation_id))
        else:
            self.engine.end(conversation_id)
            del self.histories[conversation_id]

    def _fail(self, op: Op) -> None:
        """Make a later call fail: a step or a copy on the device, or a commit."""
        place = FAILING_PLACES[op.number % len(FAILING_PLACES)]
        if place == "commit":
            self.store.faults[place] = lambda: HistoryError("the disk is full")
        else:
            self.harness.runner.faults[place] = lambda: StepFailedError("the device failed")

    def _interrupt(self, op: Op) -> None:
        place = INTERRUPTED_PLACES[op.number % len(INTERRUPTED_PLACES)]
        faults = self.store.faults if "commit" in place else self.harness.runner.faults
        faults[place] = KeyboardInterrupt

    def _restart(self, _: Op) -> None:
        if self.path is not None:
            self.close()
            for cancelled in self.running:
                check_cancelled(cancelled, self.bench)
            self.running = []
            self.open()
            self.check_histories()

    def _draft(self, draft: Draft) -> tuple[TurnFacts, str | None]:
        conversation_id = None if draft.conversation < 0 else f"c{draft.conversation}"
        history = self.histories.get(conversation_id, ()) if conversation_id else ()
        # Some turns replace the end of the history; a turn without any may begin with a prefix, so one stays.
        keep = 1 + draft.seed // 8 % len(history) if history and draft.seed % 8 == 0 else len(history)
        facts = facts_of(draft, history[:keep], self.bench, self.harness.max_context_tokens)
        return dataclasses.replace(facts, replaced=history[keep:]), conversation_id

    def _expect(self, errors, call) -> None:
        try:
            call()
        except errors:
            return
        raise AssertionError(f"{errors} was not raised")


def run_scenario(scenario: Scenario, bench: Bench | None = None) -> Driver:
    """Run one scenario from start to end; raise AssertionError on a failure."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if scenario.config.scheduler.max_num_buckets == 3:  # steps fill their buckets, as large ones do
            patch.setattr(buckets, "_FILLED_FROM_TOKENS", 1)
        bench = bench or FakeBench()
        if scenario.drafts is not None:
            plant_oracle(patch, bench, scenario.drafts)
        driver = Driver(scenario, bench, Path(folder) if scenario.durable else None)
        for op in scenario.ops:
            driver.apply(op)
        driver.finish()
        driver.close()
        return driver
