"""One serving engine under virtual time: the real scheduler and cache, a device that only takes time.

Owns: the engine's loop without tokens: what `engine.Engine._step` and `engine.ledger` do between scheduler,
cache, transfers and device, in the same order, so that the same turns lead to the same decisions.
Does not know: clients, other replicas, or what turns are for.
Called by: `simulation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pensieve_jax.cache import CachedSequence, CacheManager, CostModel
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.scheduler import Grant, Request, Scheduler, SchedulerOutput, token_buckets
from pensieve_jax.simulator.clock import Timeline
from pensieve_jax.simulator.device import SimulatedDevice
from pensieve_jax.simulator.profile import DeviceProfile
from pensieve_jax.simulator.step_time import StepLoad
from pensieve_jax.simulator.stretch import Stretch, is_blocked
from pensieve_jax.simulator.transfers import SimulatedTransfers
from pensieve_jax.workload.step_totals import Steps
from pensieve_jax.workload.turns import Answer, UserTurn

_MIN_KNOWN_TO_SWEEP = 64
_TOKEN_ID = 0  # of every prompt: nobody reads them
_NOBODY: list[Request] = []

Observe = Callable[[SchedulerOutput], None]


@dataclass(slots=True)
class _Served:
    """A turn that was submitted, and when its first token came."""

    turn: UserTurn
    first_token_s: float = 0.0


@dataclass(slots=True)
class _Step:
    """A step: what it computes, who gets a first or a last token, how many get one, and when it ends."""

    load: StepLoad
    first: list[Request]
    last: list[Request]
    num_samples: int
    end_s: float = 0.0


class Replica:
    """Serves turns.

    Attributes:
      number: among its like.
      timeline: its clock.
      cache: where the state of conversations is.
    """

    def __init__(
        self,
        config: EngineConfig,
        profile: DeviceProfile,
        cost_model: CostModel,
        *,
        number: int = 0,
        start_s: float = 0.0,
        stretches: bool = True,
        observe: Observe | None = None,
    ) -> None:
        """Idle. `config.cache.cpu_bytes` must be turned into pages.

        `stretches` False asks the scheduler for every step, which takes longer and changes nothing else.
        `observe` sees every decision.
        """
        self.number = number
        self.timeline = Timeline(start_s)
        cache = config.cache
        chunk_bytes = cache.chunk_tokens * profile.kv_token_bytes
        share_bytes = chunk_bytes // profile.num_devices
        max_num_staged = config.with_staged_pages(share_bytes).runner.max_num_staged_pages
        self.cache = CacheManager(cache, cost_model, self.timeline, max_num_copies=max_num_staged)
        self._scheduler = Scheduler(config.scheduler, self.cache)
        self._transfers = SimulatedTransfers(
            profile,
            self.timeline,
            chunk_bytes=chunk_bytes,
            max_num_staged=max_num_staged,
            retrieval_priority=cache.retrieval_priority,
        )
        self._device = SimulatedDevice(
            profile, token_buckets(config.scheduler), self.timeline, self._transfers
        )
        self._config = config
        self._stretches = stretches
        self._stretch: Stretch | None = None
        self._observe = observe
        self._stats = EngineStats()
        self._num_requests = 0
        self._turns: dict[Request, _Served] = {}
        self._in_flight: _Step | None = None
        self._sequences: dict[str, CachedSequence] = {}
        self._busy: set[str] = set()
        self._num_known_to_sweep = _MIN_KNOWN_TO_SWEEP

    @property
    def num_unfinished(self) -> int:
        """Turns that were submitted and not answered."""
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        """A turn has no answer yet, or a step is in flight."""
        return bool(self._turns) or self._in_flight is not None

    def submit(self, turn: UserTurn) -> None:
        """Queue a turn of a conversation that none is running of; its history may be known or not."""
        self._busy.add(turn.conversation_id)
        num_history = turn.num_history_tokens
        conversation = Conversation(
            turn.conversation_id,
            [_TOKEN_ID] * (num_history + turn.prompt_tokens),
            num_history_tokens=num_history,
            num_computed_tokens=max(num_history - 1, 0),
        )
        request = Request(
            self._num_requests,
            conversation,
            self._sequence(turn.conversation_id),
            _params(turn.output_tokens),
            seed=0,
            ending_ids=(),
            max_context_tokens=num_history + turn.prompt_tokens + turn.output_tokens,
        )
        self._num_requests += 1
        self.cache.touch(request.sequence)
        self._scheduler.add(request)
        self._turns[request] = _Served(turn)

    def remember(self, conversation_id: str, num_tokens: int) -> None:
        """Have the state of `num_tokens` tokens of an idle conversation, as if computed and left just now.

        What gives way to it is moved or dropped as the cache decides, in no time. For the start of a run.
        """
        sequence, cache = self._sequence(conversation_id), self.cache
        cache.begin_step()
        cache.enqueue(sequence, -1)
        if not cache.try_admit(sequence, num_tokens, waive_reserve=True):
            raise AssertionError(f"the pool has no room for {num_tokens} tokens, or requests are running")
        cache.fill(sequence, 0, num_tokens)
        cache.release(sequence)
        cache.end_step()
        for copies in cache.take_copies():
            cache.complete(copy.copy_id for copy in copies)
        cache.take_drops()

    def step(self, until_s: float) -> list[Answer]:
        """Go on by a step, or by several while the clock is before `until_s` and nobody is answered.

        A step is scheduled and dispatched, then the one before is awaited; returns what that one answered.
        """
        if self._advance(until_s):
            return []
        self.cache.complete(self._transfers.completed())
        output = self._scheduler.schedule()
        return self._carry_out(output, self._look_at(output.grants))

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, named as those of `Engine.stats`, and the device's."""
        return {
            **self._stats.as_dict(),
            **self.cache.stats(),
            **self._transfers.stats(),
            "device_busy_s": self._device.busy_s,
            "num_padded_tokens": self._device.num_padded_tokens,
            "padding_s": self._device.padding_s,
        }

    def steps(self) -> Steps:
        """Steps since the start, by bucket."""
        return self._device.steps.totals

    def check_integrity(self) -> None:
        """Assert that pages, chunks and requests agree (for tests)."""
        self.cache.check_integrity()
        self._scheduler.check_integrity()

    def _sequence(self, conversation_id: str) -> CachedSequence:
        sequence = self._sequences.get(conversation_id)
        if sequence is None:
            sequence = self._sequences[conversation_id] = self.cache.open(conversation_id)
        return sequence

    def _advance(self, until_s: float) -> bool:
        """Do steps that need no scheduler, if the next one is one; False if it is not."""
        if self._stretch is None and self._can_stretch():
            self._stretch = Stretch(self._config, self._scheduler, self.cache)
        stretch, has_advanced = self._stretch, False
        while stretch is not None and (not has_advanced or self.timeline.now() < until_s):
            if copy_ids := self._transfers.completed():
                self.cache.complete(copy_ids)
            if not stretch.can_go_on():
                stretch.end()
                stretch = self._stretch = None
                break
            output = stretch.step(with_grants=self._observe is not None)
            self._carry_out(output, _Step(stretch.load, _NOBODY, stretch.last(), len(stretch.running)))
            stretch.load.lengthen()
            has_advanced = True
        return has_advanced

    def _can_stretch(self) -> bool:
        """Every running request got a token in the latest step, and none its last."""
        latest, num_running = self._in_flight, len(self._scheduler.running)
        if not self._stretches or latest is None or latest.last or latest.num_samples != num_running:
            return False
        return is_blocked(self._config, self._scheduler, self.cache)

    def _look_at(self, grants: tuple[Grant, ...]) -> _Step:
        step = _Step(StepLoad(), [], [], 0)
        for request, start, end, samples in grants:
            step.load.add(end - start, end)
            if samples:
                step.num_samples += 1
                num_tokens = len(request.token_ids)
                if num_tokens == request.num_prompt_end + 1:
                    step.first.append(request)
                if num_tokens == request.max_total_tokens:
                    step.last.append(request)
        return step

    def _carry_out(self, output: SchedulerOutput | None, step: _Step) -> list[Answer]:
        """Do what was decided, in the order of `engine.Engine._step`; None moves nothing."""
        transfers = self._transfers
        previous, self._in_flight = self._in_flight, None
        if output is None:
            transfers.swap_in(())  # what is held back may start
        else:
            self._count(output)
            if self._observe is not None:
                self._observe(output)
            transfers.swap_out(output.swap_outs)
            transfers.swap_in(output.swap_ins)
            transfers.rush(output.rushed)
        if step.load.num_tokens:
            self._stats.num_steps += 1
            self._stats.num_step_tokens += step.load.num_tokens
            step.end_s = self._device.dispatch(step.load)
            self._in_flight = step
        if previous is not None:
            return self._finish(previous)
        if self._in_flight is None and self._turns:
            self._transfers.wait()  # no turn can go on before a copy is complete
        return []

    def _count(self, output: SchedulerOutput) -> None:
        """What `EngineStats.count_step` counts, less the step itself: stretches leave grants out."""
        stats = self._stats
        stats.num_suspensions += len(output.suspended)
        stats.num_dropped_chunks += len(output.drops)
        stats.num_swapped_out_chunks += len(output.swap_outs)
        stats.num_swapped_in_chunks += len(output.swap_ins)

    def _finish(self, step: _Step) -> list[Answer]:
        """Wait for a step's ids, and settle the turns that end with them."""
        self._device.fetch(step.end_s)
        now_s = self.timeline.now()
        for request in step.first:
            self._turns[request].first_token_s = now_s
        if not step.last:
            return []
        answers = [self._settle(request, now_s) for request in step.last]
        self._forget_stateless()
        return answers

    def _settle(self, request: Request, now_s: float) -> Answer:
        """A turn was answered: its pages stay with the conversation, in the stateful engine."""
        served, conversation, sequence = self._turns.pop(request), request.conversation, request.sequence
        usage = request.usage(request.num_output_tokens)
        self._stats.count_turn(usage, has_history=request.num_history_tokens > 0)
        conversation.commit()
        self.cache.truncate(sequence, conversation.num_computed_tokens)
        self._scheduler.remove(request)
        if not self._config.stateful:
            self.cache.truncate(sequence, 0)
        self._busy.remove(conversation.conversation_id)
        return Answer(served.turn, self.number, served.first_token_s, now_s, usage)

    def _forget_stateless(self) -> None:
        """Forget conversations without state, now and then, so that it costs little."""
        if len(self._sequences) < self._num_known_to_sweep:
            return
        for conversation_id, sequence in list(self._sequences.items()):
            if conversation_id not in self._busy and not sequence.holds_state:
                del self._sequences[conversation_id]
                self.cache.close(sequence)
        self._num_known_to_sweep = 2 * len(self._sequences) + _MIN_KNOWN_TO_SWEEP


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
