"""The load sweeps of the paper and the thesis: which models, datasets, loads and levels.

Owns: their parameters. Figures of the paper are those of its text, as `docs/evaluation.md` says.
Does not know: how a sweep is carried out (`load_sweeps`).
Called by: the registry.
"""

from __future__ import annotations

import dataclasses

from experiments.load_sweeps import LoadPanel, LoadSweep, load_experiment
from experiments.systems import BOTH_TIERS

OPT_SHAREGPT = LoadPanel(
    title="OPT-13B, ShareGPT",
    model="opt-13b",
    shape="sharegpt",
    rates_per_s={
        "a100": (0.15, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7),
        "h200": (0.5, 0.7, 0.85, 1.0, 1.15, 1.3),
    },
    one_tier_until_per_s={"a100": 0.45},
    level_s={"a100": 0.120, "h200": 0.030},
    paper="1.36 x vLLM, 1.14 x TensorRT-LLM at 120 ms",
)
LLAMA_SHAREGPT = LoadPanel(
    title="Llama-2-13B, ShareGPT",
    model="llama2-13b-gqa10",
    shape="sharegpt",
    rates_per_s={
        "a100": (0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1, 2.4),
        "h200": (0.7, 1.0, 1.4, 1.8, 2.2, 2.6, 3.0),
    },
    one_tier_until_per_s={"a100": 1.2},
    level_s={"a100": 0.180, "h200": 0.018},
    paper="1.70 x vLLM, 1.58 x TensorRT-LLM at 180 ms",
)
OPT_ULTRACHAT = dataclasses.replace(
    OPT_SHAREGPT,
    title="OPT-13B, UltraChat",
    shape="ultrachat",
    rates_per_s={"a100": (0.3, 0.6, 0.8, 1.0, 1.2, 1.4), "h200": (1.0, 1.5, 2.0, 2.5, 3.0)},
    one_tier_until_per_s={"a100": 1.0},
    paper="no figure at hand",
)
LLAMA_ULTRACHAT = dataclasses.replace(
    LLAMA_SHAREGPT,
    title="Llama-2-13B, UltraChat",
    shape="ultrachat",
    rates_per_s={"a100": (0.6, 1.2, 1.8, 2.4, 3.0, 3.4, 4.0, 4.4), "h200": (1.5, 2.5, 3.5, 4.5, 5.5)},
    one_tier_until_per_s={"a100": 2.4},
    paper="no figure at hand",
)
OPT_66B = LoadPanel(
    title="OPT-66B x 4, ShareGPT",
    model="opt-66b",
    shape="sharegpt",
    rates_per_s={"a100": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9), "h200": (0.5, 0.8, 1.0, 1.2, 1.4)},
    one_tier_until_per_s={"a100": 0.5},
    level_s={"a100": 0.400, "h200": 0.040},
)
LLAMA_70B = LoadPanel(
    title="Llama-2-70B x 4, ShareGPT",
    model="llama2-70b",
    shape="sharegpt",
    rates_per_s={
        "a100": (0.2, 0.4, 0.6, 0.9, 1.2, 1.5, 1.8, 2.2),
        "h200": (0.8, 1.2, 1.6, 2.0, 2.4, 3.0, 3.6),
    },
    one_tier_until_per_s={"a100": 1.2},
    level_s={"a100": 0.400, "h200": 0.040},
    paper="3.0 x vLLM, 2.47 x TensorRT-LLM at 400 ms",
)

_NEAR_THE_LEVEL: dict[str, dict[str, tuple[float, ...]]] = {
    "opt-13b": {"a100": (0.3, 0.4, 0.45, 0.5, 0.55, 0.6), "h200": (0.7, 0.85, 1.0, 1.15, 1.3)},
    "llama2-13b-gqa10": {"a100": (1.5, 1.8, 2.1), "h200": (1.4, 1.8, 2.2, 2.6, 3.0)},
}
"""Conversations that begin in a second, for comparisons of one system with itself."""


def _at_least_5_turns(panel: LoadPanel) -> LoadPanel:
    """Twice as many turns on the average, at half the rates."""
    return dataclasses.replace(
        panel,
        title=f"{panel.title}, 5 turns or more",
        min_turns=5,
        rates_per_s={device: [rate / 2 for rate in rates] for device, rates in panel.rates_per_s.items()},
        one_tier_until_per_s={device: rate / 2 for device, rate in panel.one_tier_until_per_s.items()},
        paper="no figure at hand",
    )


_FIGURE_10 = (
    "Throughput against normalized latency on one A100; Pensieve ahead of vLLM and TensorRT-LLM, which are "
    "stateless. At one level the text gives ratios for ShareGPT."
)

LOAD_EXPERIMENTS = (
    *(
        load_experiment(name, panel.title, _FIGURE_10, LoadSweep(panels=[panel]))
        for name, panel in (
            ("fig10a", OPT_SHAREGPT),
            ("fig10b", LLAMA_SHAREGPT),
            ("fig10c", OPT_ULTRACHAT),
            ("fig10d", LLAMA_ULTRACHAT),
        )
    ),
    load_experiment(
        "fig11",
        "OPT-66B and Llama-2-70B on four GPUs",
        "The same for larger models on four A100s; with Llama-2-70B the gain is the paper's largest.",
        LoadSweep(panels=[OPT_66B, LLAMA_70B], small_rates_per_s=(0.2,)),
    ),
    load_experiment(
        "fig13",
        "Unified scheduling against prompts apart from decodes",
        "Batches that hold prompts and decodes together serve more at the same latency than phases apart.",
        LoadSweep(
            panels=[
                dataclasses.replace(
                    panel, rates_per_s=_NEAR_THE_LEVEL[panel.model], paper="no figure at hand"
                )
                for panel in (OPT_SHAREGPT, LLAMA_SHAREGPT)
            ],
            systems=[BOTH_TIERS, dataclasses.replace(BOTH_TIERS, name="not unified", unified=False)],
            small_rates_per_s=(0.7,),
        ),
    ),
    load_experiment(
        "thesis3.15",
        "Conversations of at least 5 turns",
        "A figure of the thesis without numbers at hand. Expected: more turns, more history, a larger gain.",
        LoadSweep(
            panels=[_at_least_5_turns(panel) for panel in (OPT_SHAREGPT, LLAMA_SHAREGPT)],
            small_rates_per_s=(0.1,),
        ),
    ),
)
