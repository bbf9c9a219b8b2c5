"""Addition of many sentences, or many trees, at once.

Owns: the checks of their arrays, and the pieces that they become.
Does not know: requests of other shapes.

Unfolding requests one by one runs Python code for each. This module concatenates and checks the arrays of all
requests together. To learn which request is invalid, the caller unfolds them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve_jax.cellular.cells import CellType
from pensieve_jax.cellular.errors import GraphError
from pensieve_jax.cellular.graph_batch import NO_NODE, GraphBatch, Piece
from pensieve_jax.cellular.integers import INT32, int32s


def add_sentences(pieces: GraphBatch, kind: CellType, words: Sequence[np.ndarray], max_nodes: int) -> None:
    """Add one request per sentence: a chain of its words, ints [n], that returns its last state.

    Raises:
      GraphError: the arrays are not valid sentences.
    """
    flat, lengths = _joined(words)
    if flat is None or not kind.is_chained or len(kind.immediates) != 1 or lengths.max() > max_nodes:
        limit = f"arrays i32[n] of 1 to {max_nodes} words each, for {kind.name}"
        raise GraphError("words", words, limit)
    num, label = len(words), len(pieces.joined)
    ends = (pieces.num_nodes + lengths.cumsum()).tolist()
    starts, labels = [pieces.num_nodes, *ends[:-1]], range(label, label + num)
    pieces.add_immediates(len(flat), [flat])
    pieces.pieces += [
        Piece(start, kind.index, one, False, 0, NO_NODE, None, None)
        for start, one in zip(starts, labels, strict=True)
    ]
    pieces.starts += starts
    pieces.joined += labels
    _end_requests(pieces, ends, range(label + 1, label + 1 + num))


def add_trees(
    pieces: GraphBatch,
    leaf: CellType,
    inner: CellType,
    words: Sequence[np.ndarray],
    children: Sequence[np.ndarray],
    max_nodes: int,
) -> None:
    """Add one request per tree, which returns the state of its root.

    Args:
      pieces: batch that the trees are added to.
      leaf: a type without inputs and with one immediate.
      inner: a type without immediates whose inputs, state, and `leaf`'s state are of one kind.
      words: i32[n] of each tree's leaves, which are its nodes 0 to n - 1.
      children: int[m, fan_in] of each tree's inner nodes, which are n to n + m - 1, the root last.
      max_nodes: most nodes of a tree.

    Raises:
      GraphError: the arrays are not valid trees.
    """
    flat, num_leaves = _joined(words)
    fan_in = len(inner.input_kinds)
    fits = flat is not None and len(children) == len(words) and not leaf.input_kinds
    fits = fits and len(leaf.immediates) == 1 and not inner.immediates
    fits = fits and set(inner.input_kinds) == {inner.state_kind} == {leaf.state_kind}
    below = None
    if fits and _are_of(children, fan_in):
        below = np.concatenate([one.astype(np.int64) for one in children])
    limit = f"trees of at most {max_nodes} nodes each, of {leaf.name} and {inner.name}"
    if flat is None or below is None:
        raise GraphError("words", words, limit)
    num_inner = np.fromiter(map(len, children), np.int64, len(children))
    sizes = num_leaves + num_inner
    firsts = sizes.cumsum() - sizes
    owners = np.arange(len(sizes)).repeat(num_inner)
    own = np.arange(len(below)) - (num_inner.cumsum() - num_inner)[owners] + num_leaves[owners]
    is_tree = (num_inner * fan_in == sizes - 1).all() and sizes.max() <= max_nodes
    is_tree = is_tree and ((below >= 0) & (below < own[:, None])).all()
    read = below + firsts[owners][:, None]
    if not is_tree or np.bincount(read.ravel(), minlength=1).max() > 1:
        raise GraphError("children", children, limit)
    immediates = np.zeros(sizes.sum(), INT32)
    immediates[np.arange(len(flat)) + (num_inner.cumsum() - num_inner).repeat(num_leaves)] = flat
    pieces.has_only_chains = False
    pieces.add_immediates(len(immediates), [immediates])
    _add_pieces(pieces, leaf, inner, firsts, num_leaves, num_inner, read)


def _add_pieces(
    pieces: GraphBatch,
    leaf: CellType,
    inner: CellType,
    firsts: np.ndarray,
    num_leaves: np.ndarray,
    num_inner: np.ndarray,
    read: np.ndarray,
) -> None:
    """Add the pieces of every tree: each leaf is a subgraph, and all inner nodes together are one."""
    base, label = pieces.num_nodes, len(pieces.joined)
    inputs = read + base
    nothing = np.empty((int(num_leaves.max()), 0), np.int64)  # inputs of leaves
    ends, num_labels, begin = [], [], 0
    for first, leaves, above in zip(firsts.tolist(), num_leaves.tolist(), num_inner.tolist(), strict=True):
        start = base + first
        pieces.pieces.append(Piece(start, leaf.index, label, True, 0, NO_NODE, nothing[:leaves], None))
        pieces.starts.append(start)
        label += leaves
        if above:
            below = inputs[begin : begin + above]
            pieces.pieces.append(Piece(start + leaves, inner.index, label, False, 1, NO_NODE, below, None))
            pieces.starts.append(start + leaves)
            label, begin = label + 1, begin + above
        ends.append(start + leaves + above)
        num_labels.append(label)
    pieces.joined += range(len(pieces.joined), label)
    _end_requests(pieces, ends, num_labels)


def _end_requests(pieces: GraphBatch, ends: list[int], num_labels: Sequence[int]) -> None:
    """End requests at these nodes and labels; each returns its last node."""
    returned = len(pieces.returned) + 1
    pieces.ends += zip(ends, num_labels, range(returned, returned + len(ends)), strict=True)
    pieces.returned += [end - 1 for end in ends]
    pieces.places += [0] * len(ends)
    pieces.num_nodes = ends[-1]


def _joined(words: Sequence[np.ndarray]) -> tuple[np.ndarray | None, np.ndarray]:
    """Concatenate arrays to i32; return it with their lengths, or None if one is empty or not of ints [n]."""
    try:
        flat = np.concatenate(words)
    except (ValueError, TypeError):  # none, no sequences, or of different dimensions
        return None, np.zeros(1, np.int64)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    fits = flat.ndim == 1 and lengths.min() > 0
    return int32s(flat) if fits else None, lengths


def _are_of(children: Sequence[np.ndarray], fan_in: int) -> bool:
    return all(
        isinstance(one, np.ndarray) and one.ndim == 2 and one.shape[1] == fan_in and one.dtype.kind in "iu"
        for one in children
    )
