"""The default number of rows."""

from __future__ import annotations

import pytest

from model_defs.recurrent import LSTM
from pensieve_jax.cellular import CapacityError, CellularConfig, CellularEngine
from pensieve_jax.cellular.cells import Cell, CellTypes, Float
from pensieve_jax.cellular.request_processor import RequestProcessor
from pensieve_jax.cellular.rows import num_rows_for


@pytest.mark.parametrize(
    ("row_bytes", "num_rows"),
    [(4, 4096), (2**18, 4095), (2**20, 1023), (2_801_668, 382), (2**22, 256), (24_903_684, 256)],
)
def test_rows_that_fit_a_gibibyte(row_bytes: int, num_rows: int) -> None:
    assert num_rows_for(None, row_bytes) == num_rows
    if 256 < num_rows < 4096:
        assert (num_rows + 1) * row_bytes <= 2**30 < (num_rows + 2) * row_bytes


def test_a_requested_number_of_rows_is_used() -> None:
    assert num_rows_for(7, 2**40) == 7


class Wide:
    """A row of 4 MiB."""

    state = {"h": Float(2**20)}  # noqa: RUF012
    inputs = ()


WIDE = Wide()


def test_the_default_is_the_same_everywhere() -> None:
    types = CellTypes([Cell(WIDE, "wide", 512)])
    processor = RequestProcessor(types, CellularConfig())
    assert processor.admission.budget.num_rows == 256
    assert processor.formation.rows[0][0].num_free == 256
    with pytest.raises(CapacityError, match=r"requests\[0\]\.rows is 257.*at most num_rows \(256\)"):
        processor.submit_many([257], unfold)


def unfold(num, graph):  # type: ignore[no-untyped-def]
    graph.returns(*(graph.add(WIDE) for _ in range(num)))


def test_an_engine_has_the_default_number() -> None:
    model = LSTM.random(hidden_size=4, vocab_size=9)
    with CellularEngine(
        model.cells(max_batch=2), model.unfold, CellularConfig(max_num_tasks=1), progress=False
    ) as engine:
        assert {array.shape[0] for array in engine.workers[0].pools[0]} == {4097}
        assert engine.processor.admission.budget.num_rows == 4096
