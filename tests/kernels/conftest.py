"""Fixtures shared by the tests of several kernels."""

from __future__ import annotations

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import mosaic_launch


@pytest.fixture
def checked_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch two programs instead of one per multiprocessor, and enable the interpreter's race detector."""
    checked = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda: checked)
    monkeypatch.setattr(mosaic_launch, "NUM_PROGRAMS", 2)
