"""What a model tells an engine of each of its cells.

Owns: the fields of that, which are those of `pensieve_jax.cellular.Cell`; an engine takes either.
Does not know: any engine, since models stand below them.

A cell is a module, called as `module(inputs, **immediates)`: `inputs` is a tuple with a mapping of arrays
[B, ...] for each state that it reads, an immediate is i32[B]. It returns a mapping of arrays, and says of
itself:
  state: what it returns, a `State`, which is also what it reads unless there are `inputs`.
  inputs: a sequence of them, one for each state that it reads.
  immediates: names of numbers that come with each node, such as a token's id.
  emits: fields of its state that are told for every node.
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
"""The same of a batch: [B, ...] of each field."""

DEFAULT_MAX_BATCH = 512


class RecurrentCell(NamedTuple):
    """A cell as an engine takes it.

    Attributes:
      module: see above.
      name: of the type, unique in an engine.
      max_batch: the largest batch.
      priority: where several types have enough to run, the highest goes first.
      batch_sizes: what is compiled, in rising order up to `max_batch`; None leaves it to the engine.
    """

    module: nnx.Module
    name: str
    max_batch: int = DEFAULT_MAX_BATCH
    priority: int = 0
    batch_sizes: tuple[int, ...] | None = None


class GraphBuilder(Protocol):
    """What `unfold` asks of a graph; see `pensieve_jax.cellular.graph.Graph`."""

    def chain(
        self,
        cell: Any,
        words: Any = None,
        *,
        num: int | None = None,
        after: int | None = None,
        until: int | None = None,
    ) -> range:
        """Nodes each of which reads the one before it."""

    def sentences(self, cell: Any, words: Any) -> None:
        """A request for each of these, a chain whose last state it returns."""

    def trees(self, leaf: Any, inner: Any, words: Any, children: Any) -> None:
        """A request for each of these, a tree whose root's state it returns."""

    def nodes(self, cell: Any, inputs: Any, **immediates: Any) -> range:
        """Nodes with inputs of their own."""

    def returns(self, *nodes: int) -> None:
        """The states of these nodes are wanted."""


def field(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """One array of a row of state."""
    return jax.ShapeDtypeStruct(shape, dtype)
