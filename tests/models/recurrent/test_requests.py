"""Requests for a model's cells that the model did not create."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from model_defs.recurrent import LSTM, Mamba, Seq2Seq, TreeLSTM
from model_defs.recurrent.errors import RequestError
from model_defs.recurrent.requests import MAX_STEPS

LINES = LSTM.random(hidden_size=4, vocab_size=50)
MODELS: list[Any] = [
    LINES,
    TreeLSTM.random(hidden_size=4, vocab_size=50),
    Seq2Seq.random(hidden_size=4, vocab_size=50),
    Mamba.random(hidden_size=4, vocab_size=50, num_layers=1),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_request_of_another_model_is_refused(model: Any) -> None:
    """It once raised an AttributeError from within `unfold`."""
    other = MODELS[1].request((3, 4)) if model is LINES else LINES.request([3])
    graph: Any = SimpleNamespace()
    for bad in (5, None, "x", [3], other):
        with pytest.raises(RequestError, match=r"request is .*from the model's request"):
            model.unfold(bad, graph)
        if hasattr(model, "unfold_many"):
            good = model.request([3] if model is LINES else (3, 4))
            with pytest.raises(RequestError, match=r"requests\[1\] is "):
                model.unfold_many([good, bad], graph)


def test_lists_of_different_lengths() -> None:
    """It once raised numpy's ValueError, which names no field."""
    trees = MODELS[1]
    for request, arguments, message in (
        (
            LINES.request,
            ([[1], [2, 3]],),
            r"token_ids is \[\[1\], \[2, 3\]\], but must be at least one token id",
        ),
        (MODELS[2].request, ([1, [2]],), "source_ids is "),
        (MODELS[3].request, ([[1], [2, 3]], 5), "prompt_ids is "),
        (trees.request_from_arrays, ([1, [2]], [[0, 1]]), "words is "),
        (trees.request_from_arrays, ([1, 2, 3], [[0, 1], [2]]), r"children is .* must be ints \[n, 2\]"),
    ):
        with pytest.raises(RequestError, match=message):
            request(*arguments)


@pytest.mark.parametrize("most", [MAX_STEPS + 1, 10**12])
def test_more_steps_than_any_engine_takes(most: int) -> None:
    """An array of that length was once created before the refusal: 4 GB, or a MemoryError."""
    seq2seq, mamba = MODELS[2:]
    for field, make in (
        ("max_new_tokens", lambda: mamba.request([3], most)),
        ("num_target_steps", lambda: seq2seq.request([3], num_target_steps=most)),
        ("max_extra_steps", lambda: seq2seq.request([3], max_extra_steps=most)),
    ):
        with pytest.raises(RequestError, match=f"{field} is {most}, but must be at most {MAX_STEPS}"):
            make()
    assert mamba.request([3], MAX_STEPS).max_new_tokens == MAX_STEPS
