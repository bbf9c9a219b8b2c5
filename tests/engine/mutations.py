"""Bugs to plant, one per function: each takes a monkeypatch and breaks one class with a plausible error.

These need one tier only; `tier_mutations` has those around the second.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pensieve_jax.cache import (
    CachedSequence,
    CacheManager,
    ChunkState,
    DropReason,
    EvictionClass,
    Role,
    TierPool,
)
from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.evictor import Evictor
from pensieve_jax.core.conversation import PENDING_TOKEN, Conversation
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.ledger import TurnLedger
from pensieve_jax.engine.turn import ReplyState
from pensieve_jax.scheduler import Planner, Request, Scheduler, StepPlan

Mutation = Callable[[pytest.MonkeyPatch], None]


def _after_plan(spoil: Callable[[StepPlan, int], None]) -> Mutation:
    """Corrupt every plan that has a row; `spoil` gets the plan and its last row."""

    def mutation(patch: pytest.MonkeyPatch) -> None:
        make = Planner.plan

        def plan(self, output):
            made = make(self, output)
            spoil(made, int(made.num_rows[0]) - 1)
            return made

        patch.setattr(Planner, "plan", plan)

    return mutation


def _swap_pages(plan: StepPlan, row: int) -> None:
    plan.page_indices[row, :2] = plan.page_indices[row, 1::-1]


def _shift_last_slot(plan: StepPlan, row: int) -> None:
    plan.write_slots[plan.cu_q_lens[row + 1] - 1] += 1


def _rotate_previous_samples(plan: StepPlan, row: int) -> None:
    of_previous = plan.prev_samples >= 0
    plan.prev_samples[of_previous] = plan.prev_samples[of_previous][::-1]


def _shift_last_position(plan: StepPlan, row: int) -> None:
    plan.positions[plan.cu_q_lens[row + 1] - 1] += 1


def _shorten_kv_len(plan: StepPlan, row: int) -> None:
    plan.kv_lens[row] = max(plan.kv_lens[row] - 1, plan.cu_q_lens[row + 1] - plan.cu_q_lens[row])


def _shift_sample_positions(plan: StepPlan, row: int) -> None:
    plan.sample_positions += 1


def fill_counts_the_whole_chunk(patch):
    fill = CacheManager.fill

    def filled(self, sequence, start, end):
        fill(self, sequence, start, end)
        end_of_chunk = -(-end // self.chunk_tokens) * self.chunk_tokens
        sequence.num_kv_tokens = max(sequence.num_kv_tokens, end_of_chunk)

    patch.setattr(CacheManager, "fill", filled)


def fill_marks_the_next_chunk(patch):
    fill = CacheManager.fill

    def filled(self, sequence, start, end):
        num_kv_tokens = sequence.num_kv_tokens
        num_tokens = len(sequence.chunks) * self.chunk_tokens
        fill(self, sequence, start, min(end + self.chunk_tokens, num_tokens))
        sequence.num_kv_tokens = max(num_kv_tokens, end)

    patch.setattr(CacheManager, "fill", filled)


def stale_tail(patch):
    settle = TurnLedger._settle

    def settled(self, turn, *rest):
        settle(self, turn, *rest)
        sequence = turn.request.sequence
        if sequence.num_kv_tokens % self._loop.cache.chunk_tokens:
            sequence.num_kv_tokens += 1

    patch.setattr(TurnLedger, "_settle", settled)


def skipped_hole(patch):
    on_admitted = Request.on_admitted

    def admitted(self, chunk_tokens):
        on_admitted(self, chunk_tokens)
        del self.holes[:1]

    patch.setattr(Request, "on_admitted", admitted)


def lost_pin(patch):
    free_page = Evictor._free_page

    def freed(self, arrival):
        for sequence in self._store.members[Role.RUNNING]:
            if sequence.num_by_class[EvictionClass.DIRTY] and sequence.arrival != arrival:
                self._store.drop(
                    sequence, sequence.first_of(EvictionClass.DIRTY), DropReason.NO_HOST_MEMORY, None
                )
                return True
        return free_page(self, arrival)

    patch.setattr(Evictor, "_free_page", freed)


def page_freed_twice(patch):
    free = TierPool.free

    def freed(self, page):
        free(self, page)
        self._free.append(page)

    patch.setattr(TierPool, "free", freed)


def overrun_token_kept(patch):
    accept = ReplyState.accept

    def accepted(self, *args):
        reason = accept(self, *args)
        if reason == "stop" and not self.request.exhausted and not hasattr(self, "stopped"):
            self.stopped = True
            return None
        return "stop" if hasattr(self, "stopped") else reason

    patch.setattr(ReplyState, "accept", accepted)


def _truncate_otherwise(patch, owner, name, change):
    """During `owner.name`, pass `change(number of tokens)` to the cache's truncate instead."""
    method, truncate, inside = getattr(owner, name), CacheManager.truncate, []

    def changed_truncate(self, sequence, num_tokens):
        truncate(self, sequence, change(num_tokens) if inside else num_tokens)

    def changed_method(self, *args, **options):
        inside.append(True)
        try:
            return method(self, *args, **options)
        finally:
            inside.pop()

    patch.setattr(CacheManager, "truncate", changed_truncate)
    patch.setattr(owner, name, changed_method)


