"""Plot of the cost to recompute a chunk, split into attention and the rest (the paper's Figure 4).

Owns: the plot, and the check that one can be drawn. Does not know: how costs are measured.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve_jax import ConfigError
from pensieve_jax.cache.order.cost import CostPoint, CostProfile
from pensieve_jax.commands.launch import check_can_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_can_plot(flag: str, path: Path) -> None:
    """Raise ConfigError if matplotlib is missing, or the file cannot be written."""
    check_can_write(flag, path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(flag, str(path), "left out without matplotlib", "pip install matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:] not in kinds:
        raise ConfigError(flag, str(path), f"a file that ends in one of {', '.join(kinds)}")


def plot_costs(profile: CostProfile, path: Path) -> None:
    """Draw one panel for each kind of cost over the context length; raise OSError if writing fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    subject = profile.subject
    titles = {
        "alone": "a step of one chunk",
        "in_batch": f"one of the {profile.num_batched_chunks} chunks of a step",
    }
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(profile.curves), squeeze=False)[0]
    for axes, (kind, points) in zip(panels, profile.curves.items(), strict=True):
        _draw(axes, points)
        axes.set_title(titles[kind] + (", used as Cost(l)" if kind == profile.cost else ""), fontsize=10)
    panels[0].legend(frameon=False)
    devices = f"{subject.tensor_parallel_size} x " if subject.tensor_parallel_size > 1 else ""
    measured = f"{profile.model}, {subject.dtype}, {devices}{subject.device}"
    figure.suptitle(f"Recomputing {subject.chunk_tokens} tokens: {measured}")
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, points: tuple[CostPoint, ...]) -> None:
    """Draw the two parts, and the measured step."""
    lens = [point.context_len for point in points]
    for label, style, values_s in (
        ("attention", "o-", [point.attention_s for point in points]),
        ("the rest, at the shortest context", "s-", [point.rest_s for point in points]),
        ("whole step, measured", "k:", [point.total_s for point in points]),
    ):
        axes.plot(lens, [1e3 * seconds for seconds in values_s], style, label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lens, [str(length) for length in lens], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context length (tokens, the chunk included)")
    axes.set_ylabel("milliseconds a chunk")
    axes.grid(alpha=0.3)
