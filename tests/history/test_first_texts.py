"""The first text of an input, found by reading only its beginning."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pensieve_jax.history import trees
from pensieve_jax.history.first_texts import MAX_BYTES, first_text
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.sqlite_store import SQLiteHistoryStore
from tests.history.test_response_trees import respond


def item(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "status": "completed", "role": role, "content": parts, "id": "msg_1"}


def test_a_list_of_trees_reads_only_the_beginnings_of_long_inputs(tmp_path, monkeypatch):
    path, parsed = tmp_path / "chats.sqlite", []
    loads = json.loads
    with SQLiteHistoryStore(path, fingerprint="f") as store, HistoryReader(path, fingerprint="f") as reader:
        respond(store, 1.0, '\u00e9"\\ ' * 100_000)
        respond(store, 2.0, "short")
        monkeypatch.setattr(json, "loads", lambda text: parsed.append(len(text)) or loads(text))
        listed = [row.first_text for row in reader.trees("ann")]
    assert listed == ["short", ('\u00e9"\\ ' * 100)[: trees.MAX_FIRST_CHARACTERS]]
    assert max(parsed, default=0) <= MAX_BYTES


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([item("system", "be brief"), item("user", "hi", " there"), item("user", "x" * 9)], "hi there"),
        ([item("system", "be brief"), item("assistant", "I am"), item("user", "x" * 9)], "x"),
        ([item("system", '"role": "user", "text": "no"'), item("user", "x" * 9)], "x"),
        ([{"role": "user", "content": "as it is"}, item("user", "x" * 9)], "as it is"),
        ([item("user"), item("user", "x" * 9)], ""),
        ([item("system", "x" * 9)], ""),
        ([], ""),
    ],
)
def test_the_first_of_several_texts_is_returned(items, told):
    """However it is cut, the result is the beginning of the text, and nothing else."""
    text = json.dumps(items)
    assert first_text(text).startswith(told)
    for end in range(len(text)):
        assert told.startswith(first_text(text[:end])) or first_text(text[:end]).strip("x") == ""


def test_no_partial_character_is_returned():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    said = "".join(draw.choice('a\u00e9\u4e2d\U0001f600"\\\n/') for _ in range(40))
    text = json.dumps([item("system", "s"), item("user", said)])
    lengths = set()
    for end in range(len(text)):
        found = first_text(text[:end])
        assert said.startswith(found)
        found.encode()
        lengths.add(len(found))
    assert lengths == set(range(len(said) + 1))
