"""Cellular batching: cells of recurrent and tree models, batched one by one (BatchMaker, thesis chapter 2).

JAX and Flax come with the engine, when it is first asked for: graphs, policy and simulation need neither.
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
from pensieve_jax.cellular.pieces import NO_NODE
from pensieve_jax.cellular.request import CellOutput, CellRequest

if TYPE_CHECKING:
    from pensieve_jax.cellular.engine import CellularEngine
else:  # a type checker would take a `__getattr__` for leave to import any name

    def __getattr__(name: str) -> Any:
        """What is imported when it is first asked for."""
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
