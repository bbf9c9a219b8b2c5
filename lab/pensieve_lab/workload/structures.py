"""Requests of recurrent models: shapes of sentences, pairs of sentences, and trees.

Owns: lengths distributed like Europarl's, and readers of users' own files.
Does not know: words, models, or when requests arrive.

The thesis samples WMT-15's Europarl, German and English, and trees of Stanford's TreeBank (section 2.7.1).
For the former it gives a mean of 24 words, a maximum of 330, and 99% below 100 (section 2.7.3).
"""

from __future__ import annotations

import csv
import itertools
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pensieve_lab.workload.checks import check_count
from pensieve_lab.workload.errors import TraceError, WorkloadError
from pensieve_lab.workload.rows import text_lines

MAX_WORDS = 330
_MU, _SIGMA = 2.914, 0.727  # of the logarithm; they give a mean of 23.9 and 99.0% below 100
_PAIR_MU, _PAIR_SIGMA = -0.053, 0.258  # log of the German/English word ratio, in 10,000 pairs of WMT

# From the 8,544 trees of the TreeBank's training part.
_LEAVES_MEAN, _LEAVES_SPREAD, _MAX_LEAVES, _SHARE_OF_ONE = 19.0, 9.6, 52, 0.55

# A label is a number followed by a space. Words may be numbers, too, and contain non-breaking spaces.
_LABEL = re.compile(r"\(\d+[ \t]")
_PIECE = re.compile(r"(?P<word>\(\d+[ \t]+[^() \t]+[ \t]*\))|(?P<begin>\(\d+[ \t]+(?=\())|(?P<end>\))|[ \t]+")


@dataclass(frozen=True)
class SentencePairs:
    """Lengths of sentence pairs in words.

    Attributes:
      source: i64[n], such as German.
      target: i64[n], such as English.
    """

    source: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class TreeShape:
    """Binary tree: leaves are numbered from 0 in the order of their words, and inner nodes follow.

    Attributes:
      num_leaves: number of words.
      children: i64[inner nodes, 2]; each child has a smaller number than its node. The last node is the root.
    """

    num_leaves: int
    children: np.ndarray


def europarl_like(num: int, *, seed: int, at_most: int = MAX_WORDS) -> SentencePairs:
    """Draw pairs: targets as long as Europarl's English sentences, sources as long as their German versions.

    Args:
      num: number of pairs.
      seed: seed of all random draws.
      at_most: maximum length; longer targets are drawn again, as the thesis samples for figure 2.11.
    """
    check_count("num", num, at_least=1)
    check_count("at_most", at_most, at_least=1)
    check_count("seed", seed, at_least=0)
    rng = np.random.default_rng(seed)
    target = _drawn(rng, num, at_most)
    ratio = np.exp(rng.normal(_PAIR_MU, _PAIR_SIGMA, num))
    source = np.clip(np.rint(target * ratio), 1, at_most).astype(np.int64)
    return SentencePairs(source, target)


def _drawn(rng: np.random.Generator, num: int, at_most: int) -> np.ndarray:
    found = np.empty(0, np.int64)
    while len(found) < num:
        lengths = np.rint(np.exp(rng.normal(_MU, _SIGMA, 2 * num))).astype(np.int64)
        found = np.concatenate([found, lengths[(lengths >= 1) & (lengths <= at_most)]])
    return found[:num]


def treebank_like(num: int, *, seed: int) -> list[TreeShape]:
    """Draw trees as large and deep as the TreeBank's: mean 19.1 words, at most 52, depth 10 with 19 words.

    The left part of a node has one word in 55% of the cases, else a uniform number of words.
    """
    check_count("num", num, at_least=1)
    check_count("seed", seed, at_least=0)
    rng = np.random.default_rng(seed)
    sizes = np.clip(np.rint(rng.normal(_LEAVES_MEAN, _LEAVES_SPREAD, num)), 2, _MAX_LEAVES).astype(int)
    return [_drawn_tree(rng, size) for size in sizes.tolist()]


def _drawn_tree(rng: np.random.Generator, num_leaves: int) -> TreeShape:
    """Split parts from the top; an inner node gets its number after both of its children."""
    todo: list[tuple[int, int] | None] = [(0, num_leaves)]  # parts as ranges of words; None ends a node
    done: list[int] = []
    children = []
    while todo:
        part = todo.pop()
        if part is None:
            right, left = done.pop(), done.pop()
            children.append((left, right))
            done.append(num_leaves + len(children) - 1)
        elif part[1] - part[0] == 1:
            done.append(part[0])
        else:
            start, end = part
            middle = start + 1 if rng.random() < _SHARE_OF_ONE else int(rng.integers(start + 1, end))
            todo += [None, (middle, end), (start, middle)]
    return TreeShape(num_leaves, np.array(children, np.int64).reshape(-1, 2))


