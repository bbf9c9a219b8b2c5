"""The engine: where policy meets the device (the paper's Figure 5).

Owns: turns from submission on, who gets which fetched id, and what happens when a step fails or is
interrupted.
Does not know: how tokens are computed (`Runner`), chosen for a step (`Scheduler`) or kept (`CacheManager`),
in what order a step is done (`EngineLoop`), or how a turn leaves (`TurnLedger`).
One thread drives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pensieve_jax.cache import CacheManager, CostModel, DropReason
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.change_guard import ChangeGuard, change
from pensieve_jax.core.clock import Clock, WallClock
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.errors import EngineClosedError, PensieveError, StepFailedError
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.experience import kept_experience
from pensieve_jax.engine.explanation import BranchMap, DropJournal, Explanation, chunk_map, explain
from pensieve_jax.engine.ledger import TurnLedger
from pensieve_jax.engine.loop import EngineLoop, Observe, unobserved
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.engine.runner import Runner
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.submission import TurnPlacer, TurnSubmitter
from pensieve_jax.engine.turn import Deltas, ReplyState, Turn
from pensieve_jax.engine.validation import check_beginning, check_turn, checked_prefix
from pensieve_jax.history import HistoryStore
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.scheduler import Planner, RequestStatus, SchedulerOutput
from pensieve_jax.text import Message, Tokenizer


class _LaunchedStep(NamedTuple):
    """A dispatched step whose ids have not been fetched."""

    output: SchedulerOutput
    handle: Any


class Engine:
    """Serves turns of conversations on one runner.

    Attributes:
      limits: what the model and the configuration allow of a turn.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        limits: ModelLimits,
        store: HistoryStore,
        *,
        cost_model: CostModel,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        observe: Observe = unobserved,
    ) -> None:
        """An idle engine; the runner must be warmed up. `store` is closed with the engine.

        `observe` is told every step's decisions; see `Observe`.
        """
        self.limits = limits
        self._runner = runner
        self._config = config
        self._store = store
        self._cost_model = cost_model
        self._tokenizer = tokenizer
        self._clock = clock or WallClock()
        self._stats = EngineStats()
        self._observe = observe
        self._drops = DropJournal(self._clock)
        self._closed = False
        self._guard = ChangeGuard(self._start_over)
        self._lost_pools = False  # the next step is to make new ones
        self._make_state()

    def _make_state(self) -> None:
        """Everything that the engine knows, apart from the device and the history: empty."""
        config, cache = self._config, self._config.cache
        self._loop: EngineLoop[_LaunchedStep] = EngineLoop(
            config,
            self._cost_model,
            self._clock,
            self._runner.transfers,
            self._stats,
            max_num_copies=config.runner.max_num_staged_pages,
            observe=self._note,
            on_drop=self._drops.note,
            on_move=self._drops.move,
            experience=kept_experience(self._store, cache.policy),
        )
        self._cache = self._loop.cache
        self._prefixes = PrefixTable(self._cache)
        self._planner = Planner(
            self._runner.layouts,
            self._runner.fill_tiles,
            self._cache.page_table,
            chunk_tokens=cache.chunk_tokens,
            num_device_pages=cache.gpu_pages + 1,
        )
        kept = self._store, self._cache, self._prefixes, self._drops, self._clock, cache
        self._conversations = ConversationTable(*kept, stateful=config.stateful)
        self._ledger = TurnLedger(self._store, self._loop, self._conversations, self._stats, self._clock)
        placing = TurnPlacer(self._conversations, self._prefixes, stateful=config.stateful)
        self._intake = TurnSubmitter(self._loop, self._ledger, placing, self.limits, self._tokenizer)

    # Turns

    @property
    def has_unfinished(self) -> bool:
        """A turn has no outcome yet, or a step is in flight."""
        return bool(self._ledger.replies) or self._loop.in_flight is not None

    @property
    def unfinished(self) -> tuple[Turn, ...]:
        """Turns without an outcome, in the order in which they were submitted; raises EngineClosedError."""
        self._check_usable()
        return tuple(self._ledger.turns)

    @property
    def closed(self) -> bool:
        """It takes no more calls."""
        return self._closed

    @property
    def conversations(self) -> ConversationTable:
        """Which conversations exist; raises EngineClosedError."""
        self._check_usable()
        return self._conversations

    @property
    def cache(self) -> CacheManager:
        """Where the KV state of conversations is; raises EngineClosedError."""
        self._check_usable()
        return self._cache

    @change
    def expire_idle(self) -> None:
        """End what has been idle for too long, or is too much; raises HistoryError.

        A front end does this before it makes a prompt, so that none goes on from what is gone.
        """
        self._conversations.expire_idle()

    @change
    def submit(self, specs: Sequence[TurnSpec]) -> list[Turn]:
        """Queue turns, in order. All are checked first: one bad turn and none is queued.

        They are the caller's who holds them: one that nobody holds any more is cancelled at the next call. So
        are all of them if an interrupt (Ctrl-C) keeps this from returning, at whatever line it comes.
        """
        return self._intake.submit(specs)

    @change
    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent; nothing happens to one that is done.

        Raises InvalidRequestError for what is no turn, or is in progress in another engine.
        """
        if not check_turn(turn, self._ledger.replies).done:
            self._ledger.cancel(turn.reply)

    @change
    def step(self) -> list[Turn]:
        """Schedule, plan and dispatch a step, then finish the one before; returns turns that ended.

        A step that fails on the device, or a history that cannot be written, becomes the `error` of the
        turns it hit; conversations survive. The step after one that failed makes new pools first, and raises
        StepFailedError, with nothing else lost, as long as the device has no memory for them.
        """
        if self._lost_pools:
            self._runner.reset()
            self._lost_pools = False
        try:
            return self._step()
        except StepFailedError as error:
            replies = self._ledger.replies.values()
            ran = [reply for reply in replies if reply.request.status is not RequestStatus.WAITING]
            return self._lose_step(error, ran)

    def take_deltas(self) -> Deltas:
        """What came of turns in progress since the last call; `step` returns those that have ended."""
        self._check_usable()
        return self._ledger.take_deltas()

    def share_prefix(
        self, token_ids: Sequence[int], messages: tuple[Message, ...] | None = None
    ) -> SharedPrefix:
        """A beginning for conversations to share; raises InvalidRequestError or ContextLengthError."""
        self._check_usable()
        check_beginning(token_ids, self.limits)
        return SharedPrefix(tuple(map(int, token_ids)), messages)

    @change
    def release_prefix(self, prefix: SharedPrefix) -> None:
        """Take no more turns with a prefix; see `PrefixTable.release`. A second call does nothing."""
        if not checked_prefix(prefix, self.limits).released:
            self._prefixes.release(prefix)

    # Between turns

    @change
    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of a conversation; see `ConversationTable.truncate`."""
        self._conversations.truncate(conversation_id, num_tokens)

    @change
    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Begin a conversation as another one begins; see `ConversationTable.fork`."""
        self._conversations.fork(conversation_id, new_conversation_id, num_tokens)

    @change
    def apply(self, change: HistoryChange) -> None:
        """Change what the history keeps beside turns; see `HistoryStore.apply`."""
        self._store.apply(change, self._ledger.in_use)

    @change
    def end(self, conversation_id: str) -> None:
        """Forget a conversation; see `ConversationTable.end`."""
        self._conversations.end(conversation_id)

    @change
    def push_out(self, conversation_id: str, max_num_chunks: int | None = None) -> int:
        """Send a conversation's state to host memory with the next step; returns how many chunks.

        For servers that know that it will be away for long, and for benchmarks; see `ConversationTable`.
        """
        return self._conversations.push_out(conversation_id, max_num_chunks)

    @change
    def forget_state(self, conversation_id: str) -> None:
        """Drop a conversation's state in every tier; its next turn recomputes it from the history."""
        self._conversations.forget_state(conversation_id)

    @change
    def push_out_turn(self, owner: str, turn_id: str) -> int:
        """As `push_out`, of the path to a turn; see `ConversationTable.push_out_turn`."""
        return self._conversations.push_out_turn(owner, turn_id)

    @change
    def forget_turn_state(self, owner: str, turn_id: str) -> None:
        """As `forget_state`, of the path to a turn; see `ConversationTable.forget_turn_state`."""
        self._conversations.forget_turn_state(owner, turn_id)

    @change
    def forget_experience(self) -> None:
        """Have an order that learns begin anew, here and in the history; raises HistoryError."""
        self._ledger.forget_experience()

    def explain(self, conversation_id: str) -> Explanation:
        """Where a conversation's state is, and why some of it is nowhere; raises UnknownConversationError."""
        self._check_usable()
        found = self._conversations.look_up(conversation_id)
        return explain(found, self._prefixes, self._cache, self._drops, self._config)

    def chunk_map(self, owner: str) -> list[BranchMap]:
        """Where the state of an owner's placed turns is, by branch in memory."""
        self._check_usable()
        return chunk_map(self._conversations.branches.of(owner))

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and what is held now."""
        return {
            **self._stats.as_dict(),
            **self._cache.stats(),
            **self._runner.transfers.stats(),
            "num_compilations": self._runner.num_compilations,
            "num_buckets": len(self._runner.layouts),
            "num_running": len(self._loop.scheduler.running),
            "num_waiting": len(self._loop.scheduler.waiting),
            "num_live_conversations": len(self._conversations),
            "num_known_turns": len(self._conversations.branches),
            "num_known_chunks": self._conversations.branches.num_chunks,
            "num_shared_prefixes": len(self._prefixes),
        }

    def distributions(self) -> dict[str, tuple[list[int], float]]:
        """How large steps were and how long commits took: see `EngineStats.distributions`."""
        return self._stats.distributions()

    def census(self) -> dict[str, int]:
        """Chunks by the name of their state, and free pages and slots, as they are now."""
        return self._cache.census()

    def check_integrity(self) -> None:
        """Assert that pages, chunks, conversations and requests agree (for tests)."""
        self._loop.check_integrity()
        for request in self._ledger.replies:
            assert request.status is not RequestStatus.FINISHED, "a finished turn was not reported"

    def close(self) -> None:
        """Cancel what runs and close the history; a second call does nothing, or what the first could not."""
        self._guard.check_thread()
        try:
            if not self._closed:
                self._check_usable()
                self._guard.run(self._ledger.cancel_all)
                self._ledger.close()
        finally:
            self._closed = True
            self._store.close()

    # Inside

    def _check_usable(self) -> None:
        """Raise once closed, or for a second thread; then clear up what interrupts left, and nobody holds."""
        if self._closed:
            raise EngineClosedError("The engine is closed; make a new one.")
        self._guard.check()
        if self._ledger.has_dropped:
            self._guard.run(self._ledger.cancel_dropped)

    def _start_over(self) -> None:
        """After an interrupt (Ctrl-C) in the middle of a change nothing in memory can be trusted.

        A step may have granted what was never computed, or committed what was never reported. Every turn is
        lost; conversations are read from the history again when they are next used.
        """
        error = StepFailedError(
            "The engine was interrupted. The history may hold this turn already: look there before sending "
            "it again."
        )
        for reply in tuple(self._ledger.replies.values()):
            if not reply.done:
                reply.error = error
                self._stats.num_turns_failed += 1
        self._lost_pools = True
        self._drops.lose(self._cache.held(), DropReason.INTERRUPTED)
        self._make_state()

    def _note(self, output: SchedulerOutput) -> None:
        try:
            self._observe(output)
        except PensieveError as error:  # from the engine itself it would be a refusal that changed nothing
            raise RuntimeError("An observer failed in the middle of a step.") from error

    def _launch(self, output: SchedulerOutput) -> _LaunchedStep:
        return _LaunchedStep(output, self._runner.dispatch(self._planner.plan(output)))

    def _step(self) -> list[Turn]:
        """Step N+1 is scheduled and dispatched before step N's ids are fetched."""
        previous = self._loop.step(self._launch)
        return [] if previous is None else self._finish(previous)

    def _finish(self, step: _LaunchedStep) -> list[Turn]:
        """Fetch a step's ids, give them to their turns, and settle the turns that end with them."""
        result = self._runner.fetch(step.handle)
        endings: list[tuple[ReplyState, FinishReason]] = []
        sampling = [grant for grant in step.output.grants if grant.samples]
        token_ids, logprobs = result.token_ids.tolist(), result.logprobs.tolist()
        touched = self._ledger.touched
        for (request, _, position, _), token_id, logprob, top_ids, top_logprobs in zip(
            sampling, token_ids, logprobs, result.top_ids, result.top_logprobs, strict=False
        ):  # the result is padded
            reply = self._ledger.replies.get(request)
            if reply is None:
                continue  # it ended one step earlier, or was cancelled: the token is thrown away
            assert request.token_ids[position] == PENDING_TOKEN, f"position {position} was sampled twice"
            request.token_ids[position] = token_id
            touched[request] = None
            reason = reply.accept(token_id, logprob, top_ids, top_logprobs)
            if reason is not None:
                endings.append((reply, reason))
        ended = self._ledger.commit(endings)
        self._conversations.forget_stateless()
        return ended

    def _lose_step(self, error: StepFailedError, lost: Sequence[ReplyState]) -> list[Turn]:
        """Fail the `lost` turns, and keep what host memory has; conversations survive.

        Nothing here asks anything of the device: what waits outlives new pools that cannot be made.
        """
        self._loop.in_flight = None
        self._lost_pools = True
        self._cache.lose_device()
        turns = self._ledger.lose(lost, error)
        for request in self._ledger.replies:
            # Suspended with a token in flight: it is sampled again, to the same id.
            if request.token_ids[-1] == PENDING_TOKEN:
                request.token_ids.pop()
        return turns
