"""Tokenizer directories of several kinds give the ids and texts that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.text import IncrementalDetokenizer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
KINDS = sorted(path.name for path in GOLDEN.iterdir())


def cases_of(kind: str) -> dict[str, Any]:
    return json.loads((GOLDEN / kind / "cases.json").read_text(encoding="utf-8"))


def test_there_are_the_kinds_that_checkpoints_have() -> None:
    assert len(KINDS) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str) -> None:
    """`scripts/dev/make_golden_tokenizers.py` has made the cases."""
    cases, tokenizer = cases_of(kind), load_tokenizer(GOLDEN / kind)
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.eos_id) == (cases["bos_id"], cases["eos_id"])
    assert tokenizer.vocab_size == cases["num_ids"]
    for case in cases["texts"]:
        ids = case["ids"]
        if ids[:2] == [tokenizer.bos_id] * 2:  # the text has its own, and gets no second one here
            ids = ids[1:]
        assert tokenizer.encode(case["text"], add_bos=True) == ids, case["text"]
    for case in cases["decoded"]:
        assert tokenizer.decode(case["ids"]) == case["text"], case["ids"]
        assert tokenizer.decode_raw(case["ids"]) == case["raw"], case["ids"]
        stream = IncrementalDetokenizer(tokenizer, ())
        pieces = [stream.push(token_id) for token_id in case["ids"]]
        assert "".join([*pieces, stream.flush()]) == case["text"], case["ids"]
