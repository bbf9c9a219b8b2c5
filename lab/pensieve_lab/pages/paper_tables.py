"""Markdown tables of `lab/docs/paper_and_we.md`, made from committed documents.

Owns: the content of each table, and how its numbers are rounded.
Does not know: how a document was made, or where in the page a table stands.
Called by `programs.refresh_pages` and the other modules of tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve_lab.common.crossing import crossing_at
from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.experiments.kernels import NAMES, times_us
from pensieve_lab.experiments.levels import BySeed, reached
from pensieve_lab.experiments.seeds import spread

SYSTEMS = ("pensieve", "pensieve-gpu", "stateless")
MODEL_WORDS = {"opt-13b": "OPT-13B", "llama2-13b-gqa10": "Llama-2-13B"}


def markdown(columns: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all cells must have a text form."""
    return "\n".join(map(_line, [columns, ["---"] * len(columns), *body]))


def _line(cells: Sequence[object]) -> str:
    return "".join(f"| {cell} " if str(cell) else "| " for cell in cells) + "|"


def document(experiment: str, device: str = "a100") -> dict[str, Any]:
    """Return the results of a simulated experiment."""
    results: dict[str, Any] = committed_document(f"sim_{experiment}_{device}.json")["results"]
    return results


def range_of(by_seed: BySeed, digits: int = 2) -> str:
    """Return mean and range over the seeds that reach the level, with their number if some do not."""
    values = reached(by_seed)
    found = spread(values)
    if found is None:
        return "not reached"
    text = f"{found.mean:.{digits}f} ({found.low:.{digits}f}-{found.high:.{digits}f})"
    return text if len(values) == len(by_seed) else f"{text}, {len(values)} of {len(by_seed)} seeds"


def at_level(results: Mapping[str, Any], system: str, panel: str | None = None) -> dict[str, Any]:
    """Return a document's entry for a system at its level, of the only panel or of the named one."""
    [found] = [
        one
        for one in results["at_level"]
        if one["system"] == system and (panel is None or one["panel"] == panel)
    ]
    by_seed = {
        key: {str(seed): found[key].get(str(seed)) for seed in results["seeds"]}
        for key in ("requests_per_s_by_seed", "ratio_by_seed")
    }
    return {**found, **by_seed}


def panels_of(results: Mapping[str, Any]) -> list[str]:
    """Return the panels in their order."""
    return list(dict.fromkeys(one["panel"] for one in results["at_level"]))


def crossing_history(device: str, model: str, prompt: int) -> float | None:
    """Return the history length from which recomputing it takes longer than generating the reply."""
    turns = [
        turn
        for turn in document("fig3", device)["turns"]
        if (turn["model"], turn["prompt_tokens"]) == (model, prompt)
    ]
    return crossing_at(
        0.0, [(turn["history_tokens"], turn["stateless_prefill_s"] - turn["generation_s"]) for turn in turns]
    )


def chunk_ratios() -> dict[str, dict[int, float]]:
    """Return Figure 4's ratio of attention to the rest, by curve and context."""
    curves = {**document("fig4", "h200")["curves"], **document("fig4")["curves"]}
    return {
        name: {point["context_len"]: point["attention_s"] / point["rest_s"] for point in points}
        for name, points in curves.items()
    }


def throughputs(experiments: Mapping[str, Sequence[str]]) -> str:
    """Return throughputs at the level by system; `experiments` names their panels' figures, in order."""
    body = []
    for name, figures in experiments.items():
        results = document(name)
        for figure, panel in zip(figures, panels_of(results), strict=True):
            levels = [at_level(results, system, panel) for system in SYSTEMS]
            body.append(
                [
                    f"{figure} {panel}",
                    *(range_of(one["requests_per_s_by_seed"]) for one in levels),
                ]
            )
    return markdown(["requests/s at the level", "both tiers", "device alone", "no state"], body)


def kernels() -> str:
    """Return Figure 12's kernel times."""
    return markdown(
        ["context", *NAMES.values()],
        [
            [
                f"{context:,}",
                *(f"{by_kernel[kernel]:,.0f}" if kernel in by_kernel else "" for kernel in NAMES),
            ]
            for context, by_kernel in times_us().items()
        ],
    )


def long_warm_up() -> str:
    """Return the level of Figure 10b, read after its warm-up and after a long one, by the latter's seeds."""
    long, usual = document("fig10b-long"), document("fig10b")
    seeds: list[Any] = [str(seed) for seed in long["seeds"]]
    after = f"{long['warm_up_s']:,.0f} s"
    rows = [("240 s, Figure 10b", usual["at_level"], {_place(one, "x"): one for one in usual["points"]})]
    for think_s, name in ((60, after), (120, f"{after}, users who think for 120 s")):
        levels = [one for one in long["at_level"] if one["think_s"] == think_s]
        points = {_place(one, "rate_per_s"): one for one in long["points"] if one["x"] == think_s}
        rows.append((name, levels, points))
    body = []
    for name, levels, points in rows:
        of = {one["system"]: one for one in levels}
        both, none = (of.get(system) for system in ("pensieve", "stateless"))
        cells = [(both, "requests_per_s_by_seed"), (none, "requests_per_s_by_seed"), (both, "ratio_by_seed")]
        throughputs = ["" if one is None else range_of({s: one[key][s] for s in seeds}) for one, key in cells]
        latencies = [
            "" if place not in points else _span_ms(points[place]["latency_s_by_seed"], seeds)
            for place in _NEAR_10B
        ]
        body.append([name, *throughputs, *latencies])
    columns = [
        *("read after", "both tiers, requests/s", "no state, requests/s", "both tiers / no state"),
        *(
            f"{name} at {rate:g} conversations/s, ms"
            for name, (_, rate) in zip(_NAMES_10B, _NEAR_10B, strict=True)
        ),
    ]
    return markdown(columns, body)


_NEAR_10B = (("pensieve", 1.8), ("stateless", 0.6))
_NAMES_10B = ("both tiers", "no state")


def _place(point: Mapping[str, Any], rate: str) -> tuple[str, float]:
    return point["series"], point[rate]


def _span_ms(by_seed: Mapping[str, float], seeds: Iterable[str]) -> str:
    """Return the smallest and the largest value as text."""
    values = [1e3 * by_seed[seed] for seed in seeds]
    return f"{min(values):,.0f} to {max(values):,.0f}"


def think_times() -> str:
    """Return Figure 15, which includes the thesis's 3.16."""
    results = document("fig15")
    both = {one["think_s"]: one for one in results["at_level"] if one["system"] == "pensieve"}
    shown = f"{results['shown_rate_per_s']:g} conversations a second"
    found = {
        point["x"]: point["found_rate"]
        for point in results["points"]
        if (point["panel"], point["series"]) == (shown, "pensieve")
    }

    def cell(system: str, think_s: float) -> str:
        values = [
            one["requests_per_s_by_seed"]
            for one in results["at_level"]
            if (one["system"], one["think_s"]) == (system, think_s)
        ]
        return range_of(values[0]) if values else ""

    over_late = "both tiers / no state of 600 s, after 2,400 s"
    hit_rate = f"cache hit rate at {results['shown_rate_per_s']:g} conversations/s"
    return markdown(
        ["think time", "both tiers", "no state", over_late, hit_rate],
        [
            [
                f"{think_s:g} s",
                *(cell(system, think_s) for system in ("pensieve", "stateless")),
                range_of(one["ratio_by_seed"]),
                f"{100 * found[think_s]:.0f}%",
            ]
            for think_s, one in both.items()
        ],
    )
