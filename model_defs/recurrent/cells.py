"""Interface of a model's cells to an engine.

Owns: `RecurrentCell`, with the same fields as `pensieve_jax.cellular.Cell`; an engine accepts either.
Does not know: any engine, since engines depend on models.

A cell is a module, called as `module(inputs, **immediates)`: `inputs` is a tuple with a mapping of arrays
[B, ...] for each state that it reads, and an immediate is i32[B]. It returns a mapping of arrays. Its
attributes declare:
  state: the `State` that it returns, which is also its input if `inputs` is absent.
  inputs: a sequence of `State`s, one for each state that it reads.
  immediates: names of integers given with each node, such as a token id.
  emits: fields of its state that are reported for every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

type State = Mapping[str, jax.ShapeDtypeStruct]
"""Fields of one row, without the batch."""
type Arrays = Mapping[str, jax.Array]
"""Arrays [B, ...] of a batch, by field."""

DEFAULT_MAX_BATCH = 512


class RecurrentCell(NamedTuple):
    """Cell for an engine.

    Attributes:
      module: the module; see the module docstring.
      name: name of the type, unique in an engine.
      max_batch: the largest batch.
      priority: if several types have enough ready nodes, the highest priority runs first.
      batch_sizes: compiled batch sizes, rising up to `max_batch`; None leaves them to the engine.
    """

    module: nnx.Module
    name: str
    max_batch: int = DEFAULT_MAX_BATCH
    priority: int = 0
    batch_sizes: tuple[int, ...] | None = None


class GraphBuilder(Protocol):
    """Graph as `unfold` uses it; see `pensieve_jax.cellular.graph.Graph`."""

    def chain(
        self,
        cell: Any,
        words: Any = None,
        *,
        num: int | None = None,
        after: int | None = None,
        until: int | None = None,
    ) -> range:
        """Add a chain of nodes; each reads the one before it."""

    def sentences(self, cell: Any, words: Any) -> None:
        """Add one request per sentence: a chain that returns its last state."""

    def trees(self, leaf: Any, inner: Any, words: Any, children: Any) -> None:
        """Add one request per tree, which returns its root's state."""

    def nodes(self, cell: Any, inputs: Any, **immediates: Any) -> range:
        """Add nodes with explicit inputs."""

    def returns(self, *nodes: int) -> None:
        """Add the states of these nodes to the result."""


def field(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Declare one array of a row of state."""
    return jax.ShapeDtypeStruct(shape, dtype)
