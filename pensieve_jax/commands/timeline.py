"""Pages of both tiers by state over time: samples after each step, and a plot of them.

Owns: the plotted states, their order, and the thinning of long runs. Does not know: why chunks move.
Matplotlib, which is optional, is loaded only to draw.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_jax import InvalidRequestError
from pensieve_jax.engine.engine import Engine

MAX_NUM_SAMPLES = 2048

# In the order in which they are stacked, from the bottom up.
GPU_STATES = {
    "reserved": "#7f7f7f",
    "copying in": "#17becf",
    "on gpu": "#d62728",
    "copying out": "#ff7f0e",
    "on both": "#2ca02c",
    "free pages": "#eeeeee",
}
CPU_STATES = {
    "on cpu": "#1f77b4",
    "leaving": "#9467bd",
    "copying in": "#17becf",
    "copying out": "#ff7f0e",
    "on both": "#2ca02c",
    "free slots": "#eeeeee",
}


def check_timeline(path: str | None, others: Sequence[Path]) -> None:
    """Raise InvalidRequestError for a plot that cannot be drawn, before anything is loaded."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError("--timeline", path, "left out without matplotlib", "pip install matplotlib")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise InvalidRequestError("--timeline", path, "a name that ends in .png, .svg or .pdf")
    if not Path(path).resolve().parent.is_dir():
        raise InvalidRequestError("--timeline", path, "in an existing directory")
    if Path(path).resolve() in [other.resolve() for other in others]:
        raise InvalidRequestError("--timeline", path, "a different file from all others")


class Sample(NamedTuple):
    """State of the engine after a step."""

    time_s: float
    census: dict[str, int]
    num_running: int
    num_waiting: int
    num_suspensions: int


class Recorder:
    """Recorder of samples of an engine. Long runs keep only every second, fourth, ... step.

    Attributes:
      samples: samples by time, which starts at 0.
    """

    def __init__(self, engine: Engine) -> None:
        self.samples: list[Sample] = []
        self._engine = engine
        self._start_s = time.perf_counter()
        self._stride = 1
        self._num_steps = 0

    def after_step(self) -> None:
        """Take a sample, unless this step is skipped."""
        self._num_steps += 1
        if self._num_steps % self._stride:
            return
        stats = self._engine.stats()
        self.samples.append(
            Sample(
                time.perf_counter() - self._start_s,
                self._engine.census(),
                int(stats["num_running"]),
                int(stats["num_waiting"]),
                int(stats["num_suspensions"]),
            )
        )
        if len(self.samples) > MAX_NUM_SAMPLES:
            del self.samples[::2]
            self._stride *= 2

    def draw(self, path: str) -> None:
        """Write the plot: device pages, host slots, requests. A run without steps writes none."""
        from matplotlib.figure import Figure  # an optional extra

        if not self.samples:
            return
        has_cpu = any(sample.census[state] for sample in self.samples for state in CPU_STATES)
        heights = [3, 3, 1] if has_cpu else [3, 1]
        figure = Figure(figsize=(11, 2.2 * sum(heights) / 2), layout="constrained")
        axes: list[Any] = list(
            figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False).flat
        )
        self._draw_states(axes[0], "device pages", GPU_STATES)
        if has_cpu:
            self._draw_states(axes[1], "host slots", CPU_STATES)
        self._draw_requests(axes[-1])
        figure.savefig(path, dpi=130)

    def _draw_states(self, axes: Any, title: str, states: dict[str, str]) -> None:
        times = [sample.time_s for sample in self.samples]
        counts = [[sample.census[state] for sample in self.samples] for state in states]
        axes.stackplot(times, counts, labels=list(states), colors=list(states.values()), step="post")
        axes.set_ylabel(title)
        axes.margins(x=0, y=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    def _draw_requests(self, axes: Any) -> None:
        times = [sample.time_s for sample in self.samples]
        axes.step(times, [sample.num_running for sample in self.samples], where="post", label="running")
        axes.step(times, [sample.num_waiting for sample in self.samples], where="post", label="waiting")
        suspensions = [sample.num_suspensions for sample in self.samples]
        suspended_s = [
            t for t, before, now in zip(times[1:], suspensions, suspensions[1:], strict=False) if now > before
        ]
        if suspended_s:
            axes.plot(
                suspended_s, [0] * len(suspended_s), "v", color="black", label="suspension", clip_on=False
            )
        axes.set_ylabel("requests")
        axes.set_xlabel("seconds")
        axes.margins(x=0)
        axes.set_ylim(bottom=0)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
