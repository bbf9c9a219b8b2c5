"""One serving engine under virtual time: the real scheduler and cache with a simulated device.

Owns: the substitutes for ids, histories and a device around the engine's own loop (`engine.loop`), so that
the same turns lead to the same decisions; and decode runs, which skip the scheduler.
Does not know: clients, other replicas, or what turns are for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from pensieve_jax.balance import Load
from pensieve_jax.cache import CachedSequence, CacheManager, CostModel, EvictionClass, LearnedState
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.loop import EngineLoop, Observe, PeriodicSweep, unobserved
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.scheduler import Grant, Request, token_buckets
from pensieve_lab.simulator.clock import Timeline
from pensieve_lab.simulator.decode_run import DecodeRun
from pensieve_lab.simulator.device import SimulatedDevice
from pensieve_lab.simulator.profile import DeviceProfile
from pensieve_lab.simulator.step_time import StepLoad
from pensieve_lab.simulator.transfers import SimulatedTransfers
from pensieve_lab.workload.server import History
from pensieve_lab.workload.step_totals import Steps
from pensieve_lab.workload.turns import Answer, UserTurn

_TOKEN_ID = 0  # placeholder; the simulation reads no ids
_NO_REQUESTS: list[Request] = []


@dataclass(slots=True)
class _SubmittedTurn:
    """Submitted turn, the tokens that it had to compute then, and the time of its first token."""

    turn: UserTurn
    compute_tokens: int
    first_token_s: float = 0.0


@dataclass(slots=True)
class _Step:
    """Step: its load, requests that get a first or last token, the number that get a token, and its end."""

    load: StepLoad
    first: list[Request]
    last: list[Request]
    num_samples: int
    end_s: float = 0.0


class Replica:
    """`Server` of turns in virtual time.

    Attributes:
      number: index among the replicas.
      clock: time of its host and device.
      cache: cache manager of the conversations' chunks.
    """

    def __init__(
        self,
        config: EngineConfig,
        profile: DeviceProfile,
        cost_model: CostModel,
        *,
        number: int = 0,
        start_s: float = 0.0,
        decode_runs: bool = True,
        observe: Observe | None = None,
        learned_state: LearnedState | None = None,
    ) -> None:
        """Start idle. `config.cache.cpu_bytes` must be converted to pages.

        `decode_runs` False calls the scheduler for every step, which is slower and changes nothing else.
        `observe` sees every decision; see `Observe`. A learning order continues from `learned_state`.
        """
        self.number = number
        self.clock = Timeline(start_s)
        cache = config.cache
        chunk_bytes = profile.host_chunk_bytes(cache.chunk_tokens)
        share_bytes = chunk_bytes // profile.num_devices
        max_num_staged = config.with_staged_pages(share_bytes).runner.max_num_staged_pages
        self._transfers = SimulatedTransfers(
            profile,
            self.clock,
            chunk_bytes=chunk_bytes,
            max_num_staged=max_num_staged,
            retrieval_priority=cache.retrieval_priority,
        )
        self._device = SimulatedDevice(profile, token_buckets(config.scheduler), self.clock, self._transfers)
        self._stats = EngineStats()
        self._loop: EngineLoop[_Step] = EngineLoop(
            config,
            cost_model,
            self.clock,
            self._transfers,
            self._stats,
            max_num_copies=max_num_staged,
            observe=observe or unobserved,
            learned_state=learned_state,
        )
        self.cache: CacheManager = self._loop.cache
        self._uses_decode_runs = decode_runs
        self._decode_run: DecodeRun | None = None
        self._is_observed = observe is not None
        self._turns: dict[Request, _SubmittedTurn] = {}
        self._sequences: dict[str, CachedSequence] = {}
        self._busy: set[str] = set()
        self._compute_tokens = self._context_tokens = 0
        self._sweep = PeriodicSweep()

    @property
    def num_unfinished(self) -> int:
        """Submitted turns without an answer."""
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn has no answer yet or a step is in flight."""
        return bool(self._turns) or self._loop.in_flight is not None

    def submit(self, turn: UserTurn) -> None:
        """Queue a turn of a conversation without a running turn; its history may be cached or not.

        An idle replica first advances its clock to the turn's arrival.
        """
        if not self.has_unfinished:
            self.clock.advance_to(turn.arrival_s)
        self._busy.add(turn.conversation_id)
        num_history = turn.num_history_tokens
        conversation = Conversation(
            turn.conversation_id,
            [_TOKEN_ID] * (num_history + turn.prompt_tokens),
            num_history_tokens=num_history,
            num_computed_tokens=max(num_history - 1, 0),
        )
        request = self._loop.submit(
            conversation,
            self._sequence(turn.conversation_id),
            _params(turn.output_tokens),
            seed=0,
            ending_ids=(),
            max_context_tokens=num_history + turn.prompt_tokens + turn.output_tokens,
        )
        compute_tokens = self._missing_tokens(turn)
        self._turns[request] = _SubmittedTurn(turn, compute_tokens)
        self._compute_tokens += compute_tokens
        self._context_tokens += num_history + turn.prompt_tokens
        self._device.submit()

    @property
    def load(self) -> Load:
        """Load for routing: turns, tokens to compute and context tokens."""
        return Load(len(self._turns), self._compute_tokens, self._context_tokens)

    @property
    def unanswered(self) -> list[UserTurn]:
        """Unanswered turns in the order of submission."""
        return [served.turn for served in self._turns.values()]

    def _missing_tokens(self, turn: UserTurn) -> int:
        """Return the tokens that a turn must compute with the current cache contents."""
        sequence = self._sequences[turn.conversation_id]
        num_kept = (
            len(sequence.chunks) - sequence.num_by_class[EvictionClass.ABSENT]
        ) * self.cache.chunk_tokens
        return turn.prompt_tokens + max(turn.num_history_tokens - num_kept, 0)

    def remember(self, histories: Iterable[History]) -> None:
        """Cache histories as if computed and left at their times, without using other time.

        The cache moves or drops what must give way, as usual. Meant for the start of a run.
        """
        for history in histories:
            self.clock.advance_to(min(history.last_active_s, 0.0))
            # The last token of a reply has no KV yet.
            self._have(history.conversation_id, history.num_tokens - 1)

    def _have(self, conversation_id: str, num_tokens: int) -> None:
        sequence, cache = self._sequence(conversation_id), self.cache
        cache.begin_step()
        cache.enqueue(sequence, -1)
        if not cache.try_admit(sequence, num_tokens, waive_reserve=True):
            raise AssertionError(f"the pool has no room for {num_tokens} tokens, or requests are running")
        cache.fill(sequence, 0, num_tokens)
        cache.turns.left(sequence, num_tokens)
        cache.release(sequence)
        cache.end_step()
        for copies in cache.take_copies():
            cache.complete(copy.copy_id for copy in copies)
        cache.take_drops()

    def step(self, until_s: float) -> list[Answer]:
        """Do a step, or several while the clock is before `until_s` and no turn is answered.

        A step is scheduled and dispatched, then the previous one is awaited; its answers are returned.
        """
        if self._advance(until_s):
            return []
        return self._finish(self._loop.step(lambda output: self._launch(self._look_at(output.grants))))

    def counters(self) -> dict[str, int | float]:
        """Return counters since the start, named like those of `Engine.stats`, and the device's."""
        return {
            **self._stats.as_dict(),
            **self.cache.stats(),
            **self._transfers.stats(),
            "device_busy_s": self._device.busy_s,
            "num_padded_tokens": self._device.num_padded_tokens,
            "padding_s": self._device.padding_s,
            "host_s": self._device.host_s,
        }

    def steps(self) -> Steps:
        """Return the steps since the start, by bucket."""
        return self._device.steps.totals

    def check_integrity(self) -> None:
        """Assert that pages, chunks and requests agree (for tests)."""
        self._loop.check_integrity()

    def _sequence(self, conversation_id: str) -> CachedSequence:
        sequence = self._sequences.get(conversation_id)
        if sequence is None:
            sequence = self._sequences[conversation_id] = self.cache.open(conversation_id)
        return sequence

    def _advance(self, until_s: float) -> bool:
        """Do steps that need no scheduler; return False if the next step needs it."""
        if self._decode_run is None and self._can_start_decode_run():
            self._decode_run = DecodeRun(self._loop.scheduler, self.cache)
        run, has_advanced = self._decode_run, False
        while run is not None and (not has_advanced or self.clock.now() < until_s):
            if arrived := self._transfers.completed().arrived:
                self.cache.complete(arrived)
            if not run.can_go_on():
                run.end()
                run = self._decode_run = None
                break
            output = run.step(with_grants=self._is_observed)
            step = _Step(run.load, _NO_REQUESTS, run.last(), len(run.running))
            launch = functools.partial(self._launch, step)
            self._finish(self._loop.carry_out(output, step.load.num_tokens, launch))
            run.load.lengthen()
            has_advanced = True
        return has_advanced

    def _can_start_decode_run(self) -> bool:
        """Return whether the latest step gave every running request a token that was not its last.

        A waiting request with room might join in the next step, so there must be none either.
        """
        latest, num_running = self._loop.in_flight, len(self._loop.scheduler.running)
        if not self._uses_decode_runs or latest is None or latest.last or latest.num_samples != num_running:
            return False
        return next(self._loop.scheduler.candidates(), None) is None

    def _look_at(self, grants: tuple[Grant, ...]) -> _Step:
        step = _Step(StepLoad(), [], [], 0)
        for request, start, end, samples, _ in grants:
            step.load.add(end - start, end)
            if samples:
                step.num_samples += 1
                num_tokens = len(request.token_ids)
                if num_tokens == request.num_prompt_end + 1:
                    step.first.append(request)
                if num_tokens == request.max_total_tokens:
                    step.last.append(request)
        return step

    def _launch(self, step: _Step) -> _Step:
        step.end_s = self._device.dispatch(step.load)
        return step

    def _finish(self, step: _Step | None) -> list[Answer]:
        """Wait for a step's ids, and settle the turns that end with it."""
        if step is None:
            return []
        self._device.fetch(step.end_s)
        now_s = self.clock.now()
        for request in step.first:
            served = self._turns[request]
            served.first_token_s = now_s
            self._compute_tokens -= served.compute_tokens
        if not step.last:
            return []
        answers = [self._settle(request, now_s) for request in step.last]
        self._forget_stateless()
        return answers

    def _settle(self, request: Request, now_s: float) -> Answer:
        """Settle an answered turn and return its answer."""
        served = self._turns.pop(request)
        usage = request.usage(request.num_output_tokens)
        self._loop.settle(request, usage)
        self._busy.remove(request.conversation.conversation_id)
        self._context_tokens -= served.turn.num_history_tokens + served.turn.prompt_tokens
        return Answer(served.turn, self.number, served.first_token_s, now_s, usage)

    def _forget_stateless(self) -> None:
        """Forget conversations without KV cache in periodic sweeps, so that the cost stays small."""
        if not self._sweep.is_due(len(self._sequences)):
            return
        for conversation_id, sequence in list(self._sequences.items()):
            if conversation_id not in self._busy and not sequence.holds_state:
                del self._sequences[conversation_id]
                self.cache.close(sequence)
        self._sweep.done(len(self._sequences))


@functools.lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
