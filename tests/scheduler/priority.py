"""The rule of admission, checked from outside after a step was decided, with page counts of its own."""

from __future__ import annotations

from collections import Counter

from pensieve_jax.cache import CacheManager, EvictionClass
from pensieve_jax.scheduler import Request, Scheduler, SchedulerOutput
from pensieve_jax.scheduler.scheduler import MAX_PASSED


def check_priority(scheduler: Scheduler, cache: CacheManager, output: SchedulerOutput) -> None:
    """Assert that no request waits that has room beside earlier arrivals, while a later arrival runs."""
    suspended = min((request.request_id for request in output.suspended), default=None)
    num_granted = Counter[Request]()
    for grant in output.grants:
        num_granted[grant.request] += grant.end - grant.start
    for rank, waiting in enumerate(scheduler.waiting[: MAX_PASSED + 1]):
        if not any(running.request_id > waiting.request_id for running in scheduler.running):
            return
        if suspended is not None and waiting.request_id >= suspended:
            return  # it is tried in the next step
        earlier = [running for running in scheduler.running if running.request_id < waiting.request_id]
        if not all(running.is_decoding and num_granted[running] <= 1 for running in earlier):
            return  # the step may have been full, or seemed to be: a hole that two share counts for both
        if _has_room(scheduler, cache, waiting, earlier, scheduler.waiting[:rank]):
            assert any(own.num_by_class[EvictionClass.DEPARTING] for own in waiting.sequence.lineage()), (
                f"request {waiting.request_id} has room, but later arrivals run"
            )
            return


def _has_room(
    scheduler: Scheduler,
    cache: CacheManager,
    waiting: Request,
    earlier: list[Request],
    passed: list[Request],
) -> bool:
    """Return whether a request's chunks fit beside those of earlier requests, each chunk counted once."""
    chunks = {id(chunk) for request in (waiting, *earlier) for chunk in request.sequence.chunks}
    sequence = waiting.sequence
    num_new = max(-(-len(waiting.token_ids) // cache.chunk_tokens) - len(sequence.chunks), 0)
    num_kept = sum(
        chunk.page != 0 for one in passed for chunk in one.sequence.chunks[one.sequence.num_shared :]
    )
    num_pages = cache.stats()["num_gpu_pages"] - (cache._reserve_pages if earlier else 0)
    has_place = len(earlier) < scheduler._config.running_limit
    return has_place and len(chunks) + num_new + num_kept <= num_pages
