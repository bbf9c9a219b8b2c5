"""A small run of `benchmark_grammars`, and its schemas."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.launching import load

grammar_rows = load("pensieve_lab.steps.grammar_rows")


def test_the_schemas_are_valid_and_differ():
    texts = grammar_rows.schemas()
    assert len(set(texts)) == len(texts)
    for text in texts:
        jsonschema.validators.validator_for(json.loads(text)).check_schema(json.loads(text))


@pytest.mark.long
def test_every_share_is_measured(launch, compilation_cache, capsys):
    launch(
        "benchmark_grammars",
        shared_llm=False,
        model="random:llama-tiny",
        rows="1,4",
        shares="50",
        prompt_tokens=32,
        num_steps=4,
        num_repeats=1,
        num_schemas=1,
        compilation_cache_dir=compilation_cache,
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {rows: set(shares) for rows, shares in found["batches"].items()} == {
        "1": {"0", "50"},
        "4": {"0", "50"},
    }
    assert found["batches"]["4"]["0"]["share_of_plain"] == 1
    assert found["num_compilations_while_serving"] == 0
    assert set(found["first_tokens"]) == {"no schema", "new schema", "compiled schema"}
