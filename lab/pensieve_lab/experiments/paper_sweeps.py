"""The load sweeps of the paper and the thesis: models, datasets, request rates and latency levels.

Owns: the parameters of the sweeps. A level is the normalized latency at which the throughputs of systems are
compared. For the paper's A100 it is the one that the paper's text names (`claims`).
Does not know: how a sweep is carried out (`load_sweeps`).
Called by `experiments.registry`.
"""

from __future__ import annotations

import dataclasses

from pensieve_lab.experiments.claims import in_words, level_s_of
from pensieve_lab.experiments.load_sweeps import LoadPanel, LoadSweep, load_experiment
from pensieve_lab.experiments.systems import BOTH_TIERS

OPT_SHAREGPT = LoadPanel(
    title="OPT-13B, ShareGPT",
    model="opt-13b",
    shape="sharegpt",
    rates_per_s={
        "a100": (0.15, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7),
        "h200": (0.5, 0.7, 0.85, 1.0, 1.15, 1.3),
    },
    one_tier_until_per_s={"a100": 0.45},
    level_s={"a100": level_s_of("10a"), "h200": 0.030},
    paper=in_words("10a"),
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
    level_s={"a100": level_s_of("10b"), "h200": 0.018},
    paper=in_words("10b"),
)
OPT_ULTRACHAT = dataclasses.replace(
    OPT_SHAREGPT,
    title="OPT-13B, UltraChat",
    shape="ultrachat",
    rates_per_s={"a100": (0.3, 0.6, 0.8, 1.0, 1.2, 1.4), "h200": (1.0, 1.5, 2.0, 2.5, 3.0)},
    one_tier_until_per_s={"a100": 1.2},
    level_s={"a100": level_s_of("10c"), "h200": 0.030},
    paper=in_words("10c"),
)
LLAMA_ULTRACHAT = dataclasses.replace(
    LLAMA_SHAREGPT,
    title="Llama-2-13B, UltraChat",
    shape="ultrachat",
    rates_per_s={"a100": (0.6, 1.2, 1.8, 2.1, 2.4, 3.0, 3.4, 3.7, 4.0), "h200": (1.5, 2.5, 3.5, 4.5, 5.5)},
    one_tier_until_per_s={"a100": 2.4},
    level_s={"a100": level_s_of("10d"), "h200": 0.018},
    paper=in_words("10d"),
)
OPT_66B = LoadPanel(
    title="OPT-66B x 4, ShareGPT",
    model="opt-66b",
    shape="sharegpt",
    rates_per_s={"a100": (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.55, 0.6, 0.75), "h200": (0.5, 0.8, 1.0, 1.2, 1.4)},
    one_tier_until_per_s={"a100": 0.4},
    level_s={"a100": level_s_of("11a"), "h200": 0.040},
    paper=in_words("11a"),
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
    level_s={"a100": level_s_of("11b"), "h200": 0.040},
    paper=in_words("11b"),
)

_NEAR_THE_LEVEL: dict[str, dict[str, tuple[float, ...]]] = {
    "opt-13b": {"a100": (0.3, 0.4, 0.45, 0.5, 0.55, 0.6), "h200": (0.7, 0.85, 1.0, 1.15, 1.3)},
    "llama2-13b-gqa10": {"a100": (1.5, 1.8, 2.1), "h200": (1.4, 1.8, 2.2, 2.6, 3.0)},
}
"""Conversations that begin per second, near the level; for comparing variants of one system."""


def _at_least_5_turns(panel: LoadPanel, figure: str) -> LoadPanel:
    """Return the panel for conversations of at least 5 turns: twice as many on average, so half the rates."""
    return dataclasses.replace(
        panel,
        title=f"{panel.title}, 5 turns or more",
        min_turns=5,
        rates_per_s={device: [rate / 2 for rate in rates] for device, rates in panel.rates_per_s.items()},
        one_tier_until_per_s={device: rate / 2 for device, rate in panel.one_tier_until_per_s.items()},
        paper=in_words(figure),
    )


_FIGURE_10 = (
    "Throughput against normalized latency on one A100, with think times of 60 s. Pensieve is ahead of vLLM "
    "and TensorRT-LLM, which are stateless, at the latency level that section 6.2 names for each panel."
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
        "The same for larger models on four A100s and ShareGPT, at 200 ms/token for OPT-66B and 400 ms/token "
        "for Llama-2-70B, whose gain is the paper's largest (section 6.3).",
        LoadSweep(panels=[OPT_66B, LLAMA_70B]),
    ),
    load_experiment(
        "fig13",
        "Unified scheduling against separate prompt and decode batches",
        "Batches that mix prompts and decodes have better throughput and latency than separate batches "
        "(section 6.5, Llama-2-13B on ShareGPT; the text gives no numbers).",
        LoadSweep(
            panels=[
                dataclasses.replace(panel, rates_per_s=_NEAR_THE_LEVEL[panel.model], paper="")
                for panel in (OPT_SHAREGPT, LLAMA_SHAREGPT)
            ],
            systems=[BOTH_TIERS, dataclasses.replace(BOTH_TIERS, name="not unified", unified=False)],
        ),
    ),
    load_experiment(
        "thesis3.15",
        "Conversations of at least 5 turns",
        "The 36% of ShareGPT's conversations that have at least 5 turns. The gain over vLLM rises to 30% for "
        "OPT-13B and 70% for Llama-2-13B (thesis section 3.6.4, which names no latency level).",
        LoadSweep(
            panels=[_at_least_5_turns(OPT_SHAREGPT, "3.15a"), _at_least_5_turns(LLAMA_SHAREGPT, "3.15b")],
            small_rates_per_s=(0.15, 0.35, 0.55),
        ),
    ),
)
