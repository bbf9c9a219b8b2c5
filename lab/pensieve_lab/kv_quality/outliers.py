"""A sweep of planted outliers: what each format does to the answers once a few channels are far larger.

Owns: which models are made and compared, and what is averaged over seeds.
Does not know: flags, or how anything is shown.
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
"""int8 on weights whose channels were brought to like magnitudes."""
COMPARED: Final = (*FORMATS, BALANCED)
MAX_LOGIT_DIFFERENCE: Final = 1e-3
_NUM_CHECKED = 2  # texts whose logits with exact KV state must not have moved
_SHOWN = ("divergence", "top_equal_percent", "more_nats")


class Sweep(NamedTuple):
    """What is planted where.

    Attributes:
      texts: that are measured.
      calibration: token ids that magnitudes of channels are taken from; none of `texts`.
      scales: what planted channels are times.
      num_seeds: of the channels that are drawn, for each scale.
    """

    texts: Sequence[Text]
    calibration: Sequence[np.ndarray]
    scales: Sequence[float]
    num_seeds: int

    @property
    def num_models(self) -> int:
        """That are measured."""
        return 1 + len(PARTS) * len(self.scales) * self.num_seeds

    @property
    def num_passes(self) -> int:
        """Dense passes of all of them; those of the check and of calibration are left out."""
        return self.num_models * len(self.texts) * (len(FORMATS) + 3)


def run_sweep(model: Model, sweep: Sweep, on_pass: Callable[[], None]) -> list[dict[str, Any]]:
    """A row for each part, scale and seed, behind one of the model as it is (part None)."""
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
    """Of each part and scale, [mean, smallest, largest] over the seeds, by format."""
    found = []
    for part in PARTS:
        for scale in sorted({row["scale"] for row in rows}):
            some = [row for row in rows if row["scale"] == scale and row["part"] in (part, None)]
            values = {name: [row[name][figure] for row in some] for name in COMPARED}
            spread = {name: [float(np.mean(one)), min(one), max(one)] for name, one in values.items()}
            found.append({"part": part, "scale": scale, **spread})
    return found


def _row(part: str | None, scale: float, seed: int | None, found: dict[str, Any]) -> dict[str, Any]:
    return {"part": part, "scale": scale, "seed": seed, **found}


def _measured(model: Model, sweep: Sweep, on_pass: Callable[[], None]) -> dict[str, dict[str, float]]:
    found = compare(Passes(model), sweep.texts, FORMATS, on_pass)
    even = with_factors(model, balancing(model, magnitudes(model, sweep.calibration)))
    found[BALANCED] = compare(Passes(even), sweep.texts, ("int8",), on_pass)["int8"]
    everything = {name: figures(sums) for name, sums in found.items()}
    return {name: {key: one[key] for key in _SHOWN} for name, one in everything.items()}