def cancel_keeps_one_entry(patch):
    _truncate_otherwise(patch, TurnLedger, "_roll_back", lambda num_tokens: num_tokens + 1)


def truncate_keeps_kv(patch):
    _truncate_otherwise(patch, ConversationTable, "truncate", lambda num_tokens: 1 << 30)


def replaced_kv_is_kept(patch):
    """Keep the KV of the tokens that a turn replaces, as if they were those of its prompt."""
    _truncate_otherwise(patch, ConversationTable, "replace_from", lambda num_tokens: 1 << 30)


def cancel_keeps_the_kv_of_a_replacement(patch):
    """Count the KV of a cancelled turn's prompt as that of the tokens that it had replaced."""
    rollback = Conversation.rollback
    replaced: list[int] = []

    def rolled_back(self):
        replaced[:] = [len(self.replaced)]
        rollback(self)

    patch.setattr(Conversation, "rollback", rolled_back)
    _truncate_otherwise(patch, TurnLedger, "_roll_back", lambda num_tokens: num_tokens + replaced[0])


def a_cancelled_turn_keeps_its_replacement(patch):
    """Forget the tokens that a cancelled turn would have replaced."""
    rollback = Conversation.rollback

    def rolled_back(self):
        self.replaced = []
        rollback(self)

    patch.setattr(Conversation, "rollback", rolled_back)


def drop_without_marking(patch):
    drop = ChunkStore.drop

    def dropped(self, sequence, index, reason, worth):
        page = sequence.chunks[index].page
        if page:
            self.pages.free(page)
        else:
            drop(self, sequence, index, reason, worth)

    patch.setattr(ChunkStore, "drop", dropped)


class _ChunksOfOne:
    """A cache that reports a chunk size of one token."""

    chunk_tokens = 1

    def __init__(self, cache):
        self._cache = cache

    def __getattr__(self, name):
        return getattr(self._cache, name)


def hole_cut_anywhere(patch):
    grant_missing = Scheduler._grant_missing

    def granted(self, *args, **kwargs):
        cache, self._cache = self._cache, _ChunksOfOne(self._cache)
        try:
            grant_missing(self, *args, **kwargs)
        finally:
            self._cache = cache

    patch.setattr(Scheduler, "_grant_missing", granted)


def holes_without_the_last_chunk(patch):
    holes = CachedSequence.holes

    def shortened(self, chunk_tokens):
        return [
            (start, end - chunk_tokens)
            for start, end in holes(self, chunk_tokens)
            if end - start > chunk_tokens
        ]

    patch.setattr(CachedSequence, "holes", shortened)


def suspended_token_forgotten(patch):
    suspend = Scheduler._suspend_latest

    def suspended(self):
        request = suspend(self)
        if request.token_ids[-1] == PENDING_TOKEN:
            request.token_ids[-1] = 0
        return request

    patch.setattr(Scheduler, "_suspend_latest", suspended)


def lost_pools_still_count(patch):
    lose_page = ChunkStore._lose_page

    def lost(self, sequence, index):
        if sequence.chunks[index].state is not ChunkState.ON_GPU:
            lose_page(self, sequence, index)

    patch.setattr(ChunkStore, "_lose_page", lost)


def ending_id_allowed_too_early(patch):
    init = Request.__init__

    def initialized(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.num_unending -= 1

    patch.setattr(Request, "__init__", initialized)


def later_arrivals_keep_their_pages(patch):
    """Let requests pass one that lacks pages without a bound: they do not give way when it has room."""

    def admitted(self, suspended):
        found = []
        for request, num_earlier in self.candidates():
            if suspended:
                break
            if self._try_admit(request, num_earlier):
                found.append(request)
        return found

    patch.setattr(Scheduler, "_admit", admitted)


def by_name(*mutations: Mutation) -> dict[str, Mutation]:
    """Return planted bugs by the words of their functions' names."""
    return {mutation.__name__.replace("_", " "): mutation for mutation in mutations}


MUTATIONS: dict[str, Mutation] = {
    "wrong page in a row": _after_plan(_swap_pages),
    "write slot off by one": _after_plan(_shift_last_slot),
    "row of the previous samples wrong": _after_plan(_rotate_previous_samples),
    "position off by one": _after_plan(_shift_last_position),
    "kv_len one short": _after_plan(_shorten_kv_len),
    "sample position off by one": _after_plan(_shift_sample_positions),
    **by_name(
        fill_counts_the_whole_chunk,
        fill_marks_the_next_chunk,
        stale_tail,
        skipped_hole,
        holes_without_the_last_chunk,
        lost_pin,
        page_freed_twice,
        drop_without_marking,
        hole_cut_anywhere,
        overrun_token_kept,
        cancel_keeps_one_entry,
        truncate_keeps_kv,
        replaced_kv_is_kept,
        cancel_keeps_the_kv_of_a_replacement,
        a_cancelled_turn_keeps_its_replacement,
        suspended_token_forgotten,
        lost_pools_still_count,
        ending_id_allowed_too_early,
        later_arrivals_keep_their_pages,
    ),
}
