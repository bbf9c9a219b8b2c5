"""Statistics of generated conversations and the thesis' statements about ShareGPT: its Figures 3.10 and 3.11.

Owns: which figures of a generated dataset are shown.
Does not know: how conversations are generated (`pensieve_lab.workload`), or which system serves them.
Called by `experiments.registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pensieve_lab.experiments.claims import claims_of
from pensieve_lab.experiments.panels import Curve, Panel
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.seeds import spread
from pensieve_lab.experiments.settings import Experiment, Findings, Settings, Table
from pensieve_lab.workload import SHAPES, generate_trace

_NUM_CONVERSATIONS = 20_000
_CAP_TOKENS = 16_384
# more than any conversation has, to count the conversations that the cap affects
_UNCAPPED_TOKENS = 1_000_000
_MANY_TURNS = 5
_TURNS = (1, 2, 3, 4, 5, 8, 16, 32, 64)
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


_SHOWN = {
    "mean_turns": "turns, mean",
    "many_turns_share": "share of at least 5 turns",
    "max_turns": "turns of the longest",
    "mean_context_tokens": "tokens, mean",
    "p50_context_tokens": "tokens, p50",
    "p90_context_tokens": "tokens, p90",
    "over_cap_share": "share above 16,384 tokens, without the cap",
}


def _made(shape: str, seed: int) -> dict[str, Any]:
    """Return the table figures and the two curves of one seed."""
    served = generate_trace(
        SHAPES[shape], num_conversations=_NUM_CONVERSATIONS, seed=seed, max_context_tokens=_CAP_TOKENS
    ).conversations
    uncapped = generate_trace(
        SHAPES[shape], num_conversations=_NUM_CONVERSATIONS, seed=seed, max_context_tokens=_UNCAPPED_TOKENS
    ).conversations
    turns = np.array([len(conversation.turns) for conversation in served])
    contexts = np.array([sum(turn.num_tokens for turn in each.turns) for each in served])
    longest = np.array([sum(turn.num_tokens for turn in each.turns) for each in uncapped])
    return {
        "mean_turns": float(turns.mean()),
        "many_turns_share": float((turns >= _MANY_TURNS).mean()),
        "max_turns": int(turns.max()),
        "mean_context_tokens": float(contexts.mean()),
        "p50_context_tokens": float(np.percentile(contexts, 50)),
        "p90_context_tokens": float(np.percentile(contexts, 90)),
        "over_cap_share": float((longest > _CAP_TOKENS).mean()),
        "at_least_turns": [(n, float((turns >= n).mean())) for n in _TURNS],
        "at_most_tokens": [(n, float((longest <= n).mean())) for n in _CONTEXTS],
    }


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    found = {shape: {seed: _made(shape, seed) for seed in settings.seeds} for shape in SHAPES}
    [turns_claim, _], [cap_claim] = claims_of("3.10"), claims_of("3.11")
    return Findings(
        tables=[
            Table(
                title=f"{_NUM_CONVERSATIONS:,} made conversations, mean and range over seeds",
                columns=["", *found],
                rows=[
                    [words, *(_cell(by_seed, name) for by_seed in found.values())]
                    for name, words in _SHOWN.items()
                ],
            )
        ],
        panels=[
            _panel(
                "Figure 3.10", "turns of a conversation", "share with at least x",
                _means(found, "at_least_turns"), (_MANY_TURNS, turns_claim.value / 100),
            ),
            _panel(
                "Figure 3.11", "tokens of a whole conversation", "share with at most x",
                _means(found, "at_most_tokens"), (_CAP_TOKENS, 1 - cap_claim.value / 100),
            ),
        ],
        results={
            "num_conversations": _NUM_CONVERSATIONS,
            "cap_tokens": _CAP_TOKENS,
            "many_turns": _MANY_TURNS,
            "made": {shape: {str(seed): one for seed, one in found[shape].items()} for shape in found},
        },
        units={
            "made": "by dataset and seed, of conversations that end with the last turn within cap_tokens",
            "*_share": "share of conversations",
            "over_cap_share": "of conversations without the cap, those above it",
            "at_least_turns": "(turns, share of conversations with at least that number)",
            "at_most_tokens": "(tokens, share of conversations with at most that number, without the cap)",
        },
        origin="conversations made after the paper's Table 2",
    )  # fmt: skip


def _cell(by_seed: dict[int, dict[str, Any]], name: str) -> str:
    found = spread([one[name] for one in by_seed.values()])
    assert found is not None
    digits = 0 if found.mean > 50 else 2 if found.mean > 1 else 4
    return f"{found.mean:,.{digits}f} ({found.low:,.{digits}f}-{found.high:,.{digits}f})"


def _means(means: dict[str, dict[int, dict[str, Any]]], name: str) -> dict[str, Curve]:
    """Return one curve per dataset, the mean of its seeds."""
    curves: dict[str, Curve] = {}
    for shape, by_seed in means.items():
        together: Sequence[Curve] = [one[name] for one in by_seed.values()]
        curves[f"{shape}-like, made"] = [
            (points[0][0], sum(y for _, y in points) / len(points)) for points in zip(*together, strict=True)
        ]
    return curves


def _panel(
    title: str, x_label: str, y_label: str, curves: dict[str, Curve], said: tuple[float, float]
) -> Panel:
    name = "ShareGPT, as the thesis says"
    return Panel(
        title=title,
        x_label=x_label,
        y_label=y_label,
        curves={**curves, name: [said]},
        dashed=frozenset([name]),
        log_x=True,
    )


DATASETS = Experiment(
    name="thesis3.10",
    title="Turns and contexts of conversations",
    paper="Of ShareGPT's conversations 36% have at least 5 turns (thesis section 3.6.4), and 0.57% are "
    "longer than 16,384 tokens and were dropped (3.6.1).",
    points=lambda settings: [],
    findings=_findings,
    flags=frozenset({"seeds"}),
)
