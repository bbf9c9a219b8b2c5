"""What tests of several kernels run in."""

from __future__ import annotations

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import mosaic_launch


@pytest.fixture
def checked_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs instead of one for each multiprocessor, and the interpreter's race detector on."""
    checked = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda: checked)
    monkeypatch.setattr(mosaic_launch, "NUM_PROGRAMS", 2)
