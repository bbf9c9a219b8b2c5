"""The runner of the engine's tests, and its reference: both must read every column of the sampling table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams, plan_columns
from pensieve_jax.scheduler.plan import FLAG_SAMPLES, FLAG_TRUNCATES, PlanLayout, StepPlan
from tests.engine.fake_runner import FakeRunner, dense_continuation

NUM_ROWS = 4


def settings_of(name: str) -> list[SamplingParams]:
    """Parameters at temperature 1, with the column's field changed."""
    found = []
    for value in (0.125, 2):
        try:
            found.append(SamplingParams(**{"temperature": 1.0, name: value}))
        except InvalidRequestError:
            continue
    assert found
    return found


def of_runner(params: SamplingParams) -> list[int]:
    """What the runner samples from a plan."""
    plan: Any = StepPlan(PlanLayout(8, NUM_ROWS, 2, NUM_ROWS, 1, (4,)), 0, 99)
    plan.num_samples[0] = NUM_ROWS
    plan.flags[[FLAG_SAMPLES, FLAG_TRUNCATES]] = 1
    for name in plan_columns():
        getattr(plan, name)[:] = getattr(params, name)
    runner = cast(FakeRunner, SimpleNamespace(num_top=1))
    return FakeRunner._sample(runner, plan, list(range(NUM_ROWS))).token_ids.tolist()


def of_reference(params: SamplingParams) -> list[int]:
    """What the reference computes without a plan."""
    return dense_continuation([1, 2, 3], params, 5, NUM_ROWS, lambda n: False).token_ids


@pytest.mark.parametrize("choices", [of_runner, of_reference])
@pytest.mark.parametrize("name", plan_columns())
def test_every_column_of_the_table_changes_what_is_chosen(name, choices):
    plain = choices(SamplingParams(temperature=1.0))
    assert len(plain) == NUM_ROWS and np.min(plain) >= 0
    assert any(choices(params) != plain for params in settings_of(name))
