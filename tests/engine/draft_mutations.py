"""Bugs to plant around drafts, one per function; see `mutations`."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.token_ids import num_equal
from pensieve_jax.engine import engine as engine_module
from pensieve_jax.engine.drafting import HistoryDrafter
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.engine.turn import ReplyState
from pensieve_jax.scheduler import Planner, Scheduler, StepPlan
from tests.engine.mutations import Mutation, by_name


def a_token_that_differs_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """Keep the first token of a draft that differs, and what was sampled behind it."""

    def one_more(draft, token_ids):
        return min(num_equal(draft, token_ids) + 1, len(draft))

    patch.setattr(engine_module, "num_equal", one_more)


def drafts_hold_if_their_beginning_does(patch: pytest.MonkeyPatch) -> None:
    def held(draft, token_ids):
        return len(draft) if draft[0] == token_ids[0] else 0

    patch.setattr(engine_module, "num_equal", held)


def rejected_tokens_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    """Count the KV of the whole draft, as if all of it held."""
    grow, accept = Scheduler._drafted, Scheduler.accept
    drafted: dict[object, int] = {}

    def remembered(self, draft, request, limit):
        found = grow(self, draft, request, limit)
        drafted[request] = len(found)
        return found

    def accepted(self, request, position, token_ids):
        accept(self, request, position, token_ids)
        num = drafted.pop(request, 0)
        if num:
            self._cache.fill(request.sequence, position, position + num)

    patch.setattr(Scheduler, "_drafted", remembered)
    patch.setattr(Scheduler, "accept", accepted)


def accepted_tokens_do_not_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    def accepted(self, request, position, token_ids):
        request.token_ids[position : position + 1] = token_ids

    patch.setattr(Scheduler, "accept", accepted)


def drafts_are_written_without_pages(patch: pytest.MonkeyPatch) -> None:
    def drafted(self, draft, request, limit):
        return tuple(draft(request, min(limit, request.max_total_tokens - len(request.token_ids) - 1)))

    patch.setattr(Scheduler, "_drafted", drafted)


def drafts_exceed_the_length_of_a_turn(patch: pytest.MonkeyPatch) -> None:
    drafted = Scheduler._drafted

    def longer(self, draft, request, limit):
        def without_limit(request, num):
            return draft(request, limit)

        return drafted(self, without_limit, request, limit)

    patch.setattr(Scheduler, "_drafted", longer)


def steps_do_not_wait_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """Schedule the step after one with drafts before it is known how many tokens that had."""
    launch = Engine._launch

    def launched(self, output):
        return launch(self, output)._replace(num_drafts=0)

    patch.setattr(Engine, "_launch", launched)


def a_reply_goes_on_behind_its_end(patch: pytest.MonkeyPatch) -> None:
    """Accept the rest of a draft whose token ended the reply."""
    accept = ReplyState.accept

    def accepted(self, *args):
        reason = accept(self, *args)
        if reason == "stop" and len(self.token_ids) < self._max_num_tokens and not hasattr(self, "ended"):
            self.ended = True
            return None
        return "stop" if hasattr(self, "ended") else reason

    patch.setattr(ReplyState, "accept", accepted)


def masks_go_by_turn_and_not_by_sampled_id(patch: pytest.MonkeyPatch) -> None:
    words = LateRows.words

    def made(self, sampling, num_rows):
        return words(self, list(dict.fromkeys(sampling)), num_rows)

    patch.setattr(LateRows, "words", made)


def ids_of_masks_go_by_turn_and_not_by_sampled_id(patch: pytest.MonkeyPatch) -> None:
    accept = LateRows.accept

    def accepted(self, sampling, *args):
        accept(self, list(dict.fromkeys(sampling)), *args)

    patch.setattr(LateRows, "accept", accepted)


def turns_with_penalties_have_drafts(patch: pytest.MonkeyPatch) -> None:
    add = HistoryDrafter.add

    def added(self, request, related):
        penalties, request.penalties = request.penalties, None
        add(self, request, related)
        request.penalties = penalties

    patch.setattr(HistoryDrafter, "add", added)


def _in_plans_with_drafts(change) -> Mutation:
    """Corrupt every plan with drafts; `change` gets the plan, and the sampled rows of each draft."""

    def mutation(patch: pytest.MonkeyPatch) -> None:
        make = Planner.plan

        def plan(self, output):
            made, row = make(self, output), 0
            for grant in output.grants:
                if grant.draft:
                    change(made, slice(row, row + grant.num_outputs))
                row += grant.num_outputs
            return made

        patch.setattr(Planner, "plan", plan)

    return mutation


def _sample_behind_the_last_token(plan: StepPlan, rows: slice) -> None:
    plan.sample_tokens[rows] = plan.sample_tokens[rows.stop - 1]


def _sample_at_the_last_position(plan: StepPlan, rows: slice) -> None:
    plan.sample_positions[rows] = plan.sample_positions[rows.stop - 1]


def _reverse_rows(plan: StepPlan, rows: slice) -> None:
    plan.sample_tokens[rows] = plan.sample_tokens[rows][::-1].copy()


def _ban_as_for_the_first(plan: StepPlan, rows: slice) -> None:
    plan.banned_ids[rows] = plan.banned_ids[rows.start]


def _bias_the_first_alone(plan: StepPlan, rows: slice) -> None:
    if plan.adjustment is not None and plan.adjustment.bias is not None:
        plan.adjustment.bias[0, rows.start + 1 : rows.stop] = -1


def _sample_all_but_the_first_greedily(plan: StepPlan, rows: slice) -> None:
    plan.temperature[rows.start + 1 : rows.stop] = np.float32(0)


DRAFT_MUTATIONS: dict[str, Mutation] = {
    "sampled behind the last token": _in_plans_with_drafts(_sample_behind_the_last_token),
    "sampled at the last position": _in_plans_with_drafts(_sample_at_the_last_position),
    "sampled rows in reverse": _in_plans_with_drafts(_reverse_rows),
    "ending ids banned as for the first": _in_plans_with_drafts(_ban_as_for_the_first),
    "bias of the first alone": _in_plans_with_drafts(_bias_the_first_alone),
    "sampled greedily": _in_plans_with_drafts(_sample_all_but_the_first_greedily),
    **by_name(
        a_token_that_differs_is_accepted,
        drafts_hold_if_their_beginning_does,
        rejected_tokens_count_as_computed,
        accepted_tokens_do_not_count_as_computed,
        drafts_are_written_without_pages,
        drafts_exceed_the_length_of_a_turn,
        steps_do_not_wait_for_drafts,
        a_reply_goes_on_behind_its_end,
        masks_go_by_turn_and_not_by_sampled_id,
        ids_of_masks_go_by_turn_and_not_by_sampled_id,
        turns_with_penalties_have_drafts,
    ),
}
