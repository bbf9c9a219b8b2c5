"""Binary trees of words, as nested pairs and as arrays.

Owns: both forms, their conversion, and their checks.
Does not know: models, or graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from model_defs.recurrent.errors import RequestError
from model_defs.recurrent.requests import as_array, check_ids


@dataclasses.dataclass(frozen=True, slots=True)
class BinaryTree:
    """Tree whose leaves are words.

    The n leaves are nodes 0 to n - 1. Inner nodes follow, children before their parents, the root last.

    Attributes:
      words: i32[n], words of the leaves.
      children: i64[n - 1, 2], left and right child of each inner node.
    """

    words: np.ndarray
    children: np.ndarray


def from_pairs(tree: Any, vocab_size: int) -> BinaryTree:
    """Read a tree of nested pairs, such as `((5, 9), 2)`: an int is a word, a tuple of two an inner node.

    Raises:
      RequestError: the tree contains something else; the field names the place, such as `tree[0][1]`.
    """
    words: list[int] = []
    children: list[list[int]] = []  # inner nodes are numbered down from -1 until the leaves are counted
    # Subtrees to read, each with its parent's number and side. A parent is read before its children.
    todo: list[tuple[Any, int, int]] = [(tree, 0, 0)]
    while todo:
        one, parent, side = todo.pop()
        if isinstance(one, tuple) and len(one) == 2:
            children.append([0, 0])
            own = -len(children)
            todo += [(one[1], own, 1), (one[0], own, 0)]
        elif isinstance(one, int | np.integer) and not isinstance(one, bool) and 0 <= one < vocab_size:
            own = len(words)
            words.append(int(one))
        else:
            limit = f"a word id from 0 to {vocab_size - 1} or a tuple of two subtrees"
            raise RequestError(f"tree{_path(children, parent, side)}", one, limit)
        if parent:
            children[-parent - 1][side] = own
    pairs = np.array(children, np.int64).reshape(-1, 2)
    # Inner nodes were numbered from the root down; reversed, children come before their parents.
    numbered = np.where(pairs < 0, len(words) + len(pairs) + pairs, pairs)
    return BinaryTree(np.array(words, np.int32), numbered[::-1])


def from_arrays(words: Any, children: Any, vocab_size: int) -> BinaryTree:
    """Read a tree from arrays, with inner nodes in any order.

    Args:
      words: int[n], ids of the leaves, which are nodes 0 to n - 1.
      children: int[n - 1, 2], children of the inner nodes, which are nodes n to 2 n - 2.
      vocab_size: size of the vocabulary.

    Returns: the tree. Inner nodes are renumbered unless all children already precede their parents.

    Raises:
      RequestError: a child is not a node, a node has two parents, there are several roots, or there is a
        cycle; the field names the node.
    """
    leaves = check_ids("words", words, vocab_size)
    num = len(leaves)
    limit = "ints [n, 2], the children of inner nodes"
    pairs = as_array("children", children, limit)
    if not pairs.size:
        pairs = np.empty((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise RequestError("children", children, limit)
    pairs = pairs.astype(np.int64)
    total = num + len(pairs)
    bad = np.argwhere((pairs < 0) | (pairs >= total))
    if len(bad):
        node, side = bad[0].tolist()
        value = int(pairs[node, side])
        raise RequestError(f"nodes[{num + node}].children[{side}]", value, f"a node from 0 to {total - 1}")
    times_read = np.bincount(pairs.ravel(), minlength=total)
    if times_read.max(initial=0) > 1:
        node = int(np.argmax(times_read > 1))
        parents = (num + np.flatnonzero((pairs == node).any(axis=1))).tolist()
        raise RequestError(f"nodes[{node}].parents", parents, "one node, which reads it once")
    roots = np.flatnonzero(times_read == 0).tolist()
    if len(roots) > 1:
        raise RequestError(
            f"nodes[{roots[0]}].parents", [], f"one node, since nodes[{roots[-1]}] is the root"
        )
    if (pairs < num + np.arange(len(pairs))[:, None]).all():
        return BinaryTree(leaves, pairs)
    return BinaryTree(leaves, _in_order(pairs, num))


def _in_order(pairs: np.ndarray, num_leaves: int) -> np.ndarray:
    """Renumber inner nodes, each with one parent at most, so that children come before their parents."""
    parent = np.full(num_leaves + len(pairs), -1, np.int64)
    parent[pairs] = num_leaves + np.arange(len(pairs))[:, None]
    waits = np.full(len(pairs), 2)
    order: list[int] = []
    ready = list(range(num_leaves))
    while ready:
        above = int(parent[ready.pop()]) - num_leaves
        if above < 0:
            continue
        waits[above] -= 1
        if not waits[above]:
            order.append(above)
            ready.append(num_leaves + above)
    if len(order) < len(pairs):
        node = num_leaves + int(np.argmax(waits > 0))
        for _ in pairs:  # a waiting node is in a cycle or above one, so going down leads into it
            below = pairs[node - num_leaves]
            node = int(below[0] if below[0] >= num_leaves and waits[below[0] - num_leaves] else below[1])
        below = pairs[node - num_leaves].tolist()
        raise RequestError(f"nodes[{node}].children", below, "nodes that are not its ancestors: no cycles")
    place = np.empty(len(pairs), np.int64)
    place[order] = num_leaves + np.arange(len(pairs))
    moved = pairs[order]
    is_inner = moved >= num_leaves
    moved[is_inner] = place[moved[is_inner] - num_leaves]
    return moved


def _path(children: list[list[int]], node: int, side: int) -> str:
    """Return the path from the root to a child of a node as Python indexes; empty for the root."""
    if not node:
        return ""
    steps = [side]
    while node != -1:
        parent = next(i for i, pair in enumerate(children) if node in pair)
        steps.append(children[parent].index(node))
        node = -parent - 1
    return "".join(f"[{one}]" for one in reversed(steps))
