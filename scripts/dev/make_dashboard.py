"""Make a Grafana dashboard of a server's metrics, as JSON to import.

    python scripts/dev/make_dashboard.py            # writes docs/dashboard.json
    python scripts/dev/make_dashboard.py --check    # exit status 1 if the file is out of date

Grafana asks for the Prometheus data source when the file is imported. The table below defines the panels. A
test checks their expressions against the output of /metrics.
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


class Curve(NamedTuple):
    """Expression, and its name in the legend."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """Graph; `unit` is Grafana's name of a unit."""

    title: str
    unit: str
    lines: Sequence[Curve]
    stacked: bool = False


def rate(metric: str) -> str:
    """Return the rate of a counter per second."""
    return f"rate({metric}{_SELECTOR}{_WINDOW})"


def quantiles(histogram: str) -> list[Curve]:
    """Return the curves of the median, and of the 95th and 99th percentile."""
    return [
        Curve(
            f"histogram_quantile({share}, sum by (le) ({rate(f'{histogram}_bucket')}))", f"p{share * 100:g}"
        )
        for share in (0.5, 0.95, 0.99)
    ]


def average(metric: str) -> Curve:
    """Return the curve of a histogram's average."""
    return Curve(f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}", "on average")


def by(label: str, metric: str) -> Curve:
    """Return one curve for each value of a label."""
    return Curve(f"sum by ({label}) ({rate(metric)})", f"{{{{{label}}}}}")


def of_each(gauge: str) -> Curve:
    """Return one curve for each replica."""
    return Curve(f"sum by (replica) ({gauge}{_SELECTOR})", "{{replica}}")


ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Client latency and requests",
        (
            Panel("First token", "s", quantiles("vllm:time_to_first_token_seconds")),
            Panel("Between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
            Panel("Whole reply", "s", quantiles("vllm:e2e_request_latency_seconds")),
            Panel("Waiting in the queue", "s", quantiles("pensieve:front_queue_seconds")),
            Panel("Replies per second", "reqps", [by("finished_reason", "vllm:request_success_total")], True),
            Panel(
                "Refused requests per second", "reqps", [by("code", "pensieve:requests_refused_total")], True
            ),
        ),
    ),
    (
        "Sources of context tokens",
        (
            Panel("All context tokens", "short", [by("source", "vllm:prompt_tokens_by_source_total")], True),
            Panel("History of conversations", "short", [by("source", "pensieve:history_tokens_total")], True),
            Panel(
                "Cache hit rate",
                "percentunit",
                [
                    Curve(
                        f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
                        "hit rate",
                    )
                ],
            ),
            Panel("Context matches by kind", "reqps", [by("kind", "pensieve:context_match_total")], True),
            Panel("Rebuilt contexts", "reqps", [by("reason", "pensieve:context_rebuilds_total")], True),
            Panel(
                "Tokens per second",
                "short",
                [
                    Curve(rate("vllm:prompt_tokens_total"), "contexts"),
                    Curve(rate("vllm:generation_tokens_total"), "replies"),
                ],
            ),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                "Turns",
                "short",
                [
                    Curve(f"vllm:num_requests_running{_SELECTOR}", "running"),
                    Curve(f"pensieve:engine_waiting{_SELECTOR}", "waiting in the engine"),
                    Curve(f"pensieve:front_waiting{_SELECTOR}", "waiting in the front end"),
                ],
            ),
            Panel(
                "Memory in use",
                "percentunit",
                [
                    Curve(f"vllm:kv_cache_usage_perc{_SELECTOR}", "device"),
                    Curve(f"pensieve:cpu_cache_usage_perc{_SELECTOR}", "host"),
                ],
            ),
            Panel(
                "Chunks by tier and state",
                "short",
                [Curve(f"sum by (tier, state) (pensieve:chunks{_SELECTOR})", "{{tier}} {{state}}")],
                True,
            ),
            Panel(
                "Moved between tiers",
                "Bps",
                [Curve(f"sum by (from, to) ({rate('pensieve:tier_bytes_total')})", "{{from}} to {{to}}")],
            ),
            Panel(
                "Memory pressure, events per second",
                "short",
                [
                    Curve(rate("vllm:num_preemptions_total"), "suspended turns"),
                    Curve(rate("pensieve:forced_swap_outs_total"), "forced copies"),
                    Curve(rate("pensieve:lost_copies_total"), "lost copies"),
                    Curve(rate("pensieve:dropped_chunks_total"), "dropped chunks"),
                ],
            ),
            Panel(
                "Engine thread",
                "percentunit",
                [
                    Curve(rate("pensieve:engine_host_seconds_total"), "on a processor"),
                    Curve(rate("pensieve:transfer_stall_seconds_total"), "waiting for copies"),
                ],
            ),
            Panel(
                "Tokens per step",
                "short",
                [average("vllm:iteration_tokens_total"), *quantiles("vllm:iteration_tokens_total")],
            ),
            Panel(
                "Tokens per event", "short", [Curve(f"pensieve:delta_merge_ratio{_SELECTOR}", "on average")]
            ),
            Panel("Commit", "s", quantiles("pensieve:commit_seconds")),
        ),
    ),
    (
        "Replicas, if there are several",
        (
            Panel("Running turns", "short", [of_each("pensieve:replica_running")]),
            Panel("Waiting turns", "short", [of_each("pensieve:replica_waiting")]),
            Panel("Replies per second by replica", "reqps", [by("replica", "pensieve:replica_turns_total")]),
            Panel(
                "Tokens per second by replica",
                "short",
                [by("replica", "pensieve:replica_generation_tokens_total")],
            ),
            Panel(
                "Recomputed share of history",
                "percentunit",
                [
                    Curve(
                        f"{by('replica', 'pensieve:replica_recomputed_tokens_total').expression} / "
                        f"{by('replica', 'pensieve:replica_history_tokens_total').expression}",
                        "{{replica}}",
                    )
                ],
            ),
            Panel(
                "Retried turns per second",
                "reqps",
                [Curve(rate("pensieve:turns_run_again_total"), "all")],
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the contents of the file."""
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
        print(f"{DASHBOARD.relative_to(ROOT)} is out of date: run scripts/dev/make_dashboard.py")
        return EXIT_FAILED
    return 0


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_bool("check", False, "Write nothing; fail if the file is out of date.")


if __name__ == "__main__":
    define_flags()
    run(main)
