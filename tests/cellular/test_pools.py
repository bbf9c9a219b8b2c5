"""Programs update the pools in place; the same on an NVIDIA GPU."""

from __future__ import annotations

import re

import pytest

from pensieve_jax.cellular import CellularConfig, CellularEngine
from tests.cellular.test_schedules import MODELS

_NUM_ROWS = 777  # a size that occurs nowhere else


def check_no_copies(name: str, batch_sizes: tuple[int, ...]) -> None:
    model = MODELS[name]()
    cells = [cell._replace(max_batch=batch_sizes[-1], batch_sizes=batch_sizes) for cell in model.cells()]
    with CellularEngine(
        cells, model.unfold, CellularConfig(num_rows=_NUM_ROWS, compile_at_start=True), progress=False
    ) as engine:
        for key, run in engine.workers[0].programs.compiled.items():
            text = run.as_text()
            copies = re.findall(rf"= \w+\[{_NUM_ROWS + 1}(?:,\d+)*\]\S* copy\(.*", text)
            assert not copies, (key, copies)
            assert f"[{_NUM_ROWS + 1}" in text


def test_no_program_copies_a_pool() -> None:
    """A copy of a pool would cost more than most cells. XLA treats a batch of one separately."""
    check_no_copies("lstm", (1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_no_program_copies_a_pool_on_a_gpu(name: str) -> None:
    check_no_copies(name, (1, 2, 8, 64))
