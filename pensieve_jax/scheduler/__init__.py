"""Scheduling: the tokens that the next step computes, packed as arrays. It does not import jax."""

from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.scheduler.buckets import (
    bucket_for,
    bucket_layout,
    bucket_rows,
    scoring_bucket,
    token_buckets,
)
from pensieve_jax.scheduler.output import Grant, SchedulerOutput
from pensieve_jax.scheduler.plan import PlanLayout, StepPlan
from pensieve_jax.scheduler.planner import Planner
from pensieve_jax.scheduler.prompt_order import PromptOrder, make_prompt_order
from pensieve_jax.scheduler.request import Request, RequestStatus
from pensieve_jax.scheduler.scheduler import Draft, Scheduler

__all__ = [
    "Draft",
    "Grant",
    "PlanLayout",
    "Planner",
    "PromptOrder",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "StepPlan",
    "StepResult",
    "bucket_for",
    "bucket_layout",
    "bucket_rows",
    "make_prompt_order",
    "scoring_bucket",
    "token_buckets",
]
