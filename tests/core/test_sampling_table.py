"""The table of sampling fields: everything that follows from a row, shown with an additional field."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from pensieve_jax.core.sampling_params import (
    ROUTES,
    SamplingParams,
    plan_columns,
    refused_fields,
    sampling_table,
)
from pensieve_jax.decoding.sampling_rows import SAMPLING_WORDS, SamplingRows

# The field is added before anything else is imported, as if it were in the class.
TOY = """
import dataclasses, json
import pensieve_jax.core.sampling_params as table

@dataclasses.dataclass(frozen=True, kw_only=True)
class WithToy(table.SamplingParams):
    toy: float = table.sampling_field(
        1.0,
        table._real(0.5, 2.0, "a number from 0.5 to 2"),
        "Nothing.",
        table.SamplingField(table.Column("<f4", 1), routes=(table.COMPLETIONS,), flag="A toy."),
    )

table.SamplingParams = WithToy

from absl import flags
import pensieve_jax
pensieve_jax.SamplingParams = WithToy
from pensieve_jax import InvalidRequestError
from pensieve_jax.commands import engine_flags
from pensieve_jax.decoding.sampling_rows import SAMPLING, pack_sampling
from pensieve_jax.scheduler.plan import PlanLayout, StepPlan
import numpy as np

found = {}
try:
    WithToy(toy=3)
except InvalidRequestError as error:
    found["error"] = str(error)
found["record"] = float(np.frombuffer(pack_sampling(WithToy(toy=0.75), 1), SAMPLING)["toy"][0])
layout = PlanLayout(8, 2, 2, 3, 1, (4,))
plan = StepPlan(layout, 0, 99)
found["padding"] = plan.toy.tolist()
found["order"] = list(layout.fields)
engine_flags.define_sampling_flags(max_tokens=5)
flags.FLAGS(["x", "--toy=1.5"])
found["flag"] = engine_flags.sampling_params().toy
found["refused"] = table.refused_fields(table.RESPONSES)["toy"]
print(json.dumps(found))
"""


def test_a_new_row_is_found_everywhere() -> None:
    done = subprocess.run([sys.executable, "-c", TOY], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    order = found.pop("order")
    assert [name for name in order if name in (*plan_columns(), "toy", "seed")] == [
        *plan_columns(),
        "toy",
        "seed",
    ]
    assert found == {
        "error": "toy is 3, but must be a number from 0.5 to 2.",
        "record": 0.75,
        "padding": [1.0, 1.0, 1.0],
        "flag": 1.5,
        "refused": [1.0],
    }


def test_every_field_has_a_row() -> None:
    assert list(sampling_table()) == [one.name for one in dataclasses.fields(SamplingParams)]
    assert all(set(row.routes or ()) <= set(ROUTES) for row in sampling_table().values())


def test_rows_of_a_batch_begin_with_the_columns() -> None:
    columns = plan_columns()
    assert SamplingRows._fields[: len(columns)] == tuple(columns)
    assert SAMPLING_WORDS[: len(columns)] == tuple(columns)


@pytest.mark.parametrize("name", plan_columns())
def test_the_off_value_of_a_column_is_valid_for_its_field(name: str) -> None:
    column = plan_columns()[name]
    SamplingParams(**{name: column.off})
    assert np.dtype(column.dtype).itemsize == 4


def test_a_refused_field_takes_its_default() -> None:
    assert refused_fields("completions") == {}
    assert refused_fields("responses")["stop"] == ([],)
    assert "temperature" not in refused_fields("responses")
