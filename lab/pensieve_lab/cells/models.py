"""The models of the thesis with random weights, and requests for each.

Owns: the sizes that do not affect time, and where lengths come from.
Does not know: systems or loads.
Called by `cells.model_flags`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model_defs.recurrent import LSTM, Seq2Seq, TreeLSTM
from pensieve_jax.cellular import Cell
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.workload.structures import (
    complete_tree,
    europarl_like,
    read_pairs,
    read_parallel_text,
    read_trees,
    treebank_like,
)

MODELS = ("lstm", "seq2seq", "tree_lstm")
type Requests = Callable[[int, int], Sequence[Any]]
"""Returns `num` requests for a seed."""
_VOCAB_SIZE = 30_000  # section 2.7.4


class Model(NamedTuple):
    """Inputs of an engine, and the requests that are sent to it.

    Attributes:
      model: the model itself.
      cells: its cells, with the requested largest batches.
      unfold, unfold_many: methods of the model; the second may be None.
      requests: returns `num` requests for a seed.
    """

    model: Any
    cells: list[Cell]
    unfold: Callable[..., None]
    unfold_many: Callable[..., None] | None
    requests: Requests


def make(
    name: str,
    *,
    hidden_size: int,
    dtype: str,
    max_batches: Sequence[int],
    data: Sequence[Path],
    num_words: int | None,
) -> Model:
    """Return a model and its requests.

    Args:
      name: one of `MODELS`.
      hidden_size: of all cells.
      dtype: in which the model runs.
      max_batches: largest batch of each cell in order; a single number is for all cells.
      data: one file of length pairs, two of sentences, or one of trees. Without files, lengths are drawn from
        a distribution like that of the thesis' data.
      num_words: words of every sentence, for the bound of figure 2.11, or leaves of every tree, which is then
        complete, for figure 2.15.

    Raises:
      ConfigError: too many or too few batches or files.
    """
    kinds: dict[str, Any] = {"lstm": LSTM, "seq2seq": Seq2Seq, "tree_lstm": TreeLSTM}
    model = kinds[name].random(hidden_size=hidden_size, vocab_size=_VOCAB_SIZE, seed=0, dtype=dtype)
    cells = model.cells()
    if len(max_batches) not in (1, len(cells)):
        named = ", ".join(one.name for one in cells)
        raise ConfigError("--max_batch", list(max_batches), f"one number, or one for each of {named}")
    batches = list(max_batches) * (len(cells) if len(max_batches) == 1 else 1)
    cells = [one._replace(max_batch=most) for one, most in zip(cells, batches, strict=True)]
    most_files = 1 if name == "tree_lstm" else 2
    if len(data) > most_files:
        raise ConfigError("--data", [str(one) for one in data], f"at most {most_files} files, for {name}")
    for one in data:
        if not one.is_file():
            raise ConfigError("--data", str(one), "a file")
    if data and num_words is not None:
        raise ConfigError("--num_words", num_words, "absent with --data, which has lengths of its own")
    draw: dict[str, Callable[..., Any]] = {"lstm": _sentences, "seq2seq": _pairs, "tree_lstm": _trees}
    drawn = draw[name](model, data, num_words)
    return Model(model, cells, model.unfold, getattr(model, "unfold_many", None), drawn)


def _words(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(3, _VOCAB_SIZE, num, dtype=np.int32)


def _sentences(
    model: LSTM, data: Sequence[Path], num_words: int | None
) -> Callable[[int, int], Sequence[Any]]:
    def requests(num: int, seed: int) -> Sequence[Any]:
        rng = np.random.default_rng(seed)
        lengths = _pair_lengths(data, num, seed)[1] if num_words is None else np.full(num, num_words)
        return [model.request(_words(rng, length)) for length in lengths.tolist()]

    return requests


def _pairs(
    model: Seq2Seq, data: Sequence[Path], num_words: int | None
) -> Callable[[int, int], Sequence[Any]]:
    def requests(num: int, seed: int) -> Sequence[Any]:
        rng = np.random.default_rng(seed)
        pairs = zip(*_pair_lengths(data, num, seed), strict=True)
        return [model.request(_words(rng, source), num_target_steps=int(target)) for source, target in pairs]

    return requests


def _trees(
    model: TreeLSTM, data: Sequence[Path], num_words: int | None
) -> Callable[[int, int], Sequence[Any]]:
    def requests(num: int, seed: int) -> Sequence[Any]:
        rng = np.random.default_rng(seed)
        if num_words is not None:
            trees = [complete_tree(num_words)] * num
        else:
            trees = _sample(rng, read_trees(data[0]), num) if data else treebank_like(num, seed=seed)
        return [model.request_from_arrays(_words(rng, one.num_leaves), one.children) for one in trees]

    return requests


def _pair_lengths(data: Sequence[Path], num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if not data:
        drawn = europarl_like(num, seed=seed)
        return drawn.source, drawn.target
    pairs = read_pairs(*data) if len(data) == 1 else read_parallel_text(*data)
    chosen = np.random.default_rng(seed).integers(0, len(pairs.source), num)
    return pairs.source[chosen], pairs.target[chosen]


def _sample(rng: np.random.Generator, everything: Sequence[Any], num: int) -> list[Any]:
    return [everything[place] for place in rng.integers(0, len(everything), num)]
