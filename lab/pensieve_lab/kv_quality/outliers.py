"""A sweep of planted outliers: the effect of each format on answers when a few channels are far larger.

Owns: which models are made and compared, and the averages over seeds.
Does not know: flags, or how anything is shown.
Called by the programs of KV quality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from model_defs.registry import Model
from pensieve_lab.kv_quality.channels import balancing, magnitudes, planted, with_factors
from pensieve_lab.kv_quality.formats import FORMATS
from pensieve_lab.kv_quality.quality import Passes, compare, figures, logit_difference
from pensieve_lab.kv_quality.texts import Text

PARTS: Final = ("keys", "values")
BALANCED: Final = "int8_balanced"
"""int8 on weights whose channels were brought to similar magnitudes."""
COMPARED: Final = (*FORMATS, BALANCED)
MAX_LOGIT_DIFFERENCE: Final = 1e-3
_NUM_CHECKED = 2  # texts whose logits with an exact KV cache must not change
_SHOWN = ("divergence", "top_equal_percent", "more_nats")


class Sweep(NamedTuple):
    """Settings of the sweep.

    Attributes:
      texts: measured texts.
      calibration: token ids from which channel magnitudes are taken, disjoint from `texts`.
      scales: factors of planted channels.
      num_seeds: draws of channels for each scale.
    """

    texts: Sequence[Text]
    calibration: Sequence[np.ndarray]
    scales: Sequence[float]
    num_seeds: int

    @property
    def num_models(self) -> int:
        """Number of measured models."""
        return 1 + len(PARTS) * len(self.scales) * self.num_seeds

    @property
    def num_passes(self) -> int:
        """Number of dense passes, without those of the check and of calibration."""
        return self.num_models * len(self.texts) * (len(FORMATS) + 3)


def run_sweep(model: Model, sweep: Sweep, on_pass: Callable[[], None]) -> list[dict[str, Any]]:
    """Return a row for each part, scale and seed, after one for the unchanged model (part None)."""
    passes, rows = Passes(model), [_row(None, 1.0, None, _measured(model, sweep, on_pass))]
    for part in PARTS:
        for scale in sweep.scales:
            for seed in range(sweep.num_seeds):
                changed = with_factors(model, planted(model, part, scale, seed))
                difference = logit_difference(passes, Passes(changed), sweep.texts[:_NUM_CHECKED])
                found = _measured(changed, sweep, on_pass)
                rows.append(_row(part, scale, seed, found) | {"max_logit_difference": difference})
    return rows


def averages(rows: Sequence[dict[str, Any]], figure: str = "divergence") -> list[dict[str, Any]]:
    """Return [mean, smallest, largest] over the seeds of each part and scale, by format."""
    found = []
    for part in PARTS:
        for scale in sorted({row["scale"] for row in rows}):
            some = [row for row in rows if row["scale"] == scale and row["part"] in (part, None)]
            values = {name: [row[name][figure] for row in some] for name in COMPARED}
            spread = {name: [float(np.mean(one)), min(one), max(one)] for name, one in values.items()}
            found.append({"part": part, "scale": scale, **spread})
    return found


def _row(part: str | None, scale: float, seed: int | None, figures: dict[str, Any]) -> dict[str, Any]:
    return {"part": part, "scale": scale, "seed": seed, **figures}


def _measured(model: Model, sweep: Sweep, on_pass: Callable[[], None]) -> dict[str, dict[str, float]]:
    found = compare(Passes(model), sweep.texts, FORMATS, on_pass)
    even = with_factors(model, balancing(model, magnitudes(model, sweep.calibration)))
    found[BALANCED] = compare(Passes(even), sweep.texts, ("int8",), on_pass)["int8"]
    everything = {name: figures(sums) for name, sums in found.items()}
    return {name: {key: one[key] for key in _SHOWN} for name, one in everything.items()}
