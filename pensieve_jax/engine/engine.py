"""The loop: the only place where jax meets policy (the paper's Figure 5).

Owns: one step of look-ahead (step N+1 is scheduled and dispatched before step N's ids are fetched), who
gets which fetched id, and what happens when a step fails or is interrupted.
Does not know: how tokens are computed (`Runner`), chosen for a step (`Scheduler`) or kept (`CacheManager`),
or how a turn leaves (`TurnLedger`).
Called by: `LLM`, servers, benchmarks, simulators. One thread drives it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pensieve_jax.cache import AnalyticCostModel, CacheManager, CostModel, PagePool, make_policy
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock, WallClock
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.errors import EngineClosedError, PensieveError, StepFailedError
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.ledger import TurnLedger
from pensieve_jax.engine.runner import Runner
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.validation import ModelLimits, TurnSpec, check_turns
from pensieve_jax.history import HistoryStore
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
        cost_model: CostModel | None = None,
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
        self._stats = EngineStats()
        self._ledger = TurnLedger(
            store,
            self._scheduler,
            self._cache,
            self.conversations,
            self._stats,
            self._clock,
            stateful=config.stateful,
        )
        self._in_flight: _InFlight | None = None
        self._interrupted = False  # True while a change is under way
        self._num_requests = 0
        self._closed = False

    # Turns

    @property
    def has_unfinished(self) -> bool:
        """A turn has no outcome yet, or a step is in flight."""
        return bool(self._ledger.turns) or self._in_flight is not None

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
        with self._change():
            return [self._submit(spec) for spec in specs]

    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent; nothing happens to one that is done."""
        with self._change():
            if not turn.done:
                self._ledger.cancel(turn)

    def step(self) -> list[Turn]:
        """Schedule, plan and dispatch a step, then finish the one before; returns turns that ended.

        A step that fails on the device, or a history that cannot be written, becomes the `error` of the
        turns it hit; conversations survive.
        """
        with self._change():
            try:
                output = self._scheduler.schedule()
                previous, self._in_flight = self._in_flight, None
                if output.grants:
                    self._in_flight = _InFlight(output, self._runner.dispatch(self._planner.plan(output)))
                self._stats.count_step(output)
                return [] if previous is None else self._finish(previous)
            except StepFailedError as error:
                turns = self._ledger.turns.values()
                ran = [turn for turn in turns if turn.request.status is not RequestStatus.WAITING]
                return self._lose_step(error, ran)

    # Between turns

    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of a conversation; see `ConversationTable.truncate`."""
        with self._change():
            self.conversations.truncate(conversation_id, num_tokens)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation; see `ConversationTable.end`."""
        with self._change():
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
        for request in self._ledger.turns:
            assert request.status is not RequestStatus.FINISHED, "a finished turn was not reported"

    def close(self) -> None:
        """Cancel what runs and close the history; a second call does nothing."""
        if self._closed:
            return
        self._check_usable()
        for turn in list(self._ledger.turns.values()):
            self.cancel(turn)
        self._in_flight = None
        self._closed = True
        self._store.close()

    # Inside

    def _check_usable(self) -> None:
        """Raise once closed; and clear up what an interrupt (Ctrl-C) left half done.

        A step that was interrupted may have granted what was never computed, or committed what was never
        reported: every turn is lost, and every conversation is read from the history again.
        """
        if self._closed:
            raise EngineClosedError("The engine is closed; make a new one.")
        if self._interrupted:
            error = StepFailedError("The engine was interrupted; send the turn again.")
            self._lose_step(error, list(self._ledger.turns.values()))
            self.conversations.forget_all()
            self._interrupted = False

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change of state that is whole only if it gets to its end, or refuses with a typed error."""
        self._check_usable()
        self._interrupted = True
        try:
            yield
        except PensieveError:
            self._interrupted = False
            raise
        self._interrupted = False

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
        turn = Turn(request, self._tokenizer, spec.messages)
        self._ledger.enter(turn)
        return turn

    def _finish(self, step: _InFlight) -> list[Turn]:
        """Fetch a step's ids, give them to their turns, and settle the turns that end with them."""
        result = self._runner.fetch(step.handle)
        endings: list[tuple[Turn, FinishReason]] = []
        sampling = (grant for grant in step.output.grants if grant.samples)
        for row, (request, _, position, _) in enumerate(sampling):
            turn = self._ledger.turns.get(request)
            if turn is None:
                continue  # it ended one step earlier, or was cancelled: the token is thrown away
            reason = self._accept(turn, position, result, row)
            if reason is not None:
                endings.append((turn, reason))
        return self._ledger.commit(endings)

    def _accept(self, turn: Turn, position: int, result: StepResult, row: int) -> FinishReason | None:
        token_id = int(result.token_ids[row])
        token_ids = turn.request.token_ids
        assert token_ids[position] == PENDING_TOKEN, f"position {position} was sampled twice"
        token_ids[position] = token_id
        return turn.accept(
            token_id, float(result.logprobs[row]), result.top_ids[row], result.top_logprobs[row]
        )

    def _lose_step(self, error: StepFailedError, lost: Sequence[Turn]) -> list[Turn]:
        """Rebuild the pools, drop every chunk and fail the `lost` turns; conversations survive."""
        self._in_flight = None
        self._runner.reset()
        self._cache.lose_device()
        for turn in lost:
            self._ledger.lose(turn, error)
        for request in self._ledger.turns:
            # Suspended with a token in flight: it is sampled again, to the same id.
            if request.token_ids[-1] == PENDING_TOKEN:
                request.token_ids.pop()
        return list(lost)
