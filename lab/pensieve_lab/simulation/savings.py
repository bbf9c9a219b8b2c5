"""Savings of systems that keep state, compared with the stateless system, as text and as JSON.

Owns: the figures that are compared, and the table.
Does not know: how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve_jax.commands.report import table
from pensieve_lab.common.systems import STATELESS
from pensieve_lab.simulation.memory import Memory

UNITS = {
    "gpu_bytes": "device memory for the KV cache",
    "cpu_bytes": "host memory for the KV cache",
    "computed_tokens": "prefilled tokens of prompts and histories, again after a suspension too",
    "saved_prefill_share": "share of the stateless system's computed_tokens",
    "saved_gpu_s": "device seconds less than the stateless system",
    "saved_gpu_share": "saved_gpu_s / device_busy_s of the stateless system",
    "at_target": "the greatest load of systems within the target; empty: none was tried or kept it",
    "missed_requests_per_s": "of the least load that missed the target; null: none did",
    "share": "share of the trace's conversations that one GPU serves",
    "in_time": "whether the stateless system answers them within level_ms; null: not asked for",
    "rate_per_s": "conversations that arrive per second; null: as recorded",
}


@dataclass(frozen=True, kw_only=True)
class SystemResult:
    """Result of one system.

    Attributes:
      name: name of the system.
      memory: memory for its KV cache.
      figures: figures as in `pensieve_lab.simulator.figures`.
    """

    name: str
    memory: Memory
    figures: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Label of its row in the picture."""
        return f"{self.name}\n{self.memory}"

    @property
    def hit_rates(self) -> tuple[float, float]:
        """Shares of history on the device and on the host."""
        return self.figures["gpu_hit_rate"], self.figures["cpu_hit_rate"]

    @property
    def computed_tokens(self) -> int:
        """Prefilled tokens: new ones, recomputed history, and work lost to suspensions."""
        return sum(self.figures[name] for name in ("prefilled_tokens", "recomputed_tokens", "wasted_tokens"))

    def saved(self, stateless: SystemResult) -> dict[str, float]:
        """Return the savings against the stateless system by the names of `UNITS`."""
        mine, theirs = self.figures, stateless.figures
        gpu_s = theirs["device_busy_s"] - mine["device_busy_s"]
        return {
            "saved_prefill_share": 1 - self.computed_tokens / max(stateless.computed_tokens, 1),
            "saved_gpu_s": gpu_s,
            "saved_gpu_share": gpu_s / max(theirs["device_busy_s"], 1e-9),
        }

    def as_dict(self, stateless: SystemResult) -> dict[str, Any]:
        """Return all figures as a JSON object."""
        memory = {"gpu_bytes": self.memory.gpu_bytes, "cpu_bytes": self.memory.cpu_bytes}
        computed = {"computed_tokens": self.computed_tokens}
        return {"system": self.name, **memory, **computed, **self.saved(stateless), **self.figures}


