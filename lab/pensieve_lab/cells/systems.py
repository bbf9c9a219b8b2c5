"""Cellular batching and its baselines, by the names that figures and flags use.

Owns: the names, and which scheduler each name stands for.
Does not know: models, loads or devices.
Called by the experiments and programs of cellular batching.
"""

from __future__ import annotations

import functools
from typing import Any

from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_lab.cells.baselines import FixedGraph, GraphMerging, Padding

CELLULAR, IDEAL = "cellular", "ideal, fixed graph"
PADDING, PADDING_OLDEST = "padding, width 10", "padding, oldest first"
# Padding with other bucket widths than 10 words: the name of each width.
OTHER_WIDTHS = {width: f"padding, width {width}" for width in (1, 40)}
OTHER_OLDEST = {width: f"padding, oldest first, width {width}" for width in (1, 40)}
# Padding that runs a whole sentence in one call, without cells or a scheduler: see `whole_sentences`.
WHOLE = "padding, whole sentences"
WHOLE_WIDTHS = {WHOLE: 10} | {f"{WHOLE}, width {width}": width for width in (20, 40)}
BY_DEPTH, BY_AGENDA = "merging by depth", "merging by agenda"  # TensorFlow Fold's order, and DyNet's

# Constructors of the schedulers; `WHOLE` has none.
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
CHAINS = (CELLULAR, PADDING, PADDING_OLDEST)  # systems that are compared on chains
TREES = (CELLULAR, BY_AGENDA, BY_DEPTH)  # systems that are compared on trees
