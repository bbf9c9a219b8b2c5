"""The engine loop without tokens, which `Engine` drives with a device and a simulator drives without one.

Owns: the cache and the scheduler of one engine, the order of actions in a step, and the type of an observer.
It updates the KV cache when a turn is submitted, answered or withdrawn. Both drivers use this code, so a
simulation makes the same decisions as the engine.
Does not know: token ids, text, histories or devices: its driver launches and finishes steps. Nor does it know
the observer, such as metrics, timelines and tests.
Called by `Engine` and the lab's simulated replica.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.cache import CachedSequence, CacheManager, ChunkDrop, CostModel, LearnedState, OnMove
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler import Draft, Request, Scheduler, SchedulerOutput, make_prompt_order

_MIN_KNOWN_TO_SWEEP = 64
type Observe = Callable[[SchedulerOutput], None]
"""Called with a step's decisions before they are carried out: grants, admitted and suspended requests, copies
between the tiers, and dropped chunks with their reasons and retention values. It must not call the engine.
An exception leaves the step unfinished: `Engine.step` raises it (a PensieveError as the cause of a
RuntimeError), and the next call recreates the engine's state, as after an interrupt."""


class EngineLoop[Step]:
    """Event loop of one engine; `Step` is the driver's record of a launched step until it finishes it.

    Attributes:
      cache: the KV cache of conversations.
      scheduler: the scheduler of requests in progress.
      in_flight: the launched step that is not finished; there is one step of look-ahead.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost_model: CostModel,
        clock: Clock,
        transfers: Transfers,
        stats: EngineStats,
        *,
        max_num_copies: int,
        observe: Observe,
        on_drop: Callable[[ChunkDrop], None] = lambda drop: None,
        on_move: OnMove = lambda before, after, indices: None,
        learned_state: LearnedState | None = None,
    ) -> None:
        """Start idle, with an empty cache.

        Args:
          config: configuration in which `cache.cpu_bytes` has been converted to pages.
          cost_model: costs of recomputing chunks, and of prompts.
          clock: clock that dates activity and arrivals.
          transfers: performs the copies that the cache begins.
          stats: counters to update.
          max_num_copies: limit of copies ahead of need in flight, per direction.
          observe: called with every step's decisions; see `Observe`.
          on_drop: called for every dropped chunk, also between steps.
          on_move: called for chunks that change their owner when conversations fork.
          learned_state: state from which a learning order starts.
        """
        self.cache = CacheManager(
            config.cache,
            cost_model,
            clock,
            max_num_copies=max_num_copies,
            on_drop=on_drop,
            on_move=on_move,
            learned_state=learned_state,
        )
        order = make_prompt_order(config.scheduler, config.cache.chunk_tokens, cost_model, clock)
        self.scheduler = Scheduler(config.scheduler, self.cache, order)
        self.in_flight: Step | None = None
        self._transfers = transfers
        self._stats = stats
        self._observe = observe
        self._stateful = config.stateful
        self._num_requests = 0

    def submit(
        self,
        conversation: Conversation,
        sequence: CachedSequence,
        params: SamplingParams,
        *,
        seed: int,
        ending_ids: tuple[int, ...],
        max_context_tokens: int,
    ) -> Request:
        """Queue a turn whose prompt is in `conversation.token_ids` already; see `Request`.

        Requests are numbered by arrival, from 0 in each loop (a new loop is made after an interrupt).
        """
        request = Request(
            self._num_requests,
            conversation,
            sequence,
            params,
            seed=seed,
            ending_ids=ending_ids,
            max_context_tokens=max_context_tokens,
        )
        self._num_requests += 1
        if params.prompt_logprobs is not None:
            # Every position that predicts a prompt token is computed in this turn, cached or not.
            self.cache.truncate(sequence, max(conversation.num_history_tokens - 1, 0))
        if self._is_observed(conversation):
            self.cache.turns.sent(sequence, conversation.num_history_tokens)
        self.cache.touch(sequence)
        self.scheduler.add(request)
        return request

    def step(self, launch: Callable[[SchedulerOutput], Step], draft: Draft | None = None) -> Step | None:
        """Schedule a step and launch it if it has grants; returns the previous step, to be finished.

        With `draft`, the caller has already given the ids of the previous step to their requests.
        """
        ended = self._transfers.completed()
        self.cache.complete(ended.arrived)
        self.cache.lose(ended.lost)
        output = self.scheduler.schedule(draft)
        return self.carry_out(output, output.num_tokens, lambda: launch(output))

    def carry_out(
        self, output: SchedulerOutput | None, num_tokens: int, launch: Callable[[], Step]
    ) -> Step | None:
        """Carry out a step's decisions. The order of these lines is the program order on the device.

        Args:
          output: the decisions; None for a step with grants only, whose details are not needed.
          num_tokens: query tokens of all grants; `launch` is called if it is not 0.
          launch: launches the step and returns the driver's record of it.

        Returns the previous step. Blocks if no step is in flight and no turn can continue before a copy
        completes.
        """
        previous, self.in_flight = self.in_flight, None
        if output is None:
            self._transfers.swap_in(())  # copies that were held back may start
        else:
            self._observe(output)
            self._stats.count_decisions(output)
            self._transfers.swap_out(output.swap_outs)
            self._transfers.swap_in(output.swap_ins)
            self._transfers.expedite(output.expedited)
        if num_tokens:
            self._stats.count_step(num_tokens)
            self.in_flight = launch()
        elif previous is None and (self.scheduler.running or self.scheduler.waiting):
            self._transfers.wait()
        return previous

    def hold(self, request: Request) -> None:
        """Take an answered turn out of the batch; the driver calls `settle` or `withdraw` later.

        Until then its pages are those of an idle conversation.
        """
        self.cache.truncate(request.sequence, len(request.token_ids) - 1)
        self.scheduler.retire(request)

    def settle(self, request: Request, usage: Usage) -> None:
        """End an answered turn, which becomes history; a stateful engine keeps its pages."""
        conversation = request.conversation
        self._stats.count_turn(usage, has_history=request.num_history_tokens > 0)
        conversation.commit()
        if self._is_observed(conversation):
            self.cache.turns.answered(
                request.sequence,
                conversation.num_history_tokens,
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
            )
        self.cache.truncate(request.sequence, conversation.num_computed_tokens)
        self._leave(request)

    def withdraw(self, request: Request) -> None:
        """End a turn as if it had never been sent."""
        conversation = request.conversation
        # KV from here on belongs to the turn's own tokens, even where it replaced tokens of the history.
        num_valid = conversation.num_history_tokens
        conversation.rollback()
        if self._is_observed(conversation) and conversation.num_history_tokens:
            self.cache.turns.left(request.sequence, conversation.num_history_tokens)
        self.cache.truncate(request.sequence, num_valid)
        self._leave(request)

    def check_integrity(self) -> None:
        """Assert that pages, chunks and requests agree (for tests)."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()

    def _is_observed(self, conversation: Conversation) -> bool:
        """Return whether a conversation may return and reuse its KV cache."""
        return self._stateful and not conversation.one_off

    def _leave(self, request: Request) -> None:
        self.scheduler.remove(request)
        if not self._stateful:
            self.cache.truncate(request.sequence, 0)


class PeriodicSweep:
    """The schedule of a scan over all items, with amortized constant cost per item.

    A scan is due when there are twice as many items as the last one left, plus a constant.
    """

    def __init__(self) -> None:
        """Make the first scan due at 64 items."""
        self._num_known = _MIN_KNOWN_TO_SWEEP

    def is_due(self, num_known: int) -> bool:
        """Return whether a scan is due for `num_known` items."""
        return num_known >= self._num_known

    def done(self, num_left: int) -> None:
        """Record a scan that left `num_left` items."""
        self._num_known = 2 * num_left + _MIN_KNOWN_TO_SWEEP


def unobserved(output: SchedulerOutput) -> None:
    """Ignore the decisions of every step."""
