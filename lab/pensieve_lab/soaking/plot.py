"""The plot of a server's sampled figures over time.

Owns: the picture. Does not know: where the figures come from.
"""

from __future__ import annotations

from pathlib import Path

from pensieve_lab.soaking.samples import Samples

_PANELS = {
    "resident memory, MB": ("front_rss_mb", "engine_rss_mb"),
    "threads and descriptors": (
        *("front_threads", "engine_threads", "front_descriptors", "engine_descriptors"),
    ),
    "turns known": ("front_turns_remembered", "engine_known_turns", "engine_known_chunks"),
    "in flight": ("front_turns_in_engine", "front_turns_in_queue", "front_tasks", "engine_running"),
}


def plot_samples(samples: Samples, title: str, path: Path) -> None:
    """Draw a panel over minutes for each kind of figure; raises OSError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, names) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for name in names:
            if name in samples.series:
                axes.plot(samples.minutes, samples.series[name], label=name.replace("_", " "), linewidth=1.2)
        axes.set_title(label, fontsize=9)
        axes.set_xlabel("minutes")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
