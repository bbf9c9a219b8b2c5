"""Cellular batching: batching of single cells of recurrent and tree models (BatchMaker, thesis chapter 2).

JAX and Flax are imported only when `CellularEngine` is first used, since graphs, policy and simulation need
neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pensieve_jax.cellular.cells import Cell, Field, Float, Int
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import (
    CapacityError,
    CellError,
    GraphError,
    LaunchFailedError,
    RequestCancelledError,
    UnfoldError,
)
from pensieve_jax.cellular.graph import Graph
from pensieve_jax.cellular.graph_batch import NO_NODE
from pensieve_jax.cellular.request import CellOutput, CellRequest

if TYPE_CHECKING:
    from pensieve_jax.cellular.engine import CellularEngine
else:  # with `__getattr__` in sight, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import `CellularEngine` on first use."""
        if name != "CellularEngine":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = importlib.import_module("pensieve_jax.cellular.engine").CellularEngine
        return found


__all__ = [
    "NO_NODE",
    "CapacityError",
    "Cell",
    "CellError",
    "CellOutput",
    "CellRequest",
    "CellularConfig",
    "CellularEngine",
    "Field",
    "Float",
    "Graph",
    "GraphError",
    "Int",
    "LaunchFailedError",
    "RequestCancelledError",
    "UnfoldError",
]
