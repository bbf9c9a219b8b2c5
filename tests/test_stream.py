"""The outputs of several turns if one of them failed, or the engine itself."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.stream import run_all
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import spec_of


def failing(harness: Harness, num_steps: int, *, has_memory: bool = True) -> None:
    """Fail a step after `num_steps`, and the creation of new pools too unless there is memory."""
    step, steps = harness.engine.step, iter(range(10**6))

    def refuse() -> None:
        raise StepFailedError("no memory for new pools")

    def counted():
        if next(steps) == num_steps:
            harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")
            if not has_memory:
                harness.runner.reset = refuse
        return step()

    harness.engine.step = counted


def specs(harness: Harness, *numbers: int):
    facts = [harness.facts(harness.prompt(6, n), str(n), max_tokens=n) for n in numbers]
    return [spec_of(one, str(one.params.max_tokens)) for one in facts]


def test_a_failure_does_not_give_one_caller_the_others_answers() -> None:
    harness = Harness()
    alone = harness.submit(harness.facts(harness.prompt(6, 1), "alone", max_tokens=30), "alone")
    failing(harness, 5)
    with pytest.raises(StepFailedError, match="the device failed") as raised:
        run_all(harness.engine, specs(harness, 9, 2), progress=False)
    outputs = raised.value.outputs
    assert outputs is not None and [one and one.conversation_id for one in outputs] == [None, "2"]
    with pytest.raises(StepFailedError, match="the device failed") as other:
        alone.result()
    assert other.value.outputs is None


def test_answers_come_with_the_error_of_an_engine_that_cannot_go_on() -> None:
    harness = Harness(small_config(max_num_running=1))
    failing(harness, 5, has_memory=False)
    with pytest.raises(StepFailedError, match="no memory for new pools") as raised:
        run_all(harness.engine, specs(harness, 2, 9, 5), progress=False)
    outputs = raised.value.outputs
    assert outputs is not None and [one and one.conversation_id for one in outputs] == ["2", None, None]
