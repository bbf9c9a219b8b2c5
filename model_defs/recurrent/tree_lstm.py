"""TreeLSTM over binary trees: a cell for words, another for inner nodes (thesis, section 2.7.5).

Owns: the model, its two cells, its requests, and their unfolding.
Does not know: how an engine forms batches.

It is the binary TreeLSTM of Tai, Socher and Manning (2015), section 3.2, for constituency trees: words are
leaves, each child has its own forget gate, and every gate reads both children. Names of torch tensors are
those of DGL's example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_defs.recurrent.cells import DEFAULT_MAX_BATCH, Arrays, GraphBuilder, RecurrentCell, State, field
from model_defs.recurrent.layers import RecurrentEmbedding, RecurrentLinear, best, linear_recipes
from model_defs.recurrent.model import RecurrentConfig, RecurrentModel
from model_defs.recurrent.requests import check_requests
from model_defs.recurrent.tensors import TensorSource, open_tensors, size_of
from model_defs.recurrent.tree import BinaryTree, from_arrays, from_pairs
from model_defs.tensor_recipes import Recipe, table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeLSTMConfig(RecurrentConfig):
    """Sizes of a `TreeLSTM`; with `num_classes` 0 it emits no labels."""

    architecture: ClassVar[str] = "tree_lstm"
    vocab_size: int
    embedding_size: int
    hidden_size: int
    num_classes: int = 0


class _TreeCell(nnx.Module):
    """Base of both cells: the state, and the arithmetic after the gates' matmul."""

    def __init__(self, config: TreeLSTMConfig, head: RecurrentLinear | None) -> None:
        self.config, self.head = config, head
        self.emits = ("label",) if head is not None else ()

    @property
    def state(self) -> State:
        """State of leaves and inner nodes; with a head it has a label."""
        size = self.config.hidden_size
        fields = {"h": field(size, dtype=self.config.dtype), "c": field(size)}
        return fields | {"label": field(dtype=jnp.int32)} if self.head is not None else fields

    def _leave(self, gates: jax.Array, kept_cell: jax.Array | float) -> dict[str, jax.Array]:
        """Compute the state from gates f32[B, 3 hidden] (input, output, update) and the children's kept c."""
        i, o, u = jnp.split(gates, 3, axis=1)
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + kept_cell
        h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(self.config.dtype)
        return {"h": h, "c": c} if self.head is None else {"h": h, "c": c, "label": best(self.head(h))}


class Leaf(_TreeCell):
    """Cell that reads a word at a leaf of the tree."""

    inputs = ()
    immediates = ("token",)

    def __init__(self, config: TreeLSTMConfig, head: RecurrentLinear | None) -> None:
        super().__init__(config, head)
        self.embedding = RecurrentEmbedding(config.vocab_size, config.embedding_size, config.dtype)
        self.gates = RecurrentLinear(config.embedding_size, 3 * config.hidden_size, config.dtype)

    def __call__(self, inputs: tuple[()], token: jax.Array) -> dict[str, jax.Array]:
        return self._leave(self.gates(self.embedding(token)), 0.0)


class Inner(_TreeCell):
    """Cell of a node with two children: one matmul of [B, 2 hidden] by [2 hidden, 5 hidden]."""

    def __init__(self, config: TreeLSTMConfig, head: RecurrentLinear | None) -> None:
        """Declare the gates: input, output, update, and forget for each child."""
        super().__init__(config, head)
        self.gates = RecurrentLinear(2 * config.hidden_size, 5 * config.hidden_size, config.dtype)

    @property
    def inputs(self) -> tuple[State, State]:
        """States of the left and the right child."""
        return self.state, self.state

    def __call__(self, inputs: tuple[Arrays, Arrays]) -> dict[str, jax.Array]:
        """Combine the states of both children of B nodes."""
        left, right = inputs
        gates = self.gates(jnp.concatenate([left["h"], right["h"]], axis=1))
        size = self.config.hidden_size
        own, forget_left, forget_right = jnp.split(gates, [3 * size, 4 * size], axis=1)
        kept = jax.nn.sigmoid(forget_left) * left["c"] + jax.nn.sigmoid(forget_right) * right["c"]
        return self._leave(own, kept)


