"""Conversion of a scheduler's decision to the packed arrays of a step, which all layers share.

Owns: the content of a ragged batch: token ids, positions, write slots, page lists, and the rows to sample.
Does not know: how grants are chosen, or how a device uses the plan. The attention kernel's own builder, which
the runner supplies, makes the tile list.
Called by `Engine`.

Work per token is vectorized, and work per row is a few list operations, because planning a step of 256 rows
must take well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

import numpy as np

from pensieve_jax.cache import PageTable
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.decoding.adjustments import Adjustment, no_bias, not_counted
from pensieve_jax.decoding.prompt_rows import PromptRows
from pensieve_jax.decoding.sampling_rows import COLUMNS, SAMPLING, truncates
from pensieve_jax.scheduler.buckets import bucket_for
from pensieve_jax.scheduler.count_slots import CountSlots
from pensieve_jax.scheduler.output import SchedulerOutput
from pensieve_jax.scheduler.plan import FLAG_LOGPROBS, FLAG_SAMPLES, FLAG_TRUNCATES, PlanLayout, StepPlan
from pensieve_jax.scheduler.request import Request


class _Rows(NamedTuple):
    """A step's grants as columns."""

    requests: tuple[Request, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    samples: tuple[bool, ...]
    drafts: tuple[tuple[int, ...], ...]


class Planner:
    """The maker of consecutive `StepPlan`s.

    Attributes:
      scored: requests whose prompts the last plan scores, each with its number of rows, in their order.
    """

    def __init__(
        self,
        layouts: Mapping[int, PlanLayout],
        fill_tiles: Callable[[StepPlan], None],
        page_table: PageTable,
        *,
        chunk_tokens: int,
        num_device_pages: int,
        scoring_bucket: int,
        num_count_slots: int = 0,
    ) -> None:
        """Plan for buckets with these layouts.

        Args:
          layouts: plan layout by bucket.
          fill_tiles: function that writes `plan.tiles` from the rows' lengths.
          page_table: pages of the granted sequences, by their `row`.
          chunk_tokens: tokens per chunk, and per page.
          num_device_pages: pages including the dummy page; writes to slots past them are dropped.
          scoring_bucket: the bucket of every step that scores prompts.
          num_count_slots: slots of the device's counts of ids; 0 if no request has penalties.
        """
        self._layouts = layouts
        self._buckets = tuple(sorted(layouts))
        self._scoring_bucket = scoring_bucket
        self._fill_tiles = fill_tiles
        self._page_table = page_table
        self._chunk_tokens = chunk_tokens
        self._padding_slot = num_device_pages * chunk_tokens
        self._count_slots = CountSlots(num_count_slots)
        self._num_plans = 0
        self.scored: tuple[tuple[Request, int], ...] = ()

    def forget_counts(self) -> None:
        """Plan for new counts of ids, as those on the device are lost."""
        self._count_slots.forget()

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Make the plan of one step with at least one grant.

        Reads each request's `sample_row`, which must be that of the last dispatched step, and updates it for
        the rows that sample. Also updates `scored_end` of the requests whose prompt tokens it scores.
        """
        rows = _Rows(*zip(*output.grants, strict=True))
        scoring = [row for row, request in enumerate(rows.requests) if request.is_scoring]
        bucket = self._scoring_bucket if scoring else bucket_for(self._buckets, output.num_tokens)
        layout = self._layouts[bucket]
        plan = StepPlan(layout, self._num_plans, self._padding_slot)
        self._num_plans += 1
        self._fill_rows(plan, rows, output.num_tokens)
        self._fill_samples(plan, rows)
        self.scored = ()
        if scoring:
            self._fill_prompt_rows(plan, rows, scoring)
        self._fill_tiles(plan)
        return plan

    def _fill_rows(self, plan: StepPlan, rows: _Rows, num_tokens: int) -> None:
        requests, starts, ends, samples, _ = rows
        num_rows, chunk_tokens = len(requests), self._chunk_tokens
        begins, kv_lens = np.array(starts, np.int32), np.array(ends, np.int32)
        q_lens = kv_lens - begins
        plan.num_rows[0] = num_rows
        np.cumsum(q_lens, out=plan.cu_q_lens[1 : num_rows + 1])
        plan.cu_q_lens[num_rows + 1 :] = num_tokens
        plan.kv_lens[:num_rows] = kv_lens

        pages_of_row = self._page_table.take([request.sequence.row for request in requests])
        num_columns = min(pages_of_row.shape[1], plan.layout.pages_per_row)
        plan.page_indices[:num_rows, :num_columns] = pages_of_row[:, :num_columns]
        for row in compress(range(num_rows), map(not_, samples)):
            plan.page_indices[row, -(-ends[row] // chunk_tokens) :] = 0  # pages reserved for later grants

        row_of_token = np.repeat(np.arange(num_rows, dtype=np.int32), q_lens)
        positions = np.arange(num_tokens, dtype=np.int32)
        positions += (begins - plan.cu_q_lens[:num_rows]).take(row_of_token)
        plan.positions[:num_tokens] = positions
        pages = plan.page_indices[row_of_token, positions // chunk_tokens]
        plan.write_slots[:num_tokens] = pages * chunk_tokens + positions % chunk_tokens

        # A draft stands in place of the placeholder for the id to be sampled.
        parts = [
            [*request.token_ids[start : end - len(draft)], *draft] if draft else request.token_ids[start:end]
            for request, start, end, _, draft in zip(*rows, strict=True)
        ]
        ids = np.fromiter(chain.from_iterable(parts), np.int32, num_tokens)
        pending = np.flatnonzero(ids == PENDING_TOKEN)
        plan.prev_samples[pending] = [requests[row].sample_row for row in row_of_token.take(pending).tolist()]
        ids[pending] = 0
        plan.token_ids[:num_tokens] = ids

    def _fill_prompt_rows(self, plan: StepPlan, rows: _Rows, scoring: list[int]) -> None:
        tokens: list[range] = []
        targets: list[list[int]] = []
        scored: list[tuple[Request, int]] = []
        for row in scoring:
            request, start, end = rows.requests[row], rows.starts[row], rows.ends[row]
            positions = request.take_scored(start, end)
            if not positions:
                continue
            first = int(plan.cu_q_lens[row]) + positions.start - start
            tokens.append(range(first, first + len(positions)))
            targets.append(request.token_ids[positions.start + 1 : positions.stop + 1])
            scored.append((request, len(positions)))
        self.scored = tuple(scored)
        if scored:
            flat_tokens, flat_targets = (list(chain.from_iterable(parts)) for parts in (tokens, targets))
            plan.prompt_rows = PromptRows(np.array(flat_tokens, np.int32), np.array(flat_targets, np.int32))

    def _fill_samples(self, plan: StepPlan, rows: _Rows) -> None:
        requests = list(compress(rows.requests, rows.samples))
        numbers = np.flatnonzero(rows.samples)
        before: int | np.ndarray = 0  # how many tokens before its row's last one each id is sampled
        if any(rows.drafts):
            num_drafted = [len(draft) for draft in compress(rows.drafts, rows.samples)]
            requests = [r for r, num in zip(requests, num_drafted, strict=True) for _ in range(1 + num)]
            numbers = np.repeat(numbers, np.array(num_drafted) + 1)
            before = np.array([number for num in num_drafted for number in range(num, -1, -1)], np.int32)
        plan.num_samples[0] = num_samples = len(requests)
        if not num_samples:
            return
        plan.sample_tokens[:num_samples] = plan.cu_q_lens[1:].take(numbers) - 1 - before
        plan.sample_positions[:num_samples] = plan.kv_lens.take(numbers) - before
        sampling = np.frombuffer(b"".join([request.sampling for request in requests]), SAMPLING)
        for name in (*COLUMNS, "seed"):
            getattr(plan, name)[:num_samples] = sampling[name]
        if sampling["adjusts"].any():
            plan.adjustment = self._adjustment(plan, requests)
        ends = plan.sample_positions[:num_samples].tolist()
        for sample_row, (request, end) in enumerate(zip(requests, ends, strict=True)):
            request.sample_row = sample_row
            if end < request.num_unending:
                plan.banned_ids[sample_row, : len(request.ending_ids)] = request.ending_ids
        plan.flags[FLAG_SAMPLES] = (sampling["temperature"] > 0).any()
        plan.flags[FLAG_TRUNCATES] = truncates(sampling).any()
        plan.flags[FLAG_LOGPROBS] = sampling["logprobs"].any()

    def _adjustment(self, plan: StepPlan, requests: list[Request]) -> Adjustment:
        """Return the biases and penalties of the rows that sample.

        Each request's `sample_row` must be that of the previous step.
        """
        adjustment, num_rows = Adjustment(), plan.layout.max_num_samples
        for row, request in enumerate(requests):
            if request.bias is not None:
                if adjustment.bias is None:
                    adjustment.bias = no_bias(num_rows)
                adjustment.bias[:, row, : request.bias.shape[1]] = request.bias
        if any(request.penalties is not None for request in requests):
            adjustment.counted = not_counted(num_rows)
            ends = plan.sample_positions[: len(requests)].tolist()
            adjustment.seeds = self._count_slots.count(requests, ends, adjustment.counted)
        return adjustment