@dataclass(frozen=True)
class AtTarget:
    """The greatest load of a system within the latency target.

    Attributes:
      name: name of the system.
      memory: memory for its KV cache.
      rate_per_s: conversations that begin per second.
      requests_per_s: requests that are answered per second.
      missed_requests_per_s: the same of the least load that missed the target; None if none did.
    """

    name: str
    memory: Memory
    rate_per_s: float
    requests_per_s: float
    missed_requests_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the load as a JSON object."""
        memory = {"gpu_bytes": self.memory.gpu_bytes, "cpu_bytes": self.memory.cpu_bytes}
        rates = {"rate_per_s": self.rate_per_s, "requests_per_s": self.requests_per_s}
        return {
            "system": self.name,
            **memory,
            **rates,
            "missed_requests_per_s": self.missed_requests_per_s,
        }


_MANY = 1000
_NEARLY = 0.97
_MOSTLY_IDLE = 0.25

COLUMNS = (
    *("system", "memory", "requests", "ms/token", "p50", "p90", "p99", "first token ms", "p90 "),
    *("history on device", "on host", "prefilled tokens", "saved", "GPU s", "saved "),
)


def savings_table(served: Sequence[SystemResult]) -> str:
    """Format a row per system; the first system must be the stateless one."""
    return table(COLUMNS, [_row(one, served[0]) for one in served])


def _row(one: SystemResult, stateless: SystemResult) -> list[object]:
    figures, saved = one.figures, one.saved(stateless)
    latency, first = figures["normalized_latency_s"], figures["first_token_s"]
    return [
        *(one.name, str(one.memory), figures["num_requests"]),
        *(f"{1e3 * latency[part]:.1f}" for part in ("mean", "p50", "p90", "p99")),
        *(f"{1e3 * first[part]:,.0f}" for part in ("mean", "p90")),
        *(f"{share:.0%}" for share in one.hit_rates),
        *(one.computed_tokens, f"{saved['saved_prefill_share']:.0%}"),
        *(f"{figures['device_busy_s']:,.0f}", f"{saved['saved_gpu_share']:.0%}"),
    ]


def smallest_good(served: Sequence[SystemResult]) -> SystemResult:
    """Return the system of the smallest memory whose GPU savings are within 3% of the largest."""
    stateless = served[0]
    most_s = max(one.saved(stateless)["saved_gpu_s"] for one in served)
    return next(one for one in served if one.saved(stateless)["saved_gpu_s"] >= _NEARLY * most_s)


def headline(served: Sequence[SystemResult], loads: Sequence[AtTarget], target: str) -> str:
    """Say in a few lines what the smallest good memory saves: GPU time, requests per second, first tokens."""
    stateless, best = served[0], smallest_good(served)
    if best is stateless:
        return f"What would keeping the KV cache save you? {_nothing(served)}"
    saved, theirs, mine = best.saved(stateless), stateless.figures, best.figures
    first = [1e3 * one["first_token_s"]["mean"] for one in (theirs, mine)]
    lines = [
        f"What would keeping the KV cache save you, with {best.memory}?",
        f"  GPU time: {saved['saved_gpu_s']:,.3g} of {theirs['device_busy_s']:,.3g} s "
        f"({saved['saved_gpu_share']:.0%}) for these {theirs['num_requests']:,} requests",
        f"  prefill: {saved['saved_prefill_share']:.0%} of the prefilled tokens",
        f"  time to first token: {first[1]:,.0f} ms on average instead of {first[0]:,.0f}",
    ]
    if len(loads) > 1 and loads[0].name == stateless.name:
        most, without = max(loads[1:], key=lambda one: one.requests_per_s), loads[0].requests_per_s
        lines.append(
            f"  requests: with {most.memory}, one GPU answers {most.requests_per_s:.3g} a second instead of "
            f"{without:.3g} ({most.requests_per_s / without:.2f} times) within {target}"
        )
    return "\n".join(lines)


def memory_table(served: Sequence[SystemResult]) -> str:
    """Format what each size of memory would bring."""
    rows = []
    for one in served:
        saved = one.saved(served[0])
        rows.append(
            [
                "none" if one is served[0] else str(one.memory),
                f"{saved['saved_prefill_share']:.0%}",
                f"{saved['saved_gpu_share']:.0%}",
                f"{1e3 * one.figures['first_token_s']['mean']:,.0f}",
            ]
        )
    return table(("memory for the KV cache", "prefill saved", "GPU time saved", "first token ms"), rows)


def request_table(loads: Sequence[AtTarget]) -> str:
    """Format the requests per second of each memory within the target, and the GPUs that a load needs."""
    base = loads[0]
    rows = [
        [
            "none" if one.name == STATELESS else str(one.memory),
            f"{one.requests_per_s:.3g}",
            "-" if one.missed_requests_per_s is None else f"{one.missed_requests_per_s:.3g}",
            f"{one.requests_per_s / base.requests_per_s:.2f}",
            f"{_MANY / one.requests_per_s:,.3g}",
        ]
        for one in loads
    ]
    columns = ("memory for the KV cache", "requests/s", "missed at", "times", f"GPU s per {_MANY:,} requests")
    return table(columns, rows)


def answer(served: Sequence[SystemResult]) -> str:
    """Describe in a sentence the smallest memory whose savings are within 3% of the largest."""
    stateless, best = served[0], smallest_good(served)
    if best is stateless:
        return _nothing(served)
    saved = best.saved(stateless)
    latency = [1e3 * one.figures["normalized_latency_s"]["mean"] for one in (stateless, best)]
    return (
        f"{best.memory} is the smallest memory that saves nearly as much of the GPU's time as any here. "
        f"With it, keeping state saves {saved['saved_prefill_share']:.0%} of the prefilled tokens "
        f"and {saved['saved_gpu_share']:.0%} of the GPU's time ({saved['saved_gpu_s']:,.0f} s); "
        f"a token takes {latency[1]:.1f} ms on average instead of {latency[0]:.1f}."
    )


def _nothing(served: Sequence[SystemResult]) -> str:
    """Explain that no system saves GPU time; some may still save prefilled tokens."""
    stateless = served[0]
    shares = [one.saved(stateless)["saved_prefill_share"] for one in served]
    if not max(shares) > 0:
        return "State saves nothing here: no turn has a history, or all of it is lost before it returns."
    best = served[shares.index(max(shares))]
    return (
        f"State saves none of the GPU's time here. "
        f"With {best.memory} it saves {max(shares):.0%} of the prefilled tokens."
    )


def load(stateless: SystemResult) -> str:
    """Describe how busy the stateless system was, and whether latencies can tell the systems apart."""
    share = stateless.figures["device_busy"]
    busy = f"{share:.0%}" if share >= 0.005 else "under 1%"
    if share < _MOSTLY_IDLE:
        advice = "latencies say little at this load, so compare prefilled tokens"
        return f"Without state this load keeps one GPU busy for {busy} of the time: {advice}."
    return f"Without state this load keeps one GPU busy for {busy} of the time until the last answer."
