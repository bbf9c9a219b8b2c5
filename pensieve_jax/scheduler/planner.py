"""From a scheduler's decision to the packed arrays of a step, shared by all layers.

Owns: the layout of a ragged batch: token ids, positions, write slots, page lists, the rows to sample.
Does not know: how grants came about, or what a device does with the plan. The attention kernel's tile
list is made by its own builder, which the runner brings.

Everything per token is vectorized; what is per row is a few list operations, since a step of 256 rows
must be planned in well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.scheduler.buckets import bucket_for
from pensieve_jax.scheduler.output import SchedulerOutput
from pensieve_jax.scheduler.plan import (
    FLAG_LOGPROBS,
    FLAG_SAMPLES,
    FLAG_TRUNCATES,
    PlanLayout,
    StepPlan,
)
from pensieve_jax.scheduler.request import Request


class Planner:
    """Makes one `StepPlan` after another."""

    def __init__(
        self,
        layouts: Mapping[int, PlanLayout],
        fill_tiles: Callable[[StepPlan], None],
        *,
        chunk_tokens: int,
        num_device_pages: int,
    ) -> None:
        """`layouts` by bucket; `fill_tiles` writes `plan.tiles` from the rows' lengths.

        `num_device_pages` counts the dummy page: slots from there on are out of bounds, and dropped.
        """
        self._layouts = layouts
        self._buckets = tuple(sorted(layouts))
        self._fill_tiles = fill_tiles
        self._chunk_tokens = chunk_tokens
        self._padding_slot = num_device_pages * chunk_tokens
        self._num_plans = 0

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of one step with at least one grant.

        Reads each request's `sample_row`, which must be of the step dispatched just before, and sets it
        anew for the rows that sample.
        """
        layout = self._layouts[bucket_for(self._buckets, output.num_tokens)]
        plan = StepPlan(layout, self._num_plans, self._padding_slot)
        self._num_plans += 1
        self._fill_rows(plan, output)
        self._fill_samples(plan, [(i, g.request) for i, g in enumerate(output.grants) if g.samples])
        self._fill_tiles(plan)
        return plan

    def _fill_rows(self, plan: StepPlan, output: SchedulerOutput) -> None:
        grants, num_tokens, num_rows = output.grants, output.num_tokens, len(output.grants)
        chunk_tokens = self._chunk_tokens
        starts = np.fromiter((g.start for g in grants), np.int32, num_rows)
        ends = np.fromiter((g.end for g in grants), np.int32, num_rows)
        q_lens = ends - starts
        plan.num_rows[0] = num_rows
        np.cumsum(q_lens, out=plan.cu_q_lens[1 : num_rows + 1])
        plan.cu_q_lens[num_rows + 1 :] = num_tokens
        plan.kv_lens[:num_rows] = ends

        page_indices = plan.page_indices
        token_ids: list[int] = []
        for i, (request, start, end, _) in enumerate(grants):
            num_chunks = -(-end // chunk_tokens)
            page_indices[i, :num_chunks] = request.sequence.page_row[:num_chunks]
            if end - start == 1:
                token_ids.append(request.token_ids[start])
            else:
                token_ids += request.token_ids[start:end]

        row_of_token = np.repeat(np.arange(num_rows, dtype=np.int32), q_lens)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - plan.cu_q_lens[:num_rows])[row_of_token]
        plan.positions[:num_tokens] = positions
        pages = page_indices[row_of_token, positions // chunk_tokens]
        plan.write_slots[:num_tokens] = pages * chunk_tokens + positions % chunk_tokens

        ids = np.array(token_ids, np.int32)
        pending = np.flatnonzero(ids == PENDING_TOKEN)
        if len(pending):
            rows = [grants[row].request.sample_row for row in row_of_token[pending]]
            plan.prev_samples[pending] = rows
            ids[pending] = 0
        plan.token_ids[:num_tokens] = ids

    def _fill_samples(self, plan: StepPlan, sampling: list[tuple[int, Request]]) -> None:
        num_samples = len(sampling)
        plan.num_samples[0] = num_samples
        if not num_samples:
            return
        rows = np.fromiter((row for row, _ in sampling), np.int32, num_samples)
        requests = [request for _, request in sampling]
        params = [request.params for request in requests]
        plan.sample_tokens[:num_samples] = plan.cu_q_lens[rows + 1] - 1
        plan.sample_positions[:num_samples] = plan.kv_lens[rows]
        plan.temperature[:num_samples] = [p.temperature for p in params]
        plan.top_k[:num_samples] = [p.top_k for p in params]
        plan.top_p[:num_samples] = [p.top_p for p in params]
        seeds = np.array([request.seed for request in requests], np.uint64)
        plan.seed[:num_samples, 0] = seeds & np.uint64(0xFFFFFFFF)
        plan.seed[:num_samples, 1] = seeds >> np.uint64(32)
        for sample_row, request in enumerate(requests):
            request.sample_row = sample_row
            if request.bans_ending:
                plan.banned_ids[sample_row, : len(request.ending_ids)] = request.ending_ids
        live = plan.temperature[:num_samples] > 0
        plan.flags[FLAG_SAMPLES] = live.any()
        truncates = (plan.top_k[:num_samples] > 0) | (plan.top_p[:num_samples] < 1)
        plan.flags[FLAG_TRUNCATES] = (live & truncates).any()
        plan.flags[FLAG_LOGPROBS] = any(p.logprobs for p in params)
