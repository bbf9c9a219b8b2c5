"""Decode runs: steps in which every running request decodes one token and no request joins, leaves or yields.

Owns: the effects of such a step without visiting every request. The cache is asked for pages of the few
requests that begin one and, as in every step, for copies ahead of time; all lengths are updated at the end.
Does not know: devices, transfers, or time.
`lab/tests/simulator/test_decode_run.py` shows that these steps equal the scheduler's.

A run begins after a step in which every running request sampled a token that is not its last and no waiting
request has room. It continues until a request arrives that has room, or pages may be missing for the requests
that begin one: the pages that its steps take make no room. Its last step is the one that grants some
request's last token.
"""

from __future__ import annotations

from pensieve_jax.cache import CacheManager
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.scheduler import Grant, Request, Scheduler, SchedulerOutput
from pensieve_lab.simulator.step_time import StepLoad


class DecodeRun:
    """Decode run in progress.

    Requests and sequences keep their state from its beginning until `end` updates them.

    Attributes:
      running: requests by arrival.
      load: load of the next step.
      num_steps: steps done.
      num_steps_left: steps until one grants a request's last token.
    """

    def __init__(self, scheduler: Scheduler, cache: CacheManager) -> None:
        """Start a run. No waiting request has room, and running ones lack the KV of only their last token."""
        self.running = tuple(scheduler.running)
        self._scheduler = scheduler
        self._num_waiting = len(scheduler.waiting)
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
        """Return whether the scheduler's next step would be a step of this run."""
        if not self.num_steps_left:
            return False
        if len(self._scheduler.waiting) != self._num_waiting:
            if next(self._scheduler.candidates(), None) is not None:
                return False
            self._num_waiting = len(self._scheduler.waiting)
        num_pages = len(self._beginners[self.num_steps % self._cache.chunk_tokens])
        return not num_pages or num_pages <= self._cache.num_available(self.running[-1].sequence)

    def step(self, *, with_grants: bool) -> SchedulerOutput | None:
        """Do the scheduler's next step; return its output, with grants only if asked for.

        None stands for an output with nothing but grants.
        """
        cache, done = self._cache, self.num_steps
        cache.begin_step()
        beginners = self._beginners[done % cache.chunk_tokens]
        for request, num_tokens in beginners:
            if not cache.grow(
                request.sequence, num_tokens + done, latest_arrival=self.running[-1].request_id
            ):
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
        """Return the requests whose last token the latest step granted."""
        if self.num_steps_left:
            return []
        return [r for r in self.running if len(r.token_ids) + self.num_steps == r.max_total_tokens]

    def end(self) -> None:
        """Update every request with placeholder ids, which are never read."""
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
