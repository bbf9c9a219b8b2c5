"""Cellular batching and its baselines by name, each a scheduler of the same cells.

Owns: the names.
Does not know: models, loads or devices.
Called by experiments and programs of cells.
"""

from __future__ import annotations

import functools
from typing import Any

from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_lab.cells.baselines import FixedGraph, GraphMerging, Padding

CELLULAR, IDEAL = "cellular", "ideal, fixed graph"
PADDING, PADDING_OLDEST = "padding, width 10", "padding, oldest first"
OTHER_WIDTHS = {width: f"padding, width {width}" for width in (1, 40)}
OTHER_OLDEST = {width: f"padding, oldest first, width {width}" for width in (1, 40)}
WHOLE = "padding, whole sentences"  # not a scheduler of cells: see `whole_sentences`
WHOLE_WIDTHS = {WHOLE: 10} | {f"{WHOLE}, width {width}": width for width in (20, 40)}
BY_DEPTH, BY_AGENDA = "merging by depth", "merging by agenda"

SYSTEMS: dict[str, Any] = {
    CELLULAR: CellScheduler,
    PADDING: functools.partial(Padding, width=10),
    PADDING_OLDEST: functools.partial(Padding, width=10, oldest_first=True),
    BY_DEPTH: functools.partial(GraphMerging, order="depth"),
    BY_AGENDA: functools.partial(GraphMerging, order="agenda"),
    IDEAL: FixedGraph,
    **{name: functools.partial(Padding, width=width) for width, name in OTHER_WIDTHS.items()},
    **{
        name: functools.partial(Padding, width=width, oldest_first=True)
        for width, name in OTHER_OLDEST.items()
    },
}
CHAINS = (CELLULAR, PADDING, PADDING_OLDEST)
TREES = (CELLULAR, BY_AGENDA, BY_DEPTH)
