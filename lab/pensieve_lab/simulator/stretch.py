"""Steps that need no scheduler: everybody running decodes one token, and nobody joins, leaves or gives way.

Owns: what such a step changes, without looking at every request. The cache is asked for the few that begin a
page and, as in every step, for copies ahead of time; all lengths are brought up to date at the end.
Does not know: devices, transfers, or time.
That its steps are the scheduler's own is what `lab/tests/simulator/test_stretch.py` shows.

A stretch begins after a step in which every running request sampled a token that is not its last. It goes on
as long as the oldest waiting request cannot join and there are pages for all that begin one, both of which is
said only when it is certain. Its last step is the one that grants some request's last token.
"""

from __future__ import annotations

from pensieve_jax.cache import CacheManager, EvictionClass
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.scheduler import Grant, Request, Scheduler, SchedulerOutput
from pensieve_lab.simulator.step_time import StepLoad

_WITH_PAGE = (EvictionClass.DIRTY, EvictionClass.CLEAN, EvictionClass.ARRIVING)


class DecodeRun:
    """A stretch in progress.

    While it lasts, requests and sequences are as they were when it began; `end` makes good for it.

    Attributes:
      running: the requests, by arrival.
      load: what the next step computes.
      num_steps: steps done.
      num_steps_left: steps until one has granted a request's last token.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, cache: CacheManager) -> None:
        """Every running request misses its last token alone."""
        self.running = tuple(scheduler.running)
        self._config = config
        self._scheduler = scheduler
        self._cache = cache
        chunk_tokens = cache.chunk_tokens
        self._beginners: list[list[tuple[Request, int]]] = [[] for _ in range(chunk_tokens)]
        self.load = StepLoad()
        self.num_steps = 0
        left = []
        for request in self.running:
            num_tokens = len(request.token_ids)
            self.load.add(1, num_tokens)
            left.append(request.max_total_tokens - num_tokens)
            room = len(request.sequence.chunks) * chunk_tokens - num_tokens
            self._beginners[room + 1].append((request, num_tokens))
        self.num_steps_left = min(left)

    def can_go_on(self) -> bool:
        """The scheduler's next step would be the stretch's."""
        if not self.num_steps_left or not is_blocked(self._config, self._scheduler, self._cache):
            return False
        num_pages = len(self._beginners[self.num_steps % self._cache.chunk_tokens])
        return not num_pages or num_pages <= self._cache.num_available()

    def step(self, *, with_grants: bool) -> SchedulerOutput | None:
        """What the scheduler would do now and answer; without its grants unless they are asked for.

        None stands for an answer with nothing but grants.
        """
        cache, done = self._cache, self.num_steps
        cache.begin_step()
        beginners = self._beginners[done % cache.chunk_tokens]
        for request, num_tokens in beginners:
            if not cache.grow(request.sequence, num_tokens + done):
                raise AssertionError("available pages were miscounted")
        for request, num_tokens in beginners:
            cache.fill(request.sequence, num_tokens + done - 1, num_tokens + done)
        cache.end_step()
        self.num_steps += 1
        self.num_steps_left -= 1
        (swap_outs, swap_ins), drops = cache.take_copies(), cache.take_drops()
        if not (swap_outs or swap_ins or drops or with_grants):
            return None
        return SchedulerOutput(
            grants=self._grants(done) if with_grants else (),
            num_tokens=len(self.running),
            admitted=(),
            suspended=(),
            drops=drops,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            expedited=(),
        )

    def last(self) -> list[Request]:
        """The requests whose last token the latest step granted."""
        if self.num_steps_left:
            return []
        return [r for r in self.running if len(r.token_ids) + self.num_steps == r.max_total_tokens]

    def end(self) -> None:
        """Bring every request up to date; nobody reads the ids."""
        if not self.num_steps:
            return
        for request in self.running:
            request.token_ids += [PENDING_TOKEN] * self.num_steps
            num_tokens = len(request.token_ids)
            self._cache.fill(request.sequence, num_tokens - 2, num_tokens - 1)

    def _grants(self, done: int) -> tuple[Grant, ...]:
        return tuple(
            Grant(request, len(request.token_ids) + done - 1, len(request.token_ids) + done, True)
            for request in self.running
        )


def is_blocked(config: EngineConfig, scheduler: Scheduler, cache: CacheManager) -> bool:
    """Certainly nobody can join the running requests in the next step.

    Pages that the step takes only make it harder, so what is short now is short then.
    """
    if not scheduler.waiting or len(scheduler.running) >= config.scheduler.max_num_running:
        return True
    request = scheduler.waiting[0]
    sequence = request.sequence
    if sequence.num_by_class[EvictionClass.DEPARTING]:
        return True
    num_chunks = max(-(-len(request.token_ids) // cache.chunk_tokens), len(sequence.chunks))
    num_needed = num_chunks - sum(sequence.num_by_class[eviction_class] for eviction_class in _WITH_PAGE)
    return cache.num_available(sequence) - num_needed < config.cache.reserve_pages
