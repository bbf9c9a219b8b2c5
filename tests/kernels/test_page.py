"""docs/kernels.md: its example runs, and gives what the reference gives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.launching import ROOT

PAGE = ROOT / "docs" / "kernels.md"


def run_example(backend: str) -> Any:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    example = example.replace("    sm_scale=", f"    backend={backend!r},\n    sm_scale=")
    exec(compile(example, PAGE.name, "exec"), names)
    return names["out"]


def test_the_example_agrees_with_the_reference():
    out = run_example("auto")
    np.testing.assert_allclose(out, run_example("reference"), rtol=1e-5)
    # Four of the first row's five keys are zeros.
    weight = 1 / (1 + 4 * np.exp(-np.sqrt(64)))
    np.testing.assert_allclose(out[0], weight, rtol=1e-5)
