"""The loop: the only place where jax meets policy (the paper's Figure 5).

Owns: turns from submission to outcome; one step of look-ahead (step N+1 is scheduled and dispatched
before step N's ids are fetched); committing turns to the history before they are reported; what happens
when a step fails.
Does not know: how tokens are computed (`Runner`), chosen for a step (`Scheduler`) or kept (`CacheManager`).
Called by: `LLM`, servers, benchmarks, simulators. One thread drives it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from pensieve_jax.cache import AnalyticCostModel, CacheManager, PagePool, make_policy
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock, WallClock
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.errors import (
    EngineClosedError,
    HistoryError,
    PensieveError,
    StepFailedError,
)
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.engine.conversations import ConversationTable, LiveConversation
from pensieve_jax.engine.runner import Runner
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.validation import ModelLimits, TurnSpec, check_turns
from pensieve_jax.history import HistoryStore
from pensieve_jax.history import Turn as TurnRecord
from pensieve_jax.scheduler import Planner, Request, RequestStatus, Scheduler, SchedulerOutput, StepResult
from pensieve_jax.text import Tokenizer


class _InFlight(NamedTuple):
    """A dispatched step whose ids have not been fetched."""

    output: SchedulerOutput
    handle: Any


class Engine:
    """Serves turns of conversations on one runner.

    Attributes:
      limits: what the model and the configuration allow of a turn.
      conversations: which conversations exist.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        limits: ModelLimits,
        store: HistoryStore,
        *,
        tokenizer: Tokenizer | None = None,
        cost_model: AnalyticCostModel | None = None,
        clock: Clock | None = None,
    ) -> None:
        """An idle engine; the runner must be warmed up. `store` is closed with the engine."""
        self.limits = limits
        self._runner = runner
        self._config = config
        self._store = store
        self._tokenizer = tokenizer
        self._clock = clock or WallClock()
        cache = config.cache
        cost_model = cost_model or AnalyticCostModel(
            cache.chunk_tokens, num_weights=1.3e10, attention_width=2e5
        )
        self._cache = CacheManager(
            PagePool(cache.gpu_pages),
            make_policy(cache.policy, cost_model, cache.chunk_tokens),
            self._clock,
            chunk_tokens=cache.chunk_tokens,
            reserve_pages=cache.reserve_pages,
        )
        self._scheduler = Scheduler(config.scheduler, self._cache)
        self._planner = Planner(
            runner.layouts,
            runner.fill_tiles,
            chunk_tokens=cache.chunk_tokens,
            num_device_pages=cache.gpu_pages + 1,
        )
        self.conversations = ConversationTable(store, self._cache, self._clock, cache)
        self._turns: dict[Request, Turn] = {}
        self._in_flight: _InFlight | None = None
        self._mid_change = False
        self._num_requests = 0
        self._closed = False
        self._stats = EngineStats()

    # Turns

    @property
    def has_unfinished(self) -> bool:
        """A turn has no outcome yet, or a step is in flight."""
        return bool(self._turns) or self._in_flight is not None

    @property
    def closed(self) -> bool:
        """It takes no more calls."""
        return self._closed

    def check(self, specs: Sequence[TurnSpec]) -> None:
        """Raise what is wrong with turns that would be submitted together; see `validation`."""
        self._check_usable()
        check_turns(specs, self.limits, self.conversations, self._tokenizer)

    def submit(self, specs: Sequence[TurnSpec]) -> list[Turn]:
        """Queue turns, in order. All are checked first: one bad turn and none is queued."""
        self._check_usable()
        self.conversations.expire_idle()
        self.check(specs)
        self._mid_change = True
        turns = [self._submit(spec) for spec in specs]
        self._mid_change = False
        return turns

    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent; nothing happens to one that is done."""
        self._check_usable()
        if not turn.done:
            turn.finish("cancelled")
            self._stats.num_turns_cancelled += 1
            self._roll_back(turn)

    def step(self) -> list[Turn]:
        """Schedule, plan and dispatch a step, then finish the one before; returns turns that ended.

        A step that fails on the device, or a history that cannot be written, becomes the `error` of the
        turns it hit; conversations survive.
        """
        self._check_usable()
        self._mid_change = True
        try:
            output = self._scheduler.schedule()
            previous, self._in_flight = self._in_flight, None
            if output.grants:
                self._in_flight = _InFlight(output, self._runner.dispatch(self._planner.plan(output)))
            self._stats.count_step(output)
            ended = self._finish(previous) if previous is not None else []
        except StepFailedError as error:
            ended = self._lose_step(error, [r for r in self._turns if r.status is not RequestStatus.WAITING])
        self._mid_change = False
        return ended

    # Between turns

    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of a conversation; see `ConversationTable.truncate`."""
        self._check_usable()
        self.conversations.truncate(conversation_id, num_tokens)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation; see `ConversationTable.end`."""
        self._check_usable()
        self.conversations.end(conversation_id)

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and what is held now."""
        return {
            **self._stats.as_dict(),
            "num_dropped_chunks": self._cache.num_dropped_chunks,
            "num_compilations": self._runner.num_compilations,
            "num_buckets": len(self._runner.layouts),
            "num_running": len(self._scheduler.running),
            "num_waiting": len(self._scheduler.waiting),
            "num_live_conversations": len(self.conversations),
            "num_gpu_pages": self._cache.num_pages,
            "num_available_gpu_pages": self._cache.num_available(),
        }

    def check_integrity(self) -> None:
        """Assert that pages, chunks, conversations and requests agree (for tests)."""
        self._cache.check_integrity()
        self._scheduler.check_integrity()
        for request in self._turns:
            assert request.status is not RequestStatus.FINISHED, "a finished turn was not reported"

    def close(self) -> None:
        """Cancel what runs and close the history; a second call does nothing."""
        if self._closed:
            return
        self._check_usable()
        for turn in list(self._turns.values()):
            self.cancel(turn)
        self._in_flight = None
        self._closed = True
        self._store.close()

    # Inside

    def _check_usable(self) -> None:
        """Raise once closed; and clear up what an interrupt (Ctrl-C) left half done.

        A step that was interrupted may have granted what was never computed, or committed what was never
        reported, so every turn is lost and its conversation is read from the history again.
        """
        if self._closed:
            raise EngineClosedError("The engine is closed; make a new one.")
        if self._mid_change:
            error = StepFailedError(
                "The engine was interrupted in the middle of a step; send the turn again."
            )
            busy = self.conversations.busy()
            self._lose_step(error, list(self._turns))
            for live in busy:
                self.conversations.forget(live)
            self._mid_change = False

    def _submit(self, spec: TurnSpec) -> Turn:
        live = self.conversations.get_or_create(spec.conversation_id)
        live.busy = True
        live.conversation.token_ids += map(int, spec.prompt_token_ids)  # numpy's ints become Python's
        params = spec.params
        request = Request(
            self._num_requests,
            live.conversation,
            live.sequence,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            ending_ids=params.ending_ids(self.limits.eos_token_ids),
            max_context_tokens=self.limits.max_context_tokens,
        )
        self._num_requests += 1
        self._cache.touch(live.sequence)
        self._scheduler.add(request)
        turn = Turn(request, self._tokenizer, spec.messages)
        self._turns[request] = turn
        return turn

    def _finish(self, step: _InFlight) -> list[Turn]:
        """Fetch a step's ids, give them to their turns, and settle the turns that end with them."""
        result = self._runner.fetch(step.handle)
        ending: list[tuple[Turn, FinishReason]] = []
        sampling = (grant for grant in step.output.grants if grant.samples)
        for row, (request, _, position, _) in enumerate(sampling):
            turn = self._turns.get(request)
            if turn is None:
                continue  # it ended one step earlier, or was cancelled: the token is thrown away
            reason = self._accept(turn, position, result, row)
            if reason is not None:
                ending.append((turn, reason))
        return self._commit(ending)

    def _accept(self, turn: Turn, position: int, result: StepResult, row: int) -> FinishReason | None:
        token_id = int(result.token_ids[row])
        token_ids = turn.request.token_ids
        assert token_ids[position] == PENDING_TOKEN, f"position {position} was sampled twice"
        token_ids[position] = token_id
        return turn.accept(
            token_id, float(result.logprobs[row]), result.top_ids[row], result.top_logprobs[row]
        )

    def _commit(self, ending: list[tuple[Turn, FinishReason]]) -> list[Turn]:
        """Write the turns of a step that ended in one transaction, then report them."""
        kept = [(turn, reason) for turn, reason in ending if not turn.request.conversation.one_off]
        try:
            if kept:
                self._store.commit([self._record(turn, reason) for turn, reason in kept])
        except HistoryError as error:
            for turn, _ in kept:
                self._abandon(turn, error)
        for turn, reason in ending:
            if not turn.done:
                self._settle(turn, reason)
        if kept:
            self.conversations.expire_idle()
        return [turn for turn, _ in ending]

    def _record(self, turn: Turn, reason: FinishReason) -> TurnRecord:
        request, conversation = turn.request, turn.request.conversation
        return TurnRecord(
            conversation_id=conversation.conversation_id,
            turn_index=conversation.num_turns,
            prompt_token_ids=tuple(
                conversation.token_ids[conversation.num_history_tokens : request.num_prompt_end]
            ),
            output_token_ids=tuple(turn.token_ids),
            seed=request.seed,
            finish_reason=reason,
            created_at_s=self._clock.now(),
            messages=turn.messages,
            output_text=None if self._tokenizer is None else turn.text,
        )

    def _settle(self, turn: Turn, reason: FinishReason) -> None:
        """A turn that was committed: its pages stay with the conversation, in the stateful engine."""
        request, conversation = turn.request, turn.request.conversation
        # A step of look-ahead may have computed one token more than the reply has; it never counts.
        del conversation.token_ids[request.num_prompt_end + len(turn.token_ids) :]
        self._stats.count_turn(turn.finish(reason))
        conversation.commit()
        self._cache.truncate(request.sequence, conversation.num_computed_tokens)
        live = self._leave(turn)
        if conversation.one_off:
            self.conversations.forget(live)
        elif not self._config.stateful:
            self._cache.truncate(request.sequence, 0)

    def _roll_back(self, turn: Turn) -> None:
        """Forget a turn that gave nothing to the history."""
        conversation = turn.request.conversation
        conversation.rollback()
        self._cache.truncate(turn.request.sequence, conversation.num_history_tokens)
        live = self._leave(turn)
        if conversation.one_off or not conversation.num_turns:
            self.conversations.forget(live)
        elif not self._config.stateful:
            self._cache.truncate(live.sequence, 0)

    def _leave(self, turn: Turn) -> LiveConversation:
        del self._turns[turn.request]
        self._scheduler.remove(turn.request)
        live = self.conversations.get(turn.request.conversation.conversation_id)
        live.busy = False
        return live

    def _abandon(self, turn: Turn, error: PensieveError) -> None:
        turn.error = error
        self._stats.num_turns_failed += 1
        self._roll_back(turn)

    def _lose_step(self, error: StepFailedError, lost: Sequence[Request]) -> list[Turn]:
        """Rebuild the pools, drop every chunk and fail the `lost` turns; conversations survive."""
        self._in_flight = None
        self._runner.reset()
        self._cache.lose_device()
        failed = [self._turns[request] for request in lost]
        for turn in failed:
            self._abandon(turn, error)
        for request in self._turns:
            # Suspended with a token in flight: it is sampled again, to the same id.
            if request.token_ids[-1] == PENDING_TOKEN:
                request.token_ids.pop()
        return failed
