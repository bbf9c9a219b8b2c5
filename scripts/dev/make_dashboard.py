"""A Grafana dashboard of a server's metrics, as JSON to import.

    python scripts/dev/make_dashboard.py            # writes docs/dashboard.json
    python scripts/dev/make_dashboard.py --check    # exit status 1 if the file there is another one

Grafana asks for the Prometheus data source when the file is imported. The panels are rows of the table below;
their expressions are checked by a test against what /metrics gives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "dashboard.json"
_SELECTOR = '{model_name=~"$model_name"}'
_WINDOW = "[$__rate_interval]"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${source}"}


class Line(NamedTuple):
    """A curve: its expression and how the legend names it."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A graph; `unit` is Grafana's name of it."""

    title: str
    unit: str
    lines: Sequence[Line]
    stacked: bool = False


def rate(metric: str) -> str:
    """A second, of a counter."""
    return f"rate({metric}{_SELECTOR}{_WINDOW})"


def quantiles(histogram: str) -> list[Line]:
    """The half, and the worst of twenty and of a hundred."""
    return [
        Line(f"histogram_quantile({share}, sum by (le) ({rate(f'{histogram}_bucket')}))", f"p{share * 100:g}")
        for share in (0.5, 0.95, 0.99)
    ]


def average(metric: str) -> Line:
    """Of what a histogram observed."""
    return Line(f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}", "on average")


def by(label: str, metric: str) -> Line:
    """A curve for each value of a label."""
    return Line(f"sum by ({label}) ({rate(metric)})", f"{{{{{label}}}}}")


