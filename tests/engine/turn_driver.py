"""Turns through an engine, with all checks that are possible from outside.

After every step: `check_integrity`, and that the engine makes progress. For every turn that ends: tokens,
end, seed, logprobs and usage against the reference and against what was really computed and copied in. A
failed turn is sent again later and must then be equal. At the end no turn is left, every conversation's
history equals its turns, in memory and in the store, and every page and slot is free once all conversations
are ended.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import HistoryError, LogitsError, StepFailedError
from tests.cache.helpers import learned_state_of
from tests.engine.harness import MAX_STEPS, Harness
from tests.engine.oracles import Bench, TurnFacts
from tests.engine.outcomes import COUNTED, Running, check_output, check_usage
from tests.engine.scenarios import Scenario

MAX_IDLE_STEPS = 200  # consecutive steps without a token: each must at least have waited for a copy
COUNTED_STATS = (
    "num_swapped_out_chunks",
    "num_swapped_in_chunks",
    "num_forced_swap_outs",
    "num_prefetched_chunks",
    "num_dropped_chunks",
    "num_lost_copies",
    "num_draft_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
)


class TurnDriver:
    """One engine, a model of every conversation's content, and the running turns.

    Attributes:
        path: of the history's file, if it has one.
        histories: committed token ids by conversation.
        running: submitted turns that have not ended.
        lost: failed turns, to be sent again.
        num_checked: turns that ended well and were equal.
        totals: summed usage and counters of all engines, and counts of what happened.
    """

    def __init__(self, scenario: Scenario, bench: Bench, folder: Path | None) -> None:
        self.scenario = scenario
        self.bench = bench
        self.path = folder / "history.sqlite" if folder else None
        self.clock = VirtualClock(1000.0)
        self.histories: dict[str, tuple[int, ...]] = {}
        self.running: list[Running] = []
        self.lost: list[tuple[TurnFacts, str]] = []
        self.num_checked = 0
        self.totals: Counter[str] = Counter()
        self._num_idle_steps = 0
        self.open()

    def open(self) -> None:
        self.harness = Harness(
            self.scenario.config,
            bench=self.bench,
            path=self.path,
            clock=self.clock,
            max_model_tokens=self.scenario.max_model_tokens,
            delays=self.scenario.delays,
        )
        self.engine, self.store = self.harness.engine, self.harness.store
        if self.scenario.config.cache.policy == "learned":  # a scenario is too short to learn much
            self.engine.cache.turns.begin(learned_state_of(len(self.scenario.ops)))

    def close(self) -> None:
        """Close the engine, and keep its counters."""
        stats = self.engine.stats()
        self.totals.update({name: stats[name] for name in COUNTED_STATS})
        self.engine.close()

    # Steps and their outcomes.

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
        self._check_progress()
        by_turn = {running.turn: running for running in self.running}
        assert {turn for turn in by_turn if turn.done} == set(ended), "ended and reported turns differ"
        for turn in ended:
            self.running.remove(by_turn[turn])
            self._settle(by_turn[turn])

    def _check_progress(self) -> None:
        if not self.harness.scheduled:
            return  # it has already failed
        output = self.harness.scheduled[-1]
        self.totals["num_expedited_copies"] += len(output.expedited)
        self.totals["num_steps_with_a_full_cpu_tier"] += self.harness.cpu_tier_is_full
        self.totals["num_steps_with_passed_requests"] += self.harness.has_passed_requests
        self._num_idle_steps = 0 if output.grants or not self.running else self._num_idle_steps + 1
        assert self._num_idle_steps < MAX_IDLE_STEPS, f"{MAX_IDLE_STEPS} steps without a token"

    def _recover(self, committed_ids: set[str]) -> None:
        """After an interrupt, drop all turns except committed ones, which are in the history."""
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
            assert isinstance(turn.error, StepFailedError | HistoryError | LogitsError)
            self._lose(running)
            return
        check_output(running, self.bench)
        num_granted, num_accepted = self.harness.take_num_computed(turn.request)
        num_copied = self.harness.swapped_in.pop(turn.request)
        check_usage(running, num_granted, num_copied, self.scenario.config)
        for name in COUNTED:
            self.totals[name] += getattr(turn.output.usage, name)
        is_scored = turn.output.prompt_logprobs is not None
        self.totals["num_scored_prompts"] += is_scored
        self.totals["num_scored_in_suspended_turns"] += is_scored and turn.output.usage.num_suspensions > 0
        self.totals["num_turns_with_drafts_that_held"] += num_accepted > 0
        self.totals["num_turns_without_a_reply"] += not turn.output.token_ids
        self._add_to_history(running, turn.output.token_ids)
        self.num_checked += 1

    def _add_to_history(self, running: Running, token_ids: tuple[int, ...]) -> None:
        facts = running.facts
        self.bench.check_tokens(facts, token_ids, whole=True)
        if running.conversation_id is not None:
            self.histories[running.conversation_id] = (*facts.history, *facts.prompt, *token_ids)

    def _lose(self, running: Running) -> None:
        if running.conversation_id is not None:
            self.lost.append((running.facts, running.conversation_id))

    # The end of a scenario.

    def finish(self) -> None:
        """Run the remaining turns, resend lost ones, check all histories, and free every page."""
        self.drain()
        for facts, conversation_id in self.lost:
            if facts.history + facts.replaced != self.histories.get(conversation_id, ()):
                continue  # another turn or a truncation came between
            turn = self.harness.submit(facts, conversation_id)
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
        """Check that engine and store hold exactly what was committed."""
        assert {info.conversation_id for info in self.engine.conversations.listing()} == set(self.histories)
        for conversation_id, history in self.histories.items():
            assert tuple(self.engine.conversations.record(conversation_id).token_ids.tolist()) == history
            if not self.is_busy(conversation_id):
                live = self.engine.conversations.get(conversation_id).conversation
                assert tuple(live.token_ids) == history

    def is_busy(self, conversation_id: str) -> bool:
        return any(running.conversation_id == conversation_id for running in self.running)
