"""The picture of one conversation's chunks: where a turn found each, and refusals of documents."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import ConfigError
from tests.launching import load

draw_tiers = load("pensieve_lab.programs.draw_tiers")
RESULTS = {
    "chunk_tokens": 16,
    "columns": ["gg", "bg", "cb", "dc", "gggg"],
    "turns": [{"column": 0}, {"column": 4}],
}


def test_a_drawn_turn_is_coloured_by_where_it_found_its_chunks():
    assert draw_tiers.colored(RESULTS) == ["gg", "bg", "cb", "dc", "rigg"]
    assert draw_tiers.colored(RESULTS | {"columns": ["gg", "", "", "b", "ggg"]})[4] == "ggg"


def test_a_document_is_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "tiers.json"
    path.write_text(json.dumps({"benchmark": "tier_places", "results": RESULTS}))
    draw_tiers.draw(draw_tiers.read(str(path)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"benchmark": "soak"}', '{"benchmark": "tier_places", "results": {"columns": []}}'],
)
def test_another_document_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--document is .*other\.json"):
        draw_tiers.read(str(path))


@pytest.mark.long
def test_the_engine_moves_drops_and_recomputes_chunks():
    """Later turns find chunks in each place, and what a turn says it did is what the picture shows."""
    results = draw_tiers.serve()
    columns = draw_tiers.colored(results)
    assert {*"".join(columns)} == {*"gbcdir"}
    assert len(columns) == len(draw_tiers.NUM_OTHERS) + 1 + sum(draw_tiers.NUM_OTHERS)
    for turn in results["turns"]:
        shown = columns[turn["column"]]
        size = draw_tiers.CHUNK_TOKENS  # the last chunk has no KV for the turn's last token
        assert 0 <= shown.count("r") * size - turn["recomputed_tokens"] <= size
        assert 0 <= shown.count("i") * size - turn["swapped_in_tokens"] <= size