def of_each(gauge: str) -> Line:
    """A curve for each replica."""
    return Line(f"sum by (replica) ({gauge}{_SELECTOR})", "{{replica}}")


ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "What clients see",
        (
            Panel("First token", "s", quantiles("vllm:time_to_first_token_seconds")),
            Panel("Between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
            Panel("Whole reply", "s", quantiles("vllm:e2e_request_latency_seconds")),
            Panel("Waiting for a place", "s", quantiles("pensieve:front_queue_seconds")),
            Panel("Replies a second", "reqps", [by("finished_reason", "vllm:request_success_total")], True),
            Panel("Refused a second", "reqps", [by("code", "pensieve:requests_refused_total")], True),
        ),
    ),
    (
        "Where the tokens of contexts come from",
        (
            Panel(
                "All tokens of contexts", "short", [by("source", "vllm:prompt_tokens_by_source_total")], True
            ),
            Panel("History of conversations", "short", [by("source", "pensieve:history_tokens_total")], True),
            Panel(
                "Found in state",
                "percentunit",
                [
                    Line(
                        f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
                        "found",
                    )
                ],
            ),
            Panel(
                "How contexts were recognised", "reqps", [by("kind", "pensieve:context_match_total")], True
            ),
            Panel("Contexts made anew", "reqps", [by("reason", "pensieve:context_rebuilds_total")], True),
            Panel(
                "Tokens a second",
                "short",
                [
                    Line(rate("vllm:prompt_tokens_total"), "contexts"),
                    Line(rate("vllm:generation_tokens_total"), "replies"),
                ],
            ),
        ),
    ),
    (
        "The engine",
        (
            Panel(
                "Turns",
                "short",
                [
                    Line(f"vllm:num_requests_running{_SELECTOR}", "running"),
                    Line(f"pensieve:engine_waiting{_SELECTOR}", "waiting in the engine"),
                    Line(f"pensieve:front_waiting{_SELECTOR}", "waiting before it"),
                ],
            ),
            Panel(
                "Memory in use",
                "percentunit",
                [
                    Line(f"vllm:kv_cache_usage_perc{_SELECTOR}", "device"),
                    Line(f"pensieve:cpu_cache_usage_perc{_SELECTOR}", "host"),
                ],
            ),
            Panel(
                "Chunks of state",
                "short",
                [Line(f"sum by (tier, state) (pensieve:chunks{_SELECTOR})", "{{tier}} {{state}}")],
                True,
            ),
            Panel(
                "Moved between tiers",
                "Bps",
                [Line(f"sum by (from, to) ({rate('pensieve:tier_bytes_total')})", "{{from}} to {{to}}")],
            ),
            Panel(
                "Under memory pressure, a second",
                "short",
                [
                    Line(rate("vllm:num_preemptions_total"), "suspended turns"),
                    Line(rate("pensieve:forced_swap_outs_total"), "forced copies"),
                    Line(rate("pensieve:lost_copies_total"), "lost copies"),
                    Line(rate("pensieve:dropped_chunks_total"), "dropped chunks"),
                ],
            ),
            Panel(
                "The engine's thread",
                "percentunit",
                [
                    Line(rate("pensieve:engine_host_seconds_total"), "on a processor"),
                    Line(rate("pensieve:transfer_stall_seconds_total"), "waiting for copies"),
                ],
            ),
            Panel(
                "Tokens a step",
                "short",
                [average("vllm:iteration_tokens_total"), *quantiles("vllm:iteration_tokens_total")],
            ),
            Panel("Tokens an event", "short", [Line(f"pensieve:delta_merge_ratio{_SELECTOR}", "on average")]),
            Panel("Commit", "s", quantiles("pensieve:commit_seconds")),
        ),
    ),
    (
        "Replicas, where there are several",
        (
            Panel("Turns that run", "short", [of_each("pensieve:replica_running")]),
            Panel("Turns that wait", "short", [of_each("pensieve:replica_waiting")]),
            Panel("Replies of each a second", "reqps", [by("replica", "pensieve:replica_turns_total")]),
            Panel(
                "Tokens of each a second",
                "short",
                [by("replica", "pensieve:replica_generation_tokens_total")],
            ),
            Panel(
                "History that was computed again",
                "percentunit",
                [
                    Line(
                        f"{by('replica', 'pensieve:replica_recomputed_tokens_total').expression} / "
                        f"{by('replica', 'pensieve:replica_history_tokens_total').expression}",
                        "{{replica}}",
                    )
                ],
            ),
            Panel(
                "Turns sent once more, a second",
                "reqps",
                [Line(rate("pensieve:turns_run_again_total"), "all")],
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole file."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": place, "panels": []})
        top += 1
        for index, panel in enumerate(row):
            at = (index % _COLUMNS * _WIDTH, top + index // _COLUMNS * _HEIGHT)
            panels.append(_graph(panel, len(panels) + 1, at))
        top += (len(row) + _COLUMNS - 1) // _COLUMNS * _HEIGHT
    return {
        "title": "Pensieve",
        "uid": "pensieve-server",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_variable(), _model_variable()]},
        "panels": panels,
    }


def _graph(panel: Panel, number: int, at: tuple[int, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"fillOpacity": 30 if panel.stacked else 0, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": panel.title,
        "id": number,
        "datasource": _SOURCE,
        "gridPos": {"x": at[0], "y": at[1], "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(65 + i),
                "datasource": _SOURCE,
                "expr": line.expression,
                "legendFormat": line.legend,
            }
            for i, line in enumerate(panel.lines)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(vllm:num_requests_running, model_name)",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }


def main() -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not FLAGS.check:
        DASHBOARD.write_text(text, encoding="utf-8")
        print(f"{DASHBOARD.relative_to(ROOT)}: {sum(len(panels) for _, panels in ROWS)} panels")
        return 0
    if not DASHBOARD.is_file() or DASHBOARD.read_text(encoding="utf-8") != text:
        print(f"{DASHBOARD.relative_to(ROOT)} is another one: run scripts/dev/make_dashboard.py")
        return EXIT_FAILED
    return 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_bool("check", False, "Write nothing; say whether the file is up to date.")


if __name__ == "__main__":
    define_flags()
    run(main)
