"""Shapes of requests of recurrent models: lengths, and the contents of users' files."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from pensieve_lab.workload.errors import TraceError, WorkloadError
from pensieve_lab.workload.structures import (
    complete_tree,
    europarl_like,
    read_pairs,
    read_parallel_text,
    read_trees,
    treebank_like,
)


def test_lengths_are_what_the_thesis_says_of_europarl():
    """The mean is 24, 99% are below 100, and none exceeds 330 (section 2.7.3)."""
    pairs = europarl_like(100_000, seed=3)
    assert pairs.target.mean() == pytest.approx(24, abs=0.3)
    assert (pairs.target < 100).mean() == pytest.approx(0.99, abs=0.002)
    assert 250 < pairs.target.max() <= 330 and pairs.target.min() >= 1
    assert np.corrcoef(pairs.source, pairs.target)[0, 1] > 0.8
    cut = europarl_like(20_000, seed=3, at_most=50)
    assert cut.target.max() <= 50 and cut.source.max() <= 50 and cut.target.mean() < pairs.target.mean()
    assert (europarl_like(50, seed=3).target == europarl_like(50, seed=3).target).all()


def test_pairs_of_counts(tmp_path):
    path = tmp_path / "pairs.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("src_en_words,tgt_de_words\n42,33\n0,2\n")
    pairs = read_pairs(path)
    assert pairs.source.tolist() == [33, 2] and pairs.target.tolist() == [42, 1]
    other = tmp_path / "other.csv"
    other.write_text("from,to\n1,2\n")
    assert read_pairs(other).source.tolist() == [1]
    other.write_text("from,to\n1,2\n3,x\n")
    with pytest.raises(TraceError, match="line 3"):
        read_pairs(other)
    other.write_text("from,to\n")
    with pytest.raises(TraceError, match="no line of two counts"):
        read_pairs(other)
    other.write_text("100,90\n1,2\n")
    assert read_pairs(other).source.tolist() == [100, 1]
    for wrong in ("from,to,more\n1,2\n", "from,2\n", "one\n"):
        other.write_text(wrong)
        with pytest.raises(TraceError, match="line 1"):
            read_pairs(other)


def test_lines_of_text(tmp_path):
    german, english = tmp_path / "de", tmp_path / "en"
    german.write_text("Das ist gut .\nJa\n")
    english.write_text("That is good .\n\n")
    pairs = read_parallel_text(german, english)
    assert pairs.source.tolist() == [4, 1] and pairs.target.tolist() == [4, 1]
    english.write_text("That is good .\n")
    with pytest.raises(TraceError, match="en, line 2: it has fewer lines"):
        read_parallel_text(german, english)


def test_trees(tmp_path):
    path = tmp_path / "trees.txt"
    path.write_text("((w,w),(w,(w,w)))\n\nw\n(3 (2 It) (4 (2 2) (3 good)))\n")
    first, leaf, labelled = read_trees(path)
    assert first.num_leaves == 5
    assert first.children.tolist() == [[0, 1], [3, 4], [2, 6], [5, 7]]
    assert leaf.num_leaves == 1 and leaf.children.shape == (0, 2)
    assert labelled.num_leaves == 3 and labelled.children.tolist() == [[1, 2], [0, 3]]


@pytest.mark.parametrize(
    ("line", "num_leaves", "children"),
    [
        ("(5,9)", 2, [[0, 1]]),
        ("((5,9),2)", 3, [[0, 1], [3, 2]]),
        ("(5, (9, 2))", 3, [[1, 2], [0, 3]]),
        ("(2nd,w)", 2, [[0, 1]]),
        ("5", 1, []),
        ("(3 good)", 1, []),
        ("(3 (2 5) (2 9))", 2, [[0, 1]]),
        ("(3 (2 about) (2 10,000))", 2, [[0, 1]]),
        ("(3 (2 2\u00a01/2) (2 stars))", 2, [[0, 1]]),
        ("(3 (2 (2 Yes) (2 ,)) (3 (2 really) (3 good)))", 4, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_words_and_labels_are_told_apart_by_what_is_between(tmp_path, line, num_leaves, children):
    """A label is a number and a space; commas separate nodes without labels, and are words in labelled
    ones."""
    path = tmp_path / "trees.txt"
    path.write_text(f"{line}\n", encoding="utf-8")
    (tree,) = read_trees(path)
    assert (tree.num_leaves, tree.children.tolist()) == (num_leaves, children)


@pytest.mark.parametrize(
    "line",
    [
        "(w,w,w)",
        "((w,w)",
        "w,w",
        "(w,w))",
        "()",
        "(w,)",
        "(ROOT (NN w))",
        "(3 2 w)",
        "(3 w (2 w))",
        "(3 (2 w) (w))",
        "(3 (2 w) (w w))",
        "(2 ())",
        "(3 w) (3 w)",
        "(3 (2 w) (2 w)",
    ],
)
def test_what_is_no_binary_tree(tmp_path, line):
    path = tmp_path / "trees.txt"
    path.write_text(f"(w,w)\n{line}\n")
    with pytest.raises(TraceError, match="line 2"):
        read_trees(path)


def test_deep_trees(tmp_path):
    path = tmp_path / "trees.txt"
    path.write_text("(w," * 5000 + "w" + ")" * 5000)
    (tree,) = read_trees(path)
    assert tree.num_leaves == 5001 and len(tree.children) == 5000


def test_complete_trees():
    tree = complete_tree(16)
    assert tree.num_leaves == 16 and len(tree.children) == 15
    assert sorted(tree.children.ravel().tolist()) == list(range(30))
    with pytest.raises(WorkloadError, match="power of two"):
        complete_tree(12)


def test_trees_are_as_large_and_as_deep_as_the_treebanks():
    """The training part has 19.1 leaves on average, at most 52, and depth 10.1 with 19 leaves."""
    trees = treebank_like(3000, seed=1)
    sizes = np.array([tree.num_leaves for tree in trees])
    assert sizes.mean() == pytest.approx(19.1, abs=0.6) and sizes.max() <= 52
    assert all(len(tree.children) == tree.num_leaves - 1 for tree in trees)
    for tree in trees:
        assert sorted(tree.children.ravel().tolist()) == list(range(2 * tree.num_leaves - 2))
    heights = []
    for tree in trees:
        height = [0] * tree.num_leaves
        for left, right in tree.children.tolist():
            height.append(1 + max(height[left], height[right]))
        if 18 <= tree.num_leaves <= 20:
            heights.append(height[-1])
    assert np.mean(heights) == pytest.approx(10.1, abs=0.6)


@pytest.mark.parametrize("make", [europarl_like, treebank_like])
def test_a_seed_below_0_is_refused_by_name(make):
    """It was numpy's own error, without a name."""
    with pytest.raises(WorkloadError, match="seed is -1, but must be an int of at least 0"):
        make(3, seed=-1)


