"""Results of the load points of a serving benchmark, system by system, and their report.

Owns: progress lines, tables, the picture, and the JSON documents with all settings that figures depend on.
Does not know: how a load point is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from model_defs import ModelConfig
from pensieve_jax.commands.engine_flags import engine_config
from pensieve_jax.commands.report import json_line, print_document
from pensieve_lab.serving.figures import UNITS
from pensieve_lab.serving.kv_memory import kv_bytes
from pensieve_lab.serving.load_points import LoadPoint
from pensieve_lab.serving.loop_profile import UNITS as PROFILE_UNITS
from pensieve_lab.serving.report import BENCHMARK, append_line, curve, draw, tables
from pensieve_lab.serving.request_table import UNITS as REQUEST_UNITS
from pensieve_lab.serving.run import System
from pensieve_lab.serving.systems import OURS
from pensieve_lab.workload import Trace

FLAGS = flags.FLAGS
Point = dict[str, Any]
USERS_FLAGS = ("think", "time_scale", "mid_life_s", "warm_up_s", "window_s", "drain_s", "recorded_arrivals")
CLOSED_FLAGS = ("num_turns", "prompt_tokens", "output_tokens")
_SETTINGS = {
    "open loop": (*USERS_FLAGS, "seed"),
    "closed loop": ("num_conversations", *CLOSED_FLAGS, "seed"),
}


class Outcome:
    """Measured load points by system, and their report."""

    def __init__(
        self, systems: Mapping[str, System], model: ModelConfig, trace: Trace, start_up_s: float
    ) -> None:
        """Start without points; `start_up_s` is the time until the systems could serve."""
        self._systems, self._model, self._trace, self._start_up_s = systems, model, trace, start_up_s
        self._points: dict[str, list[Point]] = {name: [] for name in systems}
        self._left_out: dict[str, list[LoadPoint]] = {name: [] for name in systems}

    def add(self, load: LoadPoint, point: Point) -> None:
        """Print a load point's result, and append it to `--output_json`."""
        self._points[load.system].append(point)
        if FLAGS.output_json is not None:
            append_line(Path(FLAGS.output_json), self._line([self._results(load.system, [point])]))
        label = self._systems[load.system].label
        rate = "" if point["rate"] is None else f", {point['rate']:g}/s"
        print(f"{label}{rate}: {point['num_requests']} requests in {point['seconds']:.1f} s", flush=True)
        if point["void"]:
            late_s = point["client_lag_s"]["p99"]
            print(f"VOID: users were {1e3 * late_s:.1f} ms late (99th percentile)", flush=True)

    def leave_out(self, loads: Sequence[LoadPoint]) -> None:
        """Report load points that were skipped for lack of time; `--output_json` gets lines without
        points."""
        print(f"{len(loads)} load points left out, after --max_run_s", flush=True)
        for load in loads:
            self._left_out[load.system].append(load)
        for name, left_out in self._left_out.items():
            if left_out and FLAGS.output_json is not None:
                append_line(Path(FLAGS.output_json), self._line([self._results(name, [], left_out)]))

    def report(self) -> None:
        """Print tables, picture and JSON document."""
        labels = {name: system.label for name, system in self._systems.items()}
        print("\n\n".join(tables(labels[name], points) for name, points in self._points.items()))
        print(f"{self._trace.name}, {self._trace.digest[:12]}")
        curves = {labels[name]: curve(points) for name, points in self._points.items() if points}
        if FLAGS.plot is not None and curves:
            title = f"{FLAGS.model}, {self._device_name()}\n{self._trace.name}"
            draw(curves, title, Path(FLAGS.plot))
        results = [self._results(name, self._points[name], self._left_out[name]) for name in self._systems]
        print_document(self._line(results))

    @property
    def has_failed(self) -> bool:
        """Whether no load point was measured, or a void one."""
        points = [point for points in self._points.values() for point in points]
        return not points or any(point["void"] for point in points)

    def _results(
        self, name: str, points: Sequence[Point], left_out: Sequence[LoadPoint] = ()
    ) -> dict[str, Any]:
        """Return load points of a system with the settings that they depend on, and the skipped ones."""
        system = self._systems[name]
        described, cache = system.describe(), engine_config().cache
        loop = "closed loop" if FLAGS.closed_loop else "open loop"
        return {
            "system": system.label,
            "model": FLAGS.model,
            "dtype": FLAGS.dtype,
            **described,
            "kv_bytes": kv_bytes(described, self._model, FLAGS.dtype, cache, is_ours=name in OURS),
            "trace": {"name": self._trace.name, "digest": self._trace.digest},
            "loop": loop,
            "settings": {flag: FLAGS[flag].value for flag in _SETTINGS[loop]},
            "start_up_s": self._start_up_s,
            "points": points,
            "left_out": [load.name for load in left_out],
        }

    def _line(self, results: Sequence[dict[str, Any]]) -> str:
        """Format results as a JSON line."""
        units = UNITS | REQUEST_UNITS | (PROFILE_UNITS if FLAGS.profile_steps else {})
        document: dict[str, Any] = results[0] if len(results) == 1 else {"systems": results}
        return json_line(BENCHMARK, document, units=units, device=self._device_name())

    def _device_name(self) -> str:
        return next(iter(self._systems.values())).device_name()
