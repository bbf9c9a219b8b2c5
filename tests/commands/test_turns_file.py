"""Reading an existing output file."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import Output, PromptLogprob, SamplingParams, Usage
from pensieve_jax.commands.conversations_file import InputTurn
from pensieve_jax.commands.turns_file import output_line, read_output

LINE = {"conversation_id": "a", "turn": 0, "token_ids": [1]}


def test_a_line_has_the_log_probabilities_that_were_requested():
    usage = Usage(2, 0, 0, 0, 2, 0)
    scores = (None, PromptLogprob(7, -1.5, 2, {8: -0.5}))
    turn = InputTurn([6, 7], SamplingParams(max_tokens=0, prompt_logprobs=1))
    output = Output("a", (), "", "length", usage, 0, None, scores)
    line = json.loads(json.dumps(output_line(turn, 0, output)))
    entry = {"token_id": 7, "logprob": -1.5, "rank": 2, "top": {"8": -0.5}}
    assert line["prompt_logprobs"] == [None, entry] and "logprobs" not in line


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
