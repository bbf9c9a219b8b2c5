"""The engine: it joins scheduler, cache, history and device runner (the paper's Figure 5).

Owns: turns from submission on, the assignment of fetched token ids to turns, and recovery from failed and
interrupted steps.
Does not know: how tokens are computed (`Runner`), selected for a step (`Scheduler`) or cached
(`CacheManager`), the order of actions in a step (`EngineLoop`), or how a turn ends (`TurnLedger`).
Called by `LLM`, streams and the server's engine process, always from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.cache import CacheManager, CostModel, DropReason
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.change_guard import ChangeGuard, change
from pensieve_jax.core.clock import Clock, SteadyClock, WallClock
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.errors import (
    EngineClosedError,
    HistoryCorruptError,
    PensieveError,
    StepFailedError,
)
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.token_ids import num_equal
from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.drafting import HistoryDrafter
from pensieve_jax.engine.explanation import (
    BranchMap,
    DropJournal,
    Explanation,
    chunk_map,
    explain,
    explain_turn,
)
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.engine.learned_state_store import load_learned_state
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
from pensieve_jax.scheduler import (
    Draft,
    Grant,
    Planner,
    Request,
    RequestStatus,
    SchedulerOutput,
    scoring_bucket,
)
from pensieve_jax.text import Message, Tokenizer
from pensieve_jax.text.grammar import Grammar, Grammars

type _Accepted = tuple[Request, int, list[int]]
"""A request, its first row of a step, and the ids of its rows that count."""


class _LaunchedStep(NamedTuple):
    """A launched step whose token ids have not been fetched.

    `grants` are those that sample, and `sampling` has one of them for each sampled id. `num_drafts` of them
    have drafts. `is_late` is True if its choice waits for the ids of the step before it. `scored` is that of
    `Planner`. `discarded` are requests whose ids mean nothing, since their masks had no time.
    """

    grants: list[Grant]
    sampling: list[Grant]
    num_drafts: int
    num_rows: int
    handle: Any
    is_late: bool
    scored: tuple[tuple[Request, int], ...]
    discarded: set[Request]


class Engine:
    """A stateful serving engine on one runner.

    Attributes:
      limits: limits of the model and the configuration on a turn.
      grammars: grammars of structured replies; None without a tokenizer.
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
        """Start idle; the runner must be warmed up. `close` also closes `store`.

        `observe` is called with the decisions of every step; see `Observe`.
        """
        self.limits = limits
        self.grammars = (
            None if tokenizer is None else Grammars(tokenizer, limits.vocab_size, limits.eos_token_ids)
        )
        self._runner = runner
        self._config = config
        self._store = store
        self._cost_model = cost_model
        self._tokenizer = tokenizer
        self._clock = clock or WallClock()
        # The order of eviction needs a clock that never goes back, which the wall clock may.
        self._order_clock = clock or SteadyClock()
        self._stats = EngineStats()
        self._observe = observe
        self._drops = DropJournal(self._order_clock)
        self._closed = False
        self._guard = ChangeGuard(self._recreate_state)
        self._needs_new_pools = False  # if True, the next step makes new pools
        self._make_state()

    def _make_state(self) -> None:
        """Create the engine's host state anew: everything except the device and the history."""
        config, cache = self._config, self._config.cache
        self._loop: EngineLoop[_LaunchedStep] = EngineLoop(
            config,
            self._cost_model,
            self._order_clock,
            self._runner.transfers,
            self._stats,
            max_num_copies=config.runner.max_num_staged_pages,
            observe=self._note,
            on_drop=self._drops.note,
            on_move=self._drops.move,
            learned_state=load_learned_state(self._store, cache.policy),
        )
        self._cache = self._loop.cache
        self._prefixes = PrefixTable(self._cache)
        self._planner = Planner(
            self._runner.layouts,
            self._runner.fill_tiles,
            self._cache.page_table,
            chunk_tokens=cache.chunk_tokens,
            num_device_pages=cache.num_gpu_pages + 1,
            scoring_bucket=scoring_bucket(config.scheduler, cache.chunk_tokens),
            num_count_slots=config.num_count_slots,
        )
        unchanged = self._store, self._cache, self._prefixes, self._drops, self._clock, cache
        self._conversations = ConversationTable(*unchanged, stateful=config.stateful)
        self._late_rows = LateRows(self.limits.vocab_size)
        max_draft_tokens = config.scheduler.draft_limit
        self._drafter = HistoryDrafter(max_draft_tokens) if max_draft_tokens else None
        self._ledger = TurnLedger(
            self._store,
            self._loop,
            self._conversations,
            self._late_rows,
            self._drafter,
            self._stats,
            self._clock,
        )
        placer = TurnPlacer(self._conversations, self._prefixes, stateful=config.stateful)
        self._submitter = TurnSubmitter(
            self._loop, self._ledger, placer, self.limits, self._tokenizer, self.grammars
        )

    # Turns

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn has no outcome yet or a step is in flight."""
        return bool(self._ledger.replies) or self._loop.in_flight is not None

    @property
    def unfinished(self) -> tuple[Turn, ...]:
        """Turns without an outcome, in order of submission; raises EngineClosedError."""
        self._check_usable()
        return tuple(self._ledger.turns)

    @property
    def closed(self) -> bool:
        """Whether the engine was closed and accepts no more calls."""
        return self._closed

    @property
    def conversations(self) -> ConversationTable:
        """Table of the conversations; raises EngineClosedError."""
        self._check_usable()
        return self._conversations

    @property
    def cache(self) -> CacheManager:
        """Cache of the conversations' KV; raises EngineClosedError."""
        self._check_usable()
        return self._cache

    @change
    def expire_idle(self) -> None:
        """End conversations that exceed the time-to-live or the bound on idle ones; raises HistoryError.

        A front end calls this before it makes a prompt, so that no prompt continues an ended conversation.
        """
        self._conversations.expire_idle()

    @change
    def submit(
        self, specs: Sequence[TurnSpec], grammars: Mapping[StructuredOutput, Grammar] | None = None
    ) -> list[Turn]:
        """Queue turns in order, after checking all of them: if one is invalid, none is queued.

        `grammars` are compiled already; other forms of these turns are looked up or compiled here.

        The caller must keep a reference to each returned turn, because the next call cancels turns without
        one. This also cancels all turns of a call that an interrupt (Ctrl-C) ends, at any line.
        """
        if self._store.is_damaged and any(spec.is_durable for spec in specs):
            raise HistoryCorruptError("The history was damaged while it was open; it stores no more turns.")
        return self._submitter.submit(specs, grammars or {})

    @change
    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent; a turn that is done does not change.

        Raises InvalidRequestError for another type, or for a turn in progress in another engine.
        """
        if not check_turn(turn, self._ledger.replies).done:
            self._ledger.cancel(turn.reply)

    @change
    def step(self) -> list[Turn]:
        """Schedule, plan and launch a step, then finish the previous one; returns the turns that ended.

        If a step fails on the device or the history cannot be written, the affected turns get that `error`;
        conversations survive. A turn whose logits are not finite gets a LogitsError; the others continue.
        The step after a failed one makes new pools first. While the device has no memory for them, it raises
        StepFailedError, and nothing else is lost.
        """
        if self._needs_new_pools:
            self._runner.reset()
            self._needs_new_pools = False
        try:
            return self._step()
        except StepFailedError as error:
            return self._lose_step(error)

    def wait_for_locks(self, seconds: float) -> None:
        """Let changes of the history wait this long for another program's lock, and then raise
        HistoryBusyError. Turns that end never wait within a step.
        """
        self._check_usable()
        self._store.lock_wait_s = seconds

    def take_deltas(self) -> Deltas:
        """Return the new tokens of turns in progress since the last call; `step` returns the ended turns."""
        self._check_usable()
        return self._ledger.take_deltas()

    def share_prefix(
        self,
        token_ids: Sequence[int],
        messages: tuple[Message, ...] | None = None,
        template_input: TemplateInput = NO_INPUT,
    ) -> SharedPrefix:
        """Make a prefix for conversations to share; raises InvalidRequestError or ContextLengthError."""
        self._check_usable()
        check_beginning(token_ids, self.limits)
        return SharedPrefix(tuple(map(int, token_ids)), messages, template_input=template_input)

    @change
    def release_prefix(self, prefix: SharedPrefix) -> None:
        """Accept no more turns with a prefix; see `PrefixTable.release`. A second call does nothing."""
        if not checked_prefix(prefix, self.limits).released:
            self._prefixes.release(prefix)

    # Between turns

    @change
    def truncate(
        self, conversation_id: str, num_tokens: int | None = None, *, num_turns: int | None = None
    ) -> None:
        """Keep the first tokens or turns of a conversation; see `ConversationTable.truncate`."""
        self._conversations.truncate(conversation_id, num_tokens, num_turns=num_turns)

    @change
    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Create a conversation from the beginning of another one; see `ConversationTable.fork`."""
        self._conversations.fork(conversation_id, new_conversation_id, num_tokens)

    @change
    def apply(self, change: HistoryChange) -> None:
        """Change the history's data other than turns; see `HistoryStore.apply`.

        The KV cache of turns that are removed with it is dropped, except where another turn holds it.
        """
        self._conversations.forget_removed(self._store.apply(change, self._ledger.in_use))

    @change
    def end(self, conversation_id: str) -> None:
        """Forget a conversation; see `ConversationTable.end`."""
        self._conversations.end(conversation_id)

    @change
    def push_out(self, conversation_id: str, max_num_chunks: int | None = None) -> int:
        """Move a conversation's KV cache to host memory with the next step; returns the number of chunks.

        For benchmarks, and for servers that expect a long pause; see `ConversationTable.push_out`.
        """
        return self._conversations.push_out(conversation_id, max_num_chunks)

    @change
    def forget_state(self, conversation_id: str) -> None:
        """Drop a conversation's KV cache in both tiers; its next turn recomputes it from the history."""
        self._conversations.forget_state(conversation_id)

    @change
    def push_out_turn(self, owner: str, turn_id: str) -> int:
        """Call `push_out` for the path to a turn; see `ConversationTable.push_out_turn`."""
        return self._conversations.push_out_turn(owner, turn_id)

    @change
    def forget_turn_state(self, owner: str, turn_id: str) -> None:
        """Call `forget_state` for the path to a turn; see `ConversationTable.forget_turn_state`."""
        self._conversations.forget_turn_state(owner, turn_id)

    @change
    def forget_experience(self) -> None:
        """Discard what a learning order has learned, in memory and in the history; raises HistoryError."""
        self._ledger.forget_experience()

    def explain(self, conversation_id: str) -> Explanation:
        """Explain where a conversation's KV cache is and why chunks were dropped.

        Raises UnknownConversationError.
        """
        self._check_usable()
        found = self._conversations.look_up(conversation_id)
        return explain(found, self._prefixes, self._cache, self._drops, self._config)

    def explain_turn(self, owner: str, turn_id: str) -> Explanation:
        """Explain the KV cache of the path to a turn, as `explain` does; raises UnknownTurnError."""
        self._check_usable()
        found, beginning = self._conversations.look_up_turn(owner, turn_id)
        return explain_turn(found, turn_id, beginning, self._cache, self._drops, self._config)

    def chunk_map(self, owner: str) -> list[BranchMap]:
        """Return the states of all chunks of an owner's placed turns, by branch in memory."""
        self._check_usable()
        return chunk_map(self._conversations.branches.of(owner))

    def stats(self) -> dict[str, int | float]:
        """Return counters since the start and current sizes."""
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
            "history_is_damaged": int(self._store.is_damaged),
        }

    def distributions(self) -> dict[str, tuple[list[int], float]]:
        """Return histograms of step sizes and commit times; see `EngineStats.distributions`."""
        return self._stats.distributions()

    def census(self) -> dict[str, int]:
        """Return the current number of chunks by state, and of free pages and slots."""
        return self._cache.census()

    def check_integrity(self) -> None:
        """Assert that pages, chunks, conversations and requests agree (for tests)."""
        self._loop.check_integrity()
        for request in self._ledger.replies:
            assert request.status is not RequestStatus.FINISHED, "a finished turn was not reported"

    def close(self) -> None:
        """Cancel all turns and close the history; a second call does only what the first one could not."""
        self._guard.check_thread()
        try:
            if not self._closed:
                self._check_usable()
                self._guard.run(self._ledger.cancel_all)
                self._ledger.close()
        finally:
            self._closed = True
            self._store.close()

    # Private methods

    def _check_usable(self) -> None:
        """Raise if closed or called from another thread; then clean up after interrupts and dropped turns."""
        if self._closed:
            raise EngineClosedError("The engine is closed; make a new one.")
        self._guard.check()
        if self._ledger.has_dropped:
            self._guard.run(self._ledger.cancel_dropped)

    def _recreate_state(self) -> None:
        """Recreate the host state after an interrupt (Ctrl-C) in the middle of a change.

        The old state cannot be trusted: tokens may have been granted but not computed, or turns committed but
        not reported. All turns in progress are lost. Conversations are loaded from the history at their next
        use.
        """
        error = StepFailedError(
            "The engine was interrupted. The history may contain this turn already; check it before you send "
            "the turn again."
        )
        for reply in tuple(self._ledger.replies.values()):
            if not reply.done:
                reply.error = error
                self._stats.num_turns_failed += 1
        self._needs_new_pools = True
        self._drops.lose(self._cache.held(), DropReason.INTERRUPTED)
        self._make_state()

    def _note(self, output: SchedulerOutput) -> None:
        try:
            self._observe(output)
        except PensieveError as error:  # a bare PensieveError would tell the caller that nothing changed
            raise RuntimeError("An observer failed in the middle of a step.") from error

    def _launch(self, output: SchedulerOutput) -> _LaunchedStep:
        """Start a step, and its choice as well unless a row's mask needs an id that is in flight."""
        plan = self._planner.plan(output)
        grants = [grant for grant in output.grants if grant.samples]
        num_drafts = sum([bool(grant.draft) for grant in grants])
        sampling = [one for one in grants for _ in range(one.num_outputs)] if num_drafts else grants
        is_late = self._late_rows.wait_for_ids(sampling)
        num_rows, scored = plan.layout.max_num_samples, self._planner.scored
        handle = self._runner.launch(plan)
        step = _LaunchedStep(grants, sampling, num_drafts, num_rows, handle, is_late, scored, set())
        if num_drafts:
            self._stats.count_drafts(num_drafts, len(sampling) - len(grants))
        if not is_late:
            self._choose(step)
        return step

    def _choose(self, step: _LaunchedStep) -> None:
        """Start the choice of a launched step's ids; rows without a mask in time wait for the next step."""
        late_rows = self._late_rows
        self._runner.choose(step.handle, late_rows.words(step.sampling, step.num_rows))
        for request in late_rows.waiting:
            self._loop.scheduler.take_back_sample(request)
            step.discarded.add(request)

    def _step(self) -> list[Turn]:
        """Launch step N+1 before fetching the ids of step N, unless drafts need them.

        Its choice is launched as well, or after the ids of step N came if a mask of step N+1 needs them. The
        device computes the forward pass meanwhile. Texts and commits of step N come last in any case.
        """
        if self._drafter is not None:
            in_flight, scheduler = self._loop.in_flight, self._loop.scheduler
            pays = self._drafter.pays(scheduler.running, len(scheduler.waiting))
            if pays or (in_flight is not None and in_flight.num_drafts):
                return self._step_after_ids(self._drafter.draft if pays else None)
        previous = self._loop.step(self._launch)
        following = self._loop.in_flight
        if previous is None:
            return self._ledger.retry() + self._lose_failed_rows()
        result = self._fetch(previous)
        failure: StepFailedError | None = None
        if following is not None and following.is_late:
            try:
                self._choose(following)
            except StepFailedError as error:
                failure = error  # after step N, whose ids the masks have accepted
        accepted = self._accept(previous, result)
        ended = self._finish(previous, result, accepted)
        return ended if failure is None else ended + self._lose_step(failure)

    def _step_after_ids(self, draft: Draft | None) -> list[Turn]:
        """Fetch the ids of step N, then launch step N+1, whose rows may have drafts.

        A step with drafts must be fetched like this: before, it is not known how many tokens its rows have.
        """
        in_flight = self._loop.in_flight
        if in_flight is not None:
            result = self._fetch(in_flight)
            accepted = self._accept(in_flight, result)
        failure: StepFailedError | None = None
        try:
            self._loop.step(self._launch, draft)
        except StepFailedError as error:
            failure = error  # after step N, whose ids the requests have already
        if in_flight is None:
            ended = self._ledger.retry() + self._lose_failed_rows()
        else:
            ended = self._finish(in_flight, result, accepted)
        return ended if failure is None else ended + self._lose_step(failure)

    def _fetch(self, step: _LaunchedStep) -> StepResult:
        """Wait for the ids of a step, and continue the masks with them."""
        result = self._runner.fetch(step.handle)
        self._late_rows.accept(step.sampling, result.token_ids, result.logprobs, step.discarded)
        return result

    def _accept(self, step: _LaunchedStep, result: StepResult) -> list[_Accepted]:
        """Give a step's ids to their requests; returns which of its rows count.

        Of a draft, the ids count up to the first that differs from it. Each is what the step before would
        have sampled, as its row has seen the same tokens.
        """
        token_ids, drafter, replies = result.token_ids.tolist(), self._drafter, self._ledger.replies
        passed = {*step.discarded, *self._ledger.complete}
        accepted: list[_Accepted] = []
        end = 0
        for request, _, position, _, draft in step.grants:
            row, end = end, end + 1 + len(draft)
            if request in passed or request not in replies:
                continue  # it ended one step earlier, was cancelled, or waits for its mask: discard the token
            ids = token_ids[row:end]
            if draft:
                num_held = num_equal(draft, ids)
                del ids[num_held + 1 :]
                position -= len(draft)
                self._loop.scheduler.accept(request, position, ids)
            else:
                assert request.token_ids[position] == PENDING_TOKEN, f"{position} was sampled twice"
                request.token_ids[position] = ids[0]
            if drafter is not None:
                drafter.accept(request, position, ids)
            accepted.append((request, row, ids))
        return accepted

    def _finish(self, step: _LaunchedStep, result: StepResult, accepted: Sequence[_Accepted]) -> list[Turn]:
        """Give a step's ids to their turns, and commit the turns that end with them."""
        endings: list[tuple[ReplyState, FinishReason]] = []
        broken = self._accept_prompts(step, result)
        logprobs = result.logprobs.tolist()
        are_finite = np.isfinite(result.logprobs).tolist()
        replies, touched = self._ledger.replies, self._ledger.touched
        for request, first, ids in accepted:
            reply = replies[request]
            if reply in broken:
                continue
            touched[request] = None
            for row, token_id in enumerate(ids, first):
                if not are_finite[row]:
                    broken.append(reply)
                    break
                if reply.logprobs is None:  # as most: a view of a row takes longer than the rest
                    reason = reply.accept(token_id, logprobs[row])
                else:
                    top_ids, top_logprobs = result.top_ids[row], result.top_logprobs[row]
                    reason = reply.accept(token_id, logprobs[row], top_ids, top_logprobs)
                if reason is not None:
                    endings.append((reply, reason))
                    break
            if len(ids) > 1 and reply not in broken:
                # Neither the id behind the draft counts, nor those behind the end of the reply.
                self._stats.num_accepted_draft_tokens += min(row - first + 1, len(ids) - 1)
        ended = self._ledger.commit(endings) + self._ledger.lose_to_logits(broken)
        ended += self._lose_failed_rows()
        self._conversations.forget_stateless()
        if self._drafter is not None:
            self._drafter.catch_up(self._loop.scheduler.running)
        return ended

    def _accept_prompts(self, step: _LaunchedStep, result: StepResult) -> list[ReplyState]:
        """Give log-probabilities of prompts to their turns; returns those with values that are not finite."""
        broken: list[ReplyState] = []
        begin = 0
        for request, num_rows in step.scored:
            rows, begin = slice(begin, begin + num_rows), begin + num_rows
            reply = self._ledger.replies.get(request)
            if reply is None or reply in broken:
                continue
            assert result.prompt is not None, "the runner left out the scores of a prompt"
            if not reply.accept_prompt(result.prompt, rows):
                broken.append(reply)
        return broken

    def _lose_failed_rows(self) -> list[Turn]:
        """End the turns whose masks could not be continued, each with its own error."""
        failed, replies = tuple(self._late_rows.failed.items()), self._ledger.replies
        return [turn for request, error in failed for turn in self._ledger.lose([replies[request]], error)]

    def _lose_step(self, error: StepFailedError) -> list[Turn]:
        """Fail the turns that ran and keep the chunks in host memory; conversations survive.

        This does not use the device, so that waiting turns survive even if new pools cannot be made.
        """
        self._loop.in_flight = None
        self._needs_new_pools = True
        self._planner.forget_counts()
        self._cache.lose_device()
        replies = self._ledger.replies.values()
        ran = [
            reply
            for reply in replies
            if (reply.request.status is not RequestStatus.WAITING or reply.lacks_scores)
            and reply.request not in self._ledger.complete
        ]
        turns = self._ledger.lose(ran, error)
        for request in self._ledger.replies:
            # A suspended request with a token in flight samples it again, with the same result.
            if request.token_ids[-1] == PENDING_TOKEN:
                request.token_ids.pop()
        return turns
