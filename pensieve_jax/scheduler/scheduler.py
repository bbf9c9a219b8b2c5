"""Unified batching: the tokens of each request that the next step computes (the paper's section 4.2).

Owns: the waiting queue and the running batch, both by arrival, the token budget, and suspension. Prefill and
decode are not separate phases: a request misses intervals of tokens, and decode, prompt, recompute and resume
are one case.
Does not know: the device, text, or the layout of a step (`planner`).
Called by the engine loop.

Rules:
- Each running request gets a decode token first. The order of prompts (`prompt_order`) says who gets the
  other tokens of a step, and how many these are.
- Admission and suspension go by arrival.
- A waiting request has *room* if the pool holds its pages beside those of the running requests that arrived
  before it, those that earlier waiting requests still have, and the reserve. The reserve is waived if no
  earlier request runs.
- A request with room joins. If it needs the pages or the places of later arrivals, these are suspended, the
  latest first. Their other pages count as its reserve.
- A request without room is passed: the next ones join if they have room. A step looks at the first
  `MAX_PASSED + 1` waiting requests.
- A request that has room but waits is not passed. It waits for a place in the batch, until the order of
  prompts lets one more join, or for copies in flight.
- So a request is passed only while earlier arrivals leave no room for it. Every request joins in the step in
  which it would join if nothing had arrived after it. What remains is one decode token per step for each
  later request that runs, and the end of copies in flight. The oldest request always has room, so none
  starves.
- The intervals of a request are granted in ascending order. A step grants a later one only if it also ends
  the earlier one.
- A grant inside recomputed history ends on a chunk boundary, so that only the tail chunk is ever partly
  valid.
- Tokens behind a chunk that is being copied in are not granted before the copy is complete.
- In every step the first prompt of the order advances or waits for a copy, and so does the oldest request if
  it waits to be admitted. An order bounds who goes before a prompt, so every prompt becomes the first.
- A decode may carry a draft: tokens that may follow, which the step checks. It takes pages that are free or
  idle, and the draft is shorter where it gets none. Only tokens that hold count, so nothing else ever sees
  the others. No step drafts beside prompts, or while requests wait.
- If batches are not unified (`SchedulerConfig.unified`), decodes pause while other requests have tokens to
  compute.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.config import SchedulerConfig
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.scheduler.buckets import scoring_bucket, token_buckets
from pensieve_jax.scheduler.output import Grant, SchedulerOutput
from pensieve_jax.scheduler.prompt_order import PromptOrder
from pensieve_jax.scheduler.request import Request, RequestStatus

MAX_PASSED: Final = 128
"""The most waiting requests that another one passes. It limits the host time of a step: 1 us for each."""
_arrival = attrgetter("request_id")
_arrival_of_grant = attrgetter("request.request_id")
type Draft = Callable[[Request, int], Sequence[int]]
"""Returns tokens that may follow those of a request, at most so many. All its ids are known."""


class _Step:
    """The step being filled: its grants, and the tokens and rows left beside the decodes.

    Attributes:
      first: the first prompt of the order, if the step considered any.
      served: prompts with a grant.
    """

    __slots__ = ("first", "grants", "num_rows_left", "num_tokens_left", "served")

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self.first: Request | None = None
        self.grants: list[Grant] = []
        self.served: set[Request] = set()
        self.num_tokens_left = num_tokens
        self.num_rows_left = num_rows


class Scheduler:
    """The scheduler of unified batches over one cache.

    Attributes:
      running: requests of the batch, by arrival.
      waiting: new and suspended requests, by arrival.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager, order: PromptOrder) -> None:
        """Start without requests; every `schedule` changes `cache`."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._config = config
        self._cache = cache
        self._order = order
        self._scoring_bucket = scoring_bucket(config, cache.chunk_tokens)
        self._max_num_rows = config.row_limit
        self._max_num_samples = min(config.sample_limit, token_buckets(config)[-1])

    def add(self, request: Request) -> None:
        """Queue a request; from now on only earlier arrivals may evict its conversation's chunks."""
        self._cache.enqueue(request.sequence, request.request_id)
        self._order.on_arrival(request)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, in any status, and unpin its conversation.

        The caller has truncated the sequence to its valid tokens. Its pages can be reallocated at once, since
        steps in flight run before the steps that overwrite them.
        """
        self.retire(request)
        request.status = RequestStatus.FINISHED

    def retire(self, request: Request) -> None:
        """Take a request whose reply is complete out of the batch and unpin its conversation.

        The caller has truncated the sequence to its valid tokens, and calls `remove` later.
        """
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        if request.status is not RequestStatus.FINISHING:
            self._cache.release(request.sequence)
        request.status = RequestStatus.FINISHING

    def take_back_sample(self, request: Request) -> None:
        """Make the next step repeat what the last scheduled one samples for a running request.

        It also repeats the token before, since the logits are not kept.
        """
        assert request.status is RequestStatus.RUNNING and request.token_ids[-1] == PENDING_TOKEN
        request.token_ids.pop()
        self._cache.truncate(request.sequence, len(request.token_ids) - 1)
        request.is_decoding = _is_decode(request)

    def accept(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        """Replace the placeholder at `position` by the ids that a step sampled from there on.

        All but the last one are a draft that holds: the step has computed their KV.
        """
        assert request.token_ids[position] == PENDING_TOKEN, f"position {position} was sampled twice"
        request.token_ids[position : position + 1] = token_ids
        if len(token_ids) > 1:
            assert len(request.token_ids) == position + len(token_ids), "a step was scheduled before"
            assert request.status is RequestStatus.RUNNING
            self._cache.fill(request.sequence, position, position + len(token_ids) - 1)

    def check_integrity(self) -> None:
        """Assert that the running requests are in order of arrival, and so are the waiting ones."""
        for requests in (self.running, self.waiting):
            arrivals = [request.request_id for request in requests]
            assert arrivals == sorted(arrivals), f"requests out of order: {arrivals}"
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert all(_is_decode(r) for r in self.running if r.is_decoding), (
            "a decoding request misses more than one token"
        )
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)

    def schedule(self, draft: Draft | None = None) -> SchedulerOutput:
        """Decide the next step. This changes host state only; the caller must dispatch the grants.

        All token ids except those of the last dispatched step must be known. With `draft`, these must be
        known, too. If the step has drafts, `accept` must be called before the next one is scheduled.
        """
        self._cache.begin_step()
        self._retire_exhausted()
        suspended = self._make_room()
        admitted = self._admit(suspended)
        step = self._grant_running(draft, with_decodes=self._config.unified)
        if not self._config.unified and not step.grants:
            step = self._grant_running(draft, with_decodes=True)
        self._cache.end_step()
        expedited: tuple[int, ...] = ()
        if not step.grants:  # after `end_step`, so that nothing in this pass takes the slots of these copies
            expedited, step = self._expedite()
        self._check_liveness(step)
        swap_outs, swap_ins = self._cache.take_copies()
        return SchedulerOutput(
            grants=tuple(step.grants),
            num_tokens=sum([grant.end - grant.start for grant in step.grants]),
            admitted=tuple(admitted),
            suspended=tuple(suspended),
            drops=self._cache.take_drops(),
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            expedited=expedited,
        )

    def _check_liveness(self, step: _Step) -> None:
        """Assert that neither the oldest request nor the first prompt of the order is stuck."""
        oldest = min((*self.running[:1], *self.waiting[:1]), key=_arrival, default=None)
        if oldest is None:
            return
        has_grant = bool(step.grants) and step.grants[0].request is oldest
        if not has_grant and not self._may_pause(oldest, step):
            assert self._cache.blocking_copies(oldest.sequence), "the oldest request is stuck"
        first = step.first
        if first is not None and first not in step.served:
            assert self._cache.blocking_copies(first.sequence), "the first prompt is stuck"

    def _may_pause(self, oldest: Request, step: _Step) -> bool:
        """Return whether this step may pass over the oldest request, which then waits for no copy.

        A prompt pauses for prompts before it in the order. A decode pauses for all prompts if batches are not
        unified.
        """
        if oldest.status is RequestStatus.WAITING:
            return False
        if _is_decode(oldest):
            return bool(step.grants) and not self._config.unified
        return self._order.arrange((oldest, *step.served))[0] is not oldest

    def _retire_exhausted(self) -> None:
        """Unpin requests whose last token was granted, so that a stop by length launches no extra step."""
        exhausted = [r for r in self.running if len(r.token_ids) >= r.max_total_tokens]
        for request in exhausted:
            request.status = RequestStatus.FINISHING
            self._cache.release(request.sequence)
        if exhausted:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]

    def _make_room(self) -> list[Request]:
        """Reserve a page for every running request's next token; suspends the latest arrivals if needed."""
        suspended: list[Request] = []
        chunk_tokens = self._cache.chunk_tokens
        full = [r for r in self.running if len(r.token_ids) > len(r.sequence.chunks) * chunk_tokens]
        for request in full:
            while request.status is RequestStatus.RUNNING and not self._cache.grow(
                request.sequence, len(request.token_ids), latest_arrival=self.running[-1].request_id
            ):
                suspended.append(self._suspend_latest())
        return suspended

    def _suspend_latest(self) -> Request:
        request = self.running.pop()
        request.status = RequestStatus.WAITING
        # No `skip_filled` is needed: the last step skipped filled holes, and requests after this one in the
        # order cannot fill a hole of a shared prefix for which this one had no tokens left.
        request.on_suspended()
        self._cache.suspend(request.sequence)
        bisect.insort(self.waiting, request, key=_arrival)
        return request

    def _admit(self, suspended: list[Request]) -> list[Request]:
        """Admit the waiting requests that have room, by arrival; see the rules at the top.

        Requests that give way are added to `suspended`. Nothing that arrived after one of these is admitted
        in this step, so that pages that were just taken are not offered again.
        """
        admitted: list[Request] = []
        for request, num_earlier in self.candidates():
            if suspended and request.request_id >= suspended[-1].request_id:
                break
            if self._cache.is_departing(request.sequence):
                break
            while not self._try_admit(request, num_earlier):
                if len(self.running) == num_earlier:
                    return admitted  # the pages that it lacks are being copied to
                suspended.append(self._suspend_latest())
            admitted.append(request)
        return admitted

    def candidates(self) -> Iterator[tuple[Request, int]]:
        """Yield the waiting requests with room, by arrival, and the number of running ones before them.

        Each must be admitted before the next is asked for. Without one, the next step admits none.
        """
        if not self.waiting:
            return
        chunk_tokens, unified = self._cache.chunk_tokens, self._config.unified
        pages = self._cache.earlier_pages()
        num_earlier = num_prompts = num_tokens = num_rows = 0
        for request in self.waiting[: MAX_PASSED + 1]:
            if num_earlier < len(self.running):
                first = num_earlier
                num_earlier = bisect.bisect(self.running, request.request_id, first, key=_arrival)
                if num_earlier >= self._config.running_limit:
                    return
                earlier = self.running[first:num_earlier]
                pages.add_running(*[one.sequence for one in earlier])
                others = _non_decodes(earlier)
                num_prompts += len(others)
                if unified:
                    num_tokens += len(earlier) - len(others)
                    num_rows += len(earlier) - len(others)
                for one in others:
                    more_tokens, more_rows = one.num_missing(chunk_tokens)
                    num_tokens, num_rows = num_tokens + more_tokens, num_rows + more_rows
            if self._order.is_enough(num_prompts, num_tokens, num_rows):
                return
            if pages.leave_room(request.sequence, len(request.token_ids)):
                yield request, num_earlier
            else:
                pages.add_queued(request.sequence)

    def _try_admit(self, request: Request, num_earlier: int) -> bool:
        """Admit a request with room behind `num_earlier` running ones, if pages and a place are there.

        While later arrivals run, the reserve is waived: pages that they would give up may be part of it.
        """
        has_later = len(self.running) > num_earlier
        if len(self.running) >= self._config.running_limit or not self._cache.try_admit(
            request.sequence,
            len(request.token_ids),
            waive_reserve=has_later or not num_earlier,
            latest_arrival=self.running[-1].request_id if has_later else -1,
        ):
            return False
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.on_admitted(self._cache.chunk_tokens)
        self._order.on_decoding(request)  # a resumed one may miss its last token only
        self.running.insert(num_earlier, request)
        return True

    def _grant_running(self, draft: Draft | None, *, with_decodes: bool) -> _Step:
        """Fill a step: a token for each decode, and what is left for the others, in their order."""
        others = dict.fromkeys(_non_decodes(self.running))
        num_decodes = len(self.running) - len(others) if with_decodes else 0
        prompts = self._order.arrange(tuple(others))
        step = self._begin_step(num_decodes, prompts)
        grants = step.grants
        self._grant_prompts(step, prompts)
        num_drafts_left = self._max_num_samples - num_decodes if not (others or self.waiting) else 0
        decoding: list[CachedSequence] = []
        for request in self.running if num_decodes else ():
            if request not in others:
                end = len(request.token_ids)
                drafted: tuple[int, ...] = ()
                if draft is not None and num_drafts_left > 0:
                    drafted = self._drafted(draft, request, num_drafts_left)
                    num_drafts_left -= len(drafted)
                grants.append(Grant(request, end - 1, end + len(drafted), True, drafted))
                decoding.append(request.sequence)
                self._await_token(request)
        self._cache.fill_next(decoding)
        if others:
            grants.sort(key=_arrival_of_grant)  # rows stand by arrival in every order
        return step

    def _drafted(self, draft: Draft, request: Request, limit: int) -> tuple[int, ...]:
        """Return a request's draft, and reserve the pages of its tokens as far as there are any."""
        num_tokens = len(request.token_ids)
        assert request.token_ids[-1] != PENDING_TOKEN, "a draft follows an id that is not known"
        drafted = draft(request, min(limit, request.max_total_tokens - num_tokens - 1))
        if not drafted:
            return ()
        sequence = request.sequence
        self._cache.grow(sequence, num_tokens + len(drafted), latest_arrival=self.running[-1].request_id)
        return tuple(drafted[: len(sequence.chunks) * self._cache.chunk_tokens - num_tokens])

    def _begin_step(self, num_decodes: int, prompts: Sequence[Request]) -> _Step:
        """Make an empty step for prompts in their order, with tokens and rows set aside for decodes."""
        if any(request.is_scoring for request in prompts):
            return _Step(self._scoring_bucket - num_decodes, self._max_num_rows - num_decodes)
        limit = self._order.step_limit(num_decodes, prompts, running=self.running, waiting=self.waiting)
        return _Step(limit - num_decodes, self._max_num_rows - num_decodes)

    def _expedite(self) -> tuple[tuple[int, ...], _Step]:
        """Fill a step that waits for the copies of the first prompt, when no request can compute."""
        prompts = self._order.arrange(self.running)[:1]
        expedited = self._cache.expedite(prompts[0].sequence) if prompts else ()
        if not expedited:
            prompts = ()
        step = self._begin_step(0, prompts)
        self._grant_prompts(step, prompts)
        return expedited, step

    def _grant_prompts(self, step: _Step, prompts: Sequence[Request]) -> None:
        """Grant the missing tokens of prompts in this order."""
        step.first = prompts[0] if prompts else None
        for request in prompts:
            self._grant_missing(step, request)

    def _grant_missing(self, step: _Step, request: Request) -> None:
        """Grant a request's missing tokens as far as the step's remaining tokens and rows allow."""
        chunk_tokens, sequence = self._cache.chunk_tokens, request.sequence
        request.skip_filled(chunk_tokens)
        holes, limit = request.holes, request.reach(chunk_tokens)
        while holes and step.num_rows_left > 0:
            start, hole_end = holes[0]
            end = min(hole_end, limit)
            if end - start > step.num_tokens_left:
                end = (start + step.num_tokens_left) // chunk_tokens * chunk_tokens
            if end <= start:
                return
            self._grant(step, request, start, end)
            if end < hole_end:
                holes[0] = (end, hole_end)
                return
            holes.pop(0)
            request.skip_filled(chunk_tokens)
        start = sequence.num_kv_tokens
        end = min(limit, start + step.num_tokens_left)
        if not holes and step.num_rows_left > 0 and end > start:
            self._grant(step, request, start, end)

    def _grant(self, step: _Step, request: Request, start: int, end: int) -> None:
        samples = end == len(request.token_ids)
        step.grants.append(Grant(request, start, end, samples))
        step.served.add(request)
        step.num_tokens_left -= end - start
        step.num_rows_left -= 1
        self._cache.fill(request.sequence, start, end)
        if samples:
            self._order.on_decoding(request)
            self._await_token(request)

    @staticmethod
    def _await_token(request: Request) -> None:
        """Append a placeholder for the token being sampled, the only one that the request now misses."""
        request.token_ids.append(PENDING_TOKEN)
        request.is_decoding = True


def _non_decodes(requests: Iterable[Request]) -> list[Request]:
    """Return the running requests that are not decodes."""
    return [request for request in requests if not (request.is_decoding or _is_decode(request))]


def _is_decode(request: Request) -> bool:
    """Return whether a request misses only its last token and waits for no copy."""
    sequence = request.sequence
    is_last = len(request.token_ids) == sequence.num_kv_tokens + 1
    return is_last and not request.holes and sequence.first_arriving is None
