"""Cost of a single turn and a single chunk: the paper's Figures 3 and 4, which need no workload.

Owns: the batch of Figure 3, and the curves of Figure 4 with the measured ones.
Does not know: caches or schedulers; single steps come from a device profile.
Called by `experiments.registry`.
"""

from __future__ import annotations

from typing import Any

from pensieve_jax.cache.order.cost import CostPoint
from pensieve_lab.experiments.claims import claims_of
from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.experiments.machines import load_profile, profile_name
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.recompute import cost_points
from pensieve_lab.experiments.settings import Experiment, Findings, Settings, Table
from pensieve_lab.simulator import DeviceProfile
from pensieve_lab.simulator.step_time import StepLoad, StepTime

_MODELS = ("opt-13b", "llama2-13b-gqa10")

# Figure 3
_NUM_REQUESTS = 32
_OUTPUT_TOKENS = 200
_PROMPTS = (32, 200)  # from the caption, and from the text
_SHOWN_PROMPT = 32
_HISTORIES = (0, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_MAX_STEP_TOKENS = 2048

# Figure 4
_CHUNK_TOKENS = 32
_MAX_CONTEXT_TOKENS = 16_384
_PAPER_CURVE = "the paper, read off its Figure 4"
_MEASURED = "h200_costs_llama2-13b-gqa10.json"
_PAPER_RATIOS = [(claim.context_tokens or 0, claim.value) for claim in claims_of("4")]


def prefill_s(profile: DeviceProfile, num_history: int, num_new: int) -> float:
    """Return the seconds to compute `num_new` tokens after a history for a batch, in full steps."""
    step_time = StepTime(profile.step, (_MAX_STEP_TOKENS,))
    total_s, load = 0.0, StepLoad()
    for _ in range(_NUM_REQUESTS):
        start, end = num_history, num_history + num_new
        while start < end:
            count = min(end - start, _MAX_STEP_TOKENS - load.num_tokens)
            start += count
            load.add(count, start)
            if load.num_tokens == _MAX_STEP_TOKENS:
                total_s, load = total_s + step_time.seconds(load), StepLoad()
    if load.num_tokens:
        total_s += StepTime(profile.step, (load.num_tokens,)).seconds(load)
    return total_s


def generation_s(profile: DeviceProfile, num_context: int) -> float:
    """Return the seconds to generate the replies of a batch of requests, token by token."""
    step_time, load = StepTime(profile.step, (_NUM_REQUESTS,)), StepLoad()
    for _ in range(_NUM_REQUESTS):
        load.add(1, num_context + 1)
    total_s = 0.0
    for _ in range(_OUTPUT_TOKENS):
        total_s += step_time.seconds(load)
        load.lengthen()
    return total_s


def _turns(settings: Settings, measured: list[Measured]) -> Findings:
    """Return the findings of Figure 3."""
    rows: list[dict[str, Any]] = []
    for model in _MODELS:
        profile = load_profile(settings.device, model)
        for prompt in _PROMPTS:
            for history in _HISTORIES[:4] if settings.small else _HISTORIES:
                rows.append(
                    {
                        "model": model,
                        "prompt_tokens": prompt,
                        "history_tokens": history,
                        "stateless_prefill_s": prefill_s(profile, 0, history + prompt),
                        "stateful_prefill_s": prefill_s(profile, history, prompt),
                        "generation_s": generation_s(profile, history + prompt),
                    }
                )
    return Findings(
        tables=[
            Table(
                title=f"{_NUM_REQUESTS} requests, {_OUTPUT_TOKENS} tokens of reply each, seconds",
                columns=[*rows[0], "history / turn"],
                rows=[[*row.values(), _history_share(row)] for row in rows],
            )
        ],
        panels=[_turn_panel(settings, model, rows) for model in _MODELS],
        results={"num_requests": _NUM_REQUESTS, "output_tokens": _OUTPUT_TOKENS, "turns": rows},
        profiles=[profile_name(settings.device, model) for model in _MODELS],
        units={"*_s": "seconds on the device for the whole batch", "*_tokens": "tokens of one request"},
    )


def _history_share(row: dict[str, Any]) -> float:
    """Return the share of a stateless turn that a stateful one saves."""
    whole_s = row["stateless_prefill_s"] + row["generation_s"]
    return (row["stateless_prefill_s"] - row["stateful_prefill_s"]) / whole_s


def _turn_panel(settings: Settings, model: str, rows: list[dict[str, Any]]) -> Panel:
    of_caption = [row for row in rows if (row["model"], row["prompt_tokens"]) == (model, _SHOWN_PROMPT)]
    labels = {
        "stateless_prefill_s": "prompt of 32 and its history, computed again",
        "generation_s": f"{_OUTPUT_TOKENS} steps of generation",
        "stateful_prefill_s": "prompt of 32 alone, history kept",
    }
    return Panel(
        title=profile_name(settings.device, model),
        x_label="history tokens of each request",
        y_label=f"seconds for {_NUM_REQUESTS} requests",
        curves={
            label: [(row["history_tokens"], row[name]) for row in of_caption]
            for name, label in labels.items()
        },
    )


def _chunks(settings: Settings, measured: list[Measured]) -> Findings:
    """Return the findings of Figure 4."""
    curves = {
        profile_name(settings.device, model): cost_points(
            load_profile(settings.device, model), _CHUNK_TOKENS, _MAX_CONTEXT_TOKENS
        )
        for model in _MODELS
    }
    measured_costs = committed_document(_MEASURED)["results"]
    curves["measured: h200_llama2-13b-gqa10"] = [
        CostPoint(**point) for point in measured_costs["curves"][measured_costs["cost"]]
    ]
    ratios = {name: [(p.context_len, _over_rest(p)) for p in points] for name, points in curves.items()}
    return Findings(
        tables=[
            Table(
                title=f"Attention over everything else, of recomputing {_CHUNK_TOKENS} tokens in a batch",
                columns=["context", *ratios, "paper"],
                rows=[
                    [
                        context,
                        *(_at(context, ratio) for ratio in ratios.values()),
                        _at(context, _PAPER_RATIOS),
                    ]
                    for context, _ in ratios[profile_name(settings.device, _MODELS[0])]
                ],
            )
        ],
        panels=[
            Panel(
                title="attention / everything else",
                x_label="context tokens, the chunk included",
                y_label="ratio of times",
                curves={**ratios, _PAPER_CURVE: _PAPER_RATIOS},
                dashed=frozenset([_PAPER_CURVE]),
            ),
            Panel(
                title="a chunk, as one of 16 of a step",
                x_label="context tokens, the chunk included",
                y_label="milliseconds",
                curves={
                    name: [(p.context_len, 1e3 * p.total_s) for p in points]
                    for name, points in curves.items()
                },
            ),
        ],
        results={
            "chunk_tokens": _CHUNK_TOKENS,
            "curves": {name: [point._asdict() for point in points] for name, points in curves.items()},
            "paper_ratios": [{"context_len": n, "attention_over_rest": ratio} for n, ratio in _PAPER_RATIOS],
            "measured": f"lab/results/{_MEASURED}",
        },
        profiles=[profile_name(settings.device, model) for model in _MODELS],
        units={"*_s": "seconds for one chunk of chunk_tokens tokens, over all layers"},
    )


def _over_rest(point: CostPoint) -> float:
    return point.attention_s / point.rest_s


def _at(context: int, curve: Any) -> str:
    return next((f"{ratio:.2f}" for length, ratio in curve if length == context), "")


TURNS = Experiment(
    name="fig3",
    title="Recomputing a history against generating a reply",
    paper="32 requests: recomputing the history comes to outweigh 200 steps of generation as the history "
    "grows (section 3.1). New prompts have 32 tokens by the caption and 200 by the text; the table has both.",
    points=lambda settings: [],
    findings=_turns,
    flags=frozenset({"device", "small"}),
)
CHUNKS = Experiment(
    name="fig4",
    title="The cost of a chunk by its context",
    paper="Attention over everything else of a 32-token chunk rises linearly with the context (section 3.2), "
    "0.4 at 4K, 0.77 at 8K, 1.53 at 16K tokens, as others read them off the drawing (no model is named).",
    points=lambda settings: [],
    findings=_chunks,
    flags=frozenset({"device"}),
)