def _of_two(path):
    return read_parallel_text(path, path)


@pytest.mark.parametrize("read", [read_pairs, read_trees, _of_two])
@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("latin.csv", b"4,5\n\xff,3\n", "line 2: is not UTF-8"),
        ("torn.csv.gz", b"no archive", "is not a whole gzip archive"),
        ("empty.csv", b"", "it has no line"),
    ],
)
def test_what_is_no_text_is_refused_by_file(tmp_path, read, name, data, says):
    """It was a traceback of a codec, of gzip, or of numpy, which drew from an empty array."""
    path = tmp_path / name
    path.write_bytes(data if read is not read_trees else data.replace(b"4,5", b"(a,b)"))
    with pytest.raises(TraceError, match=rf"{name}.*{says}"):
        read(path)


def test_lines_that_end_in_returns_alone_are_no_csv(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes(b"12,13\r5,6\r")
    with pytest.raises(TraceError, match=r"old\.csv, line 1: it is not CSV"):
        read_pairs(path)


def test_a_mark_at_the_beginning_is_no_part_of_a_count(tmp_path):
    """Spreadsheets write a byte order mark before a CSV in UTF-8: the first pair was refused."""
    path = tmp_path / "pairs.csv"
    path.write_bytes(b"\xef\xbb\xbf12,13\r\n5,6\r\n")
    assert read_pairs(path).source.tolist() == [12, 5]
