"""Requests of recurrent models by loops and recursion over their cells, one at a time, without an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_defs.recurrent import LSTM, Seq2Seq

type State = Mapping[str, jax.Array]


def plain(model: Any) -> Callable[[Any], list[np.ndarray]]:
    """Return a function from a request to its returned and then its emitted values; fields in name order."""
    cells = {one.name: jax.jit(one.module.__call__) for one in model.cells()}
    if isinstance(model, LSTM):
        return functools.partial(_sentence, cells, model)
    if isinstance(model, Seq2Seq):
        return functools.partial(_translation, cells, model)
    return functools.partial(_tree, cells)


def _nothing(module: Any) -> State:
    return {name: jnp.zeros((1, *one.shape), one.dtype) for name, one in module.state.items()}


def _word(value: Any) -> jax.Array:
    return jnp.array([value], jnp.int32)


def _fields(state: State) -> list[np.ndarray]:
    return [np.asarray(state[name][0]) for name in sorted(state)]


def _sentence(cells: Any, model: LSTM, request: Any) -> list[np.ndarray]:
    state = _nothing(model)
    for word in request.token_ids:
        state = cells["lstm"]((state,), token=_word(word))
    return _fields(state)


def _translation(cells: Any, model: Seq2Seq, request: Any) -> list[np.ndarray]:
    state, tokens = _nothing(model.encoder), []
    for word in request.source_ids:
        state = cells["encoder"]((state,), token=_word(word))
    while len(tokens) < request.num_steps and request.eos_id not in tokens:
        state = cells["decoder"]((state,))
        tokens.append(int(state["token"][0]))
    return [np.array(tokens)]


def _tree(cells: Any, request: Any) -> list[np.ndarray]:
    num_leaves = len(request.words)

    def state(node: int) -> State:
        if node < num_leaves:
            return cells["leaf"]((), token=_word(request.words[node]))
        return cells["inner"](tuple(state(int(child)) for child in request.children[node - num_leaves]))

    return _fields(state(num_leaves + len(request.children) - 1))