class TreeLSTM(RecurrentModel[TreeLSTMConfig]):
    """TreeLSTM of two cells. A result is {h, c} of the root and, with classes, the "label" of every node."""

    config_class = TreeLSTMConfig

    def __init__(self, config: TreeLSTMConfig) -> None:
        super().__init__(config)
        self.head = (
            RecurrentLinear(config.hidden_size, config.num_classes, config.dtype)
            if config.num_classes
            else None
        )
        self.leaf, self.inner = Leaf(config, self.head), Inner(config, self.head)

    @classmethod
    def random(
        cls,
        *,
        hidden_size: int,
        vocab_size: int,
        embedding_size: int | None = None,
        num_classes: int = 0,
        seed: int = 0,
        dtype: str = "float32",
    ) -> Self:
        """Create a model with seeded weights; `embedding_size` defaults to `hidden_size`."""
        config = TreeLSTMConfig(
            vocab_size=vocab_size,
            embedding_size=hidden_size if embedding_size is None else embedding_size,
            hidden_size=hidden_size,
            num_classes=num_classes,
            dtype=dtype,
        )
        return cls(config)._fill_randomly(seed)

    @classmethod
    def from_torch(
        cls,
        source: TensorSource,
        *,
        embedding: str = "embedding",
        cell: str = "cell",
        linear: str = "linear",
        dtype: str = "float32",
    ) -> Self:
        """Import a torch module as in DGL's example: W_iou of words, U_iou and U_f of children, a classifier.

        Args:
          source: its state_dict, or a safetensors file of it.
          embedding, cell: names of its table of words and its cell.
          linear: name of its classifier, which may be absent.
          dtype: dtype to run in.

        Raises:
          CheckpointError: a tensor is missing, misshapen or unexpected.
        """
        tensors = open_tensors(source)
        has_head = f"{linear}.weight" in tensors
        config = TreeLSTMConfig(
            vocab_size=size_of(tensors, f"{embedding}.weight", 0, 2),
            embedding_size=size_of(tensors, f"{embedding}.weight", 1, 2),
            hidden_size=size_of(tensors, f"{cell}.U_f.weight", 0, 2) // 2,
            num_classes=size_of(tensors, f"{linear}.weight", 0, 2) if has_head else 0,
            dtype=dtype,
        )
        model = cls(config)
        recipes = _recipes(config, embedding, cell)
        if model.head is not None:
            recipes |= linear_recipes("head", linear, config.hidden_size, config.num_classes)
        return model._fill_from(tensors, recipes)

    def cells(self, *, max_batch: int = DEFAULT_MAX_BATCH) -> list[RecurrentCell]:
        """Return both cells. Inner nodes run first, to finish requests."""
        return [
            RecurrentCell(self.leaf, "leaf", max_batch, priority=0),
            RecurrentCell(self.inner, "inner", max_batch, priority=1),
        ]

    def request(self, tree: Any) -> BinaryTree:
        """Make a request of nested pairs of word ids, such as `((5, 9), 2)`; a single word is a tree.

        Raises:
          RequestError: it is not a tree; the field names the place.
        """
        return from_pairs(tree, self.config.vocab_size)

    def request_from_arrays(self, words: Any, children: Any) -> BinaryTree:
        """Make a request of arrays, which is much faster; see `tree.from_arrays`.

        Raises:
          RequestError: it is not a tree; the field names the node.
        """
        return from_arrays(words, children, self.config.vocab_size)

    def unfold(self, request: BinaryTree, graph: GraphBuilder) -> None:
        """Add the leaves, each a subgraph of its own, and the inner nodes above them."""
        check_requests(BinaryTree, request)
        num = len(request.words)
        root = graph.nodes(self.leaf, np.empty((num, 0), np.int64), token=request.words)[-1]
        if len(request.children):
            root = graph.nodes(self.inner, request.children)[-1]
        graph.returns(root)

    def unfold_many(self, requests: Sequence[BinaryTree], graph: GraphBuilder) -> None:
        """Add several trees at once."""
        check_requests(BinaryTree, *requests)
        words, children = [one.words for one in requests], [one.children for one in requests]
        graph.trees(self.leaf, self.inner, words, children)


def _recipes(config: TreeLSTMConfig, embedding: str, cell: str) -> dict[str, Recipe]:
    """Return the recipes of the cells' parameters. Torch's are [out, in], and both cells share b_iou."""
    size, width = config.hidden_size, config.embedding_size
    bias = (f"{cell}.b_iou", (1, 3 * size))

    def gates_of_inner(iou: jax.Array, forget: jax.Array) -> jax.Array:
        return jnp.concatenate([iou, forget]).T

    def bias_of_inner(iou: jax.Array, forget: jax.Array) -> jax.Array:
        return jnp.concatenate([iou.ravel(), forget])

    return {
        "leaf.embedding.weight": table(f"{embedding}.weight", config.vocab_size, width),
        "leaf.gates.weight": Recipe((f"{cell}.W_iou.weight",), ((3 * size, width),), jnp.transpose),
        "leaf.gates.bias": Recipe((bias[0],), (bias[1],), jnp.ravel),
        "inner.gates.weight": Recipe(
            (f"{cell}.U_iou.weight", f"{cell}.U_f.weight"),
            ((3 * size, 2 * size), (2 * size, 2 * size)),
            gates_of_inner,
        ),
        "inner.gates.bias": Recipe((bias[0], f"{cell}.U_f.bias"), (bias[1], (2 * size,)), bias_of_inner),
    }
