"""Reading an existing output file."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.commands.turns_file import read_output

LINE = {"conversation_id": "a", "turn": 0, "token_ids": [1]}


def test_no_output_has_no_lines(tmp_path):
    assert list(read_output(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize(
    "other",
    [
        "",
        '{"conversation_id": "a", "tu',
        "[1]",
        "[" * 100_000,
        "1" * 5000,
        "\udcff",
        json.dumps(LINE | {"conversation_id": ["a"]}),
        json.dumps(LINE | {"turn": {}}),
        json.dumps(LINE | {"token_ids": None}),
    ],
    ids=["blank", "cut", "list", "deep", "digits", "bytes", "id", "turn", "ids"],
)
def test_invalid_lines_are_skipped(tmp_path, other):
    path = tmp_path / "turns.jsonl"
    path.write_text(f"{other}\n{json.dumps(LINE)}\n{other}", encoding="utf-8", errors="surrogateescape")
    assert list(read_output(path)) == [LINE]
