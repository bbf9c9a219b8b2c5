"""First table of `lab/docs/paper_and_we.md`: a row for every claim and this project's result.

Owns: which claims are rows, and the words around their numbers.
Does not know: how a document was made.
Called by `programs.refresh_pages` and `pages.cells_tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pensieve_lab.experiments.claims import Claim, all_claims, claims_of
from pensieve_lab.experiments.kernels import BEST_FLASH, times_us
from pensieve_lab.experiments.levels import ratios
from pensieve_lab.pages.paper_eviction import beside_lru, conversations_of
from pensieve_lab.pages.paper_tables import (
    MODEL_WORDS,
    at_level,
    chunk_ratios,
    crossing_history,
    document,
    markdown,
    panels_of,
    range_of,
)

_COLUMNS = ("figure", "condition", "the paper", "ours")
_SWEEPS = {
    "10a": ("fig10a", 0, "OPT-13B, ShareGPT"),
    "10b": ("fig10b", 0, "Llama-2-13B, ShareGPT"),
    "10c": ("fig10c", 0, "OPT-13B, UltraChat"),
    "10d": ("fig10d", 0, "Llama-2-13B, UltraChat"),
    "11a": ("fig11", 0, "OPT-66B, four GPUs"),
    "11b": ("fig11", 1, "Llama-2-70B, four GPUs"),
    "3.15a": ("thesis3.15", 0, "OPT-13B, at least 5 turns"),
    "3.15b": ("thesis3.15", 1, "Llama-2-13B, at least 5 turns"),
}
"""Experiment, panel and description by figure."""

type Line = tuple[str, ...]


def summary() -> str:
    """Return every row; a row without a document says so."""
    body: list[Line] = []
    for figure, make in _ROWS.items():
        try:
            lines = make()
        except FileNotFoundError:
            lines = (figure, "no document yet", "", "")
        body += lines if isinstance(lines, list) else [lines]
    return markdown(_COLUMNS, body)


def claim(id: str) -> Claim:
    """Return a claim by its id; raises KeyError."""
    return {one.id: one for one in all_claims()}[id]


def _history() -> Line:
    ours = ", ".join(
        f"{words} from {crossing_history('a100', model, 32) or 0:,.0f} tokens on"
        for model, words in MODEL_WORDS.items()
    )
    condition = "32 requests, prompts of 32: the history's prefill outweighs 200 steps"
    return ("3", condition, "as the history grows; no number in the text", ours)


def _chunk() -> Line:
    contexts = [one.context_tokens or 0 for one in claims_of("4")]
    paper = " / ".join(f"{one.value:.2f}" for one in claims_of("4"))
    ratios = chunk_ratios()
    ours = ", ".join(
        f"{' / '.join(f'{ratios[f"a100_{model}"][context]:.2f}' for context in contexts)} ({words})"
        for model, words in MODEL_WORDS.items()
    )
    condition = "attention over everything else, at 4K / 8K / 16K"
    return ("4", condition, f"{paper} (read off by others)", ours)


def _sweep(figure: str) -> Line:
    experiment, index, condition = _SWEEPS[figure]
    results = document(experiment)
    one = at_level(results, "pensieve", panels_of(results)[index])
    claims = claims_of(figure)
    level_ms = 1e3 * one["level_s"]
    if claims[0].level_ms not in (None, round(level_ms, 6)):
        raise ValueError(
            f"Figure {figure}: {experiment} was read at {level_ms:g} ms, not {claims[0].level_ms:g}"
        )
    paper = ", ".join(f"{_ratio(each):.2f} x {each.over}" for each in claims)
    without = "" if claims[0].level_ms else " (the thesis names no level)"
    name = figure if claims[0].source == "pensieve" else f"thesis {figure}"
    ours = f"{range_of(one['ratio_by_seed'])} x no state"
    return (name, f"{condition}, {level_ms:g} ms/token{without}", paper, ours)


def _ratio(one: Claim) -> float:
    return one.value if one.unit == "x" else 1 + one.value / 100


def _kernel() -> Line:
    by_kernel = times_us()[4096]
    ours, contiguous = by_kernel["pallas_mosaic_gpu"], by_kernel["torch_cudnn"]
    flash = by_kernel[BEST_FLASH]
    of_flash = f"{ours / flash:.2f} of FlashAttention-3's on pages"
    words = f"{ours / contiguous:.2f} of cuDNN's time there, {of_flash} (measured, H200)"
    condition = "32 x 8 queries on pages, contexts of 4,096"
    return ("12", condition, "slightly faster than contiguous keys", words)


def _unified() -> list[Line]:
    results = document("fig13")
    return [
        (
            "13" if of_paper else "as 13, ours",
            f"{panel}, {1e3 * one['level_s']:g} ms/token",
            "unified serves more (no number in the text)" if of_paper else "not shown",
            f"{range_of(one['ratio_by_seed'])} x separate phases",
        )
        for panel in panels_of(results)
        for one in [at_level(results, "pensieve", panel)]
        for of_paper in [panel.startswith("Llama")]  # the only model of the paper's Figure 13
    ]


def _eviction() -> list[Line]:
    found = beside_lru()
    hits, tokens = claim("pensieve-14-hits").value, claim("pensieve-14-recomputed").value
    points = max(one.points for one in found)
    fewest, most = min(one.tokens for one in found), max(one.tokens for one in found)
    return [
        (
            "14", "OPT-13B, ShareGPT: retention against LRU, CPU hits",
            f"up to {hits:g} points more", f"at best {points:+.1f} points",
        ),
        (
            "14", "the same, recomputed tokens",
            f"up to {tokens:g}% fewer", f"{100 * fewest:+.1f}% to {100 * most:+.1f}%",
        ),
    ]  # fmt: skip


def _think(figure: str, think_s: float) -> Line:
    results = document("fig15")
    [one] = [
        each for each in results["at_level"] if (each["system"], each["think_s"]) == ("pensieve", think_s)
    ]
    said = "ahead of vLLM" if figure == "15" else f"around {_ratio(claim('thesis-3.16')):.2f} x vLLM"
    condition = f"Llama-2-13B, ShareGPT, users think for {think_s:g} s, {1e3 * one['level_s']:g} ms/token"
    ours = f"{range_of(one['ratio_by_seed'])} x no state"
    if (
        figure != "15"
        # warmed up for four think times of 120 s; compared with the stateless system at the shortest and the
        # longest think time
    ):
        other = at_level(document("fig10b"), "stateless")["requests_per_s_by_seed"]
        shorter = range_of(ratios(one["requests_per_s_by_seed"], other))
        longer = range_of(one["ratio_by_seed"])
        ours = f"{shorter} x no state after 240 s, {longer} x after 2,400 s"
    return (figure if figure == "15" else f"thesis {figure}", condition, said, ours)


def _many_turns() -> Line:
    share = 100 * conversations_of("sharegpt", "many_turns_share")[0]
    said = f"{claim('thesis-3.10-share').value:g}%"
    return ("thesis 3.10", "ShareGPT, conversations of at least 5 turns", said, f"{share:.1f}%")


def _over_cap() -> Line:
    share = 100 * conversations_of("sharegpt", "over_cap_share")[0]
    said = f"{claim('thesis-3.11-dropped').value:g}%, dropped"
    return ("thesis 3.11", "ShareGPT, above 16,384 tokens", said, f"{share:.2f}%, cut")


_ROWS: dict[str, Callable[[], Line | list[Line]]] = {
    "3": _history,
    "4": _chunk,
    **{figure: partial(_sweep, figure) for figure in ("10a", "10b", "10c", "10d", "11a", "11b")},
    "12": _kernel,
    "13": _unified,
    "14": _eviction,
    "15": partial(_think, "15", 600),
    "thesis 3.10": _many_turns,
    "thesis 3.11": _over_cap,
    "thesis 3.15a": partial(_sweep, "3.15a"),
    "thesis 3.15b": partial(_sweep, "3.15b"),
    "thesis 3.16": partial(_think, "3.16", 120),
}
