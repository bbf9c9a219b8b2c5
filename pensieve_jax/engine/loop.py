"""One engine's loop without tokens: what `Engine` does with a device, and a simulated replica in no time.

Owns: the cache and the scheduler of one engine; the order of a step; what becomes of a request's state when
it is submitted, when its turn was answered, and when it leaves nothing behind; what an observer is: one
function that is told every step's decisions. That both its drivers go through here is why a simulation
decides as the engine does.
Does not know: ids, text, histories or devices: its driver says how a step is launched, and finishes steps;
nor who observes: metrics, timelines and tests do.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.cache import CachedSequence, CacheManager, CostModel, Drop, LearnedState, OnMove
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler import Request, Scheduler, SchedulerOutput

_MIN_KNOWN_TO_SWEEP = 64
type Observe = Callable[[SchedulerOutput], None]
"""Called with what a step does, before it is done: grants, who joined and who was suspended, copies between
the tiers, and every chunk that was dropped, with its reason and worth. It must not call the engine. What it
raises leaves a step half done: `Engine.step` raises it (a PensieveError as the cause of a RuntimeError), and
the engine starts over with the next call, as after an interrupt."""


class EngineLoop[Step]:
    """Requests in progress; `Step` is what its driver keeps of a launched step until that is finished.

    Attributes:
      cache: where the state of conversations is.
      scheduler: who computes what next.
      in_flight: the step that was launched and is not finished; one of look-ahead.
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
        on_drop: Callable[[Drop], None] = lambda drop: None,
        on_move: OnMove = lambda before, after, indices: None,
        experience: LearnedState | None = None,
    ) -> None:
        """Idle, with an empty cache.

        Args:
          config: `cache.cpu_bytes` must have been turned into pages.
          cost_model: what recomputing a chunk costs.
          clock: what activity is dated by.
          transfers: carries out the copies that the cache begins.
          stats: counted in.
          max_num_copies: chunks that are on their way in, or out, ahead of need.
          observe: sees every step's decisions; see `Observe`.
          on_drop: is told of every chunk that is dropped, between steps too.
          on_move: is told of chunks that change their owner, as conversations fork.
          experience: what an order that learns goes on from.
        """
        self.cache = CacheManager(
            config.cache,
            cost_model,
            clock,
            max_num_copies=max_num_copies,
            on_drop=on_drop,
            on_move=on_move,
            experience=experience,
        )
        self.scheduler = Scheduler(config.scheduler, self.cache)
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
        """Queue a turn whose prompt stands in `conversation.token_ids` already; see `Request`.

        Requests are numbered by arrival in this loop; another loop, as after an interrupt, begins at 0.
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
        if self._is_observed(conversation):
            self.cache.turns.sent(sequence, conversation.num_history_tokens)
        self.cache.touch(sequence)
        self.scheduler.add(request)
        return request

    def step(self, launch: Callable[[SchedulerOutput], Step]) -> Step | None:
        """Schedule a step and launch it, if anything was granted; returns the one before, to be finished."""
        ended = self._transfers.completed()
        self.cache.complete(ended.arrived)
        self.cache.lose(ended.lost)
        output = self.scheduler.schedule()
        return self.carry_out(output, output.num_tokens, lambda: launch(output))

    def carry_out(
        self, output: SchedulerOutput | None, num_tokens: int, launch: Callable[[], Step]
    ) -> Step | None:
        """Do what was decided. The order of these lines is program order on the device.

        Args:
          output: the decisions; None: nothing but grants, which nobody asks for.
          num_tokens: query tokens that were granted; `launch` is called if there are any.

        Returns the step before. Blocks where none is in flight, and no turn can go on before a copy is
        complete.
        """
        previous, self.in_flight = self.in_flight, None
        if output is None:
            self._transfers.swap_in(())  # what is held back may start
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

    def settle(self, request: Request, usage: Usage) -> None:
        """A turn was answered, and is history; its pages stay with it, in the stateful engine."""
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
        """A turn ends as if it had never been sent."""
        conversation = request.conversation
        conversation.rollback()
        if self._is_observed(conversation) and conversation.num_history_tokens:
            self.cache.turns.left(request.sequence, conversation.num_history_tokens)
        self.cache.truncate(request.sequence, conversation.num_history_tokens)
        self._leave(request)

    def check_integrity(self) -> None:
        """Assert that pages, chunks and requests agree (for tests)."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()

    def _is_observed(self, conversation: Conversation) -> bool:
        """Whether it may return, and find state."""
        return self._stateful and not conversation.one_off

    def _leave(self, request: Request) -> None:
        self.scheduler.remove(request)
        if not self._stateful:
            self.cache.truncate(request.sequence, 0)


class PeriodicSweep:
    """When to look at everything that is known: now and then, so that it costs little.

    It is due when twice as many are known as were left by the one before.
    """

    def __init__(self) -> None:
        """The first one is due when some dozens are known."""
        self._num_known = _MIN_KNOWN_TO_SWEEP

    def is_due(self, num_known: int) -> bool:
        """Whether it is time, with so many known."""
        return num_known >= self._num_known

    def done(self, num_left: int) -> None:
        """There was one, and it left so many."""
        self._num_known = 2 * num_left + _MIN_KNOWN_TO_SWEEP


def unobserved(output: SchedulerOutput) -> None:
    """An observer that looks away."""