def read_pairs(path: Path) -> SentencePairs:
    """Read lengths from a CSV of two columns of word counts, as in the OpenNMT sample.

    A first line of names is skipped. If the names hold "en" and then "de", the columns are English and
    German, and German is the source; otherwise they are source and target. A length of 0 counts as 1.

    Raises:
      TraceError: a row is not two counts.
    """
    rows, names = [], ["", ""]
    reader = csv.reader(text_lines(path))
    try:
        for line, row in enumerate(reader, start=1):
            if line == 1 and len(row) == 2 and not any(one.isdecimal() for one in row):
                names = row
                continue
            if len(row) != 2 or not all(one.isdecimal() for one in row):
                raise TraceError(path, line, f"{row!r} is not two counts of words")
            rows.append([max(int(one), 1) for one in row])
    except csv.Error as error:
        raise TraceError(path, reader.line_num, f"it is not CSV ({error})") from error
    if not rows:
        raise TraceError(path, None, "it has no line of two counts of words")
    first, second = np.array(rows).T
    is_english_first = "en" in names[0].lower().split("_") and "de" in names[1].lower().split("_")
    return SentencePairs(second, first) if is_english_first else SentencePairs(first, second)


def read_parallel_text(source: Path, target: Path) -> SentencePairs:
    """Read the lengths of the lines of two files of sentences, such as Europarl's; spaces separate words.

    Raises:
      TraceError: one file has more lines than the other, or both are empty.
    """
    lengths: list[list[int]] = [[], []]
    lines = itertools.zip_longest(text_lines(source), text_lines(target))
    for line, pair in enumerate(lines, start=1):
        for place, text in enumerate(pair):
            if text is None:
                raise TraceError((source, target)[place], line, "it has fewer lines than the other file")
            lengths[place].append(max(len(text.split()), 1))
    if not lengths[0]:
        raise TraceError(source, None, "it has no line, and neither has the other file")
    return SentencePairs(np.array(lengths[0]), np.array(lengths[1]))


def read_trees(path: Path) -> list[TreeShape]:
    """Read binary trees, one per line: `((w,w),w)`, or the TreeBank's own `(3 (2 It) (4 (2 's) (3 good)))`.

    A line has labels if it begins with a parenthesis, a number and a space.

    Raises:
      TraceError: a line is not a binary tree, or the file has no trees.
    """
    lines = enumerate(text_lines(path), start=1)
    trees = [_tree(path, number, line.strip()) for number, line in lines if line.strip()]
    if not trees:
        raise TraceError(path, None, "it has no line of a tree")
    return trees


def complete_tree(num_leaves: int) -> TreeShape:
    """Make the complete tree of a power of two of leaves, as in figure 2.15.

    Raises:
      WorkloadError: `num_leaves` is not a power of two.
    """
    if num_leaves < 1 or num_leaves & (num_leaves - 1):
        raise WorkloadError("num_leaves", num_leaves, "a power of two")
    inner = np.arange(num_leaves - 1)  # inner node i takes the next pair of nodes as children
    return TreeShape(num_leaves, np.stack([2 * inner, 2 * inner + 1], axis=1))


def _tree(path: Path, number: int, line: str) -> TreeShape:
    """Parse without recursion, since trees may be deep. A node is a leaf's number, or -1 minus an inner
    one's."""
    open_nodes: list[list[int]] = [[]]
    num_leaves, children = 0, []
    pieces = _labelled if _LABEL.match(line) else _unlabelled
    for piece in pieces(path, number, line):
        if piece == "(":
            open_nodes.append([])
        elif piece == ")":
            found = open_nodes.pop()
            if len(found) == 2:
                children.append(found)
                found = [-len(children)]
            if len(found) != 1 or not open_nodes:
                raise TraceError(path, number, f"a node has {len(found)} children, but must have two")
            open_nodes[-1].append(found[0])
        else:
            open_nodes[-1].append(num_leaves)
            num_leaves += 1
    if len(open_nodes) != 1 or len(open_nodes[0]) != 1:
        raise TraceError(path, number, "it is not one tree")
    ids = np.array(children, np.int64).reshape(-1, 2)
    return TreeShape(num_leaves, np.where(ids < 0, num_leaves - 1 - ids, ids))


def _unlabelled(path: Path, number: int, line: str) -> Iterator[str]:
    """Yield parentheses and words of `((w,w),w)`."""
    before = ","
    for piece in re.findall(r"[(),]|[^(),\s]+", line):
        if (piece in (",", ")")) == (before in ("(", ",")):
            raise TraceError(path, number, f"{piece!r} follows {before!r}, but a comma separates two nodes")
        if piece != ",":
            yield piece
        before = piece


def _labelled(path: Path, number: int, line: str) -> Iterator[str]:
    """Yield inner nodes' parentheses and words of the TreeBank's form. A word may contain commas."""
    place = 0
    while place < len(line):
        piece = _PIECE.match(line, place)
        if piece is None:
            rest = reprlib.repr(line[place:])
            raise TraceError(path, number, f"{rest} is neither '(label word)' nor '(label (...) (...))'")
        place = piece.end()
        if piece.lastgroup is not None:
            yield {"word": "a word", "begin": "(", "end": ")"}[piece.lastgroup]
