"""The packaged chat model remembers what it was told, wherever the KV cache has been meanwhile.

Many people's facts take long; `test_demo` asks for eight people's, from either tier and from none.
"""

from __future__ import annotations

import json
import math
import types

import pytest

from pensieve_jax.model_source import DEFAULT_MODEL
from pensieve_lab.chat_training.served_recall import GREETINGS, ServedCases
from tests.launching import load, optimized

check_recall = load("check_recall")
NUM_CASES = 32
FIGURES = {"recall_percent": check_recall.MIN_RECALL_PERCENT, "num_in_place": 1, "num_returns": 100}
REACHED = {"ample": FIGURES, "small": FIGURES, "alone": {"recall_percent": 29}}  # by a hair
_lines: list[str] = []


@pytest.fixture
def document(launch, capsys):
    """Return the program's report of held-out facts among its own talk, run once.

    It computes for longer than it compiles, so it is compiled with optimization.
    """
    if not _lines:
        sizes = {"ample_gpu_pages": 400, "gpu_pages": 18, "cpu_pages": 62, "max_context_tokens": 512}
        with optimized():
            status = launch(
                "check_recall",
                shared_llm=False,
                model=DEFAULT_MODEL,
                num_cases=NUM_CASES,
                num_transcripts=2,
                **sizes,
            )
        _lines.extend(capsys.readouterr().out.splitlines())
        assert status == 0, "\n".join(_lines)
    return json.loads(_lines[-1])["results"]


@pytest.mark.long
def test_what_was_told_is_recalled_wherever_its_state_has_been(document):
    ample, small = document["ample"], document["small"]
    assert ample["recall_percent"] >= check_recall.MIN_RECALL_PERCENT
    assert document["num_different"] == 0
    ties = document["ties"]
    assert ties["num"] <= 1 and (ties["max_gap"] or 0) < 1e-5, "a few units in the last place of float32"
    lost = abs(small["recall_percent"] - ample["recall_percent"]) * NUM_CASES / 100
    assert lost <= ties["num"]
    assert ample["num_returns"] == small["num_returns"] > 4 * NUM_CASES
    assert ample["num_swapped_in"] == ample["num_recomputed"] == 0
    assert small["num_in_place"] <= 0.01 * small["num_returns"], "the last conversation may find its state"
    assert small["num_swapped_in"] + small["num_recomputed"] >= small["num_returns"] - small["num_in_place"]
    assert min(small["num_swapped_in"], small["num_recomputed"]) > small["num_returns"] / 4


@pytest.mark.long
def test_without_the_history_it_is_not(document):
    assert document["alone"]["recall_percent"] < 30
    assert document["alone"]["num_returns"] == 0
    assert all(document[name].keys() >= figures.keys() for name, figures in REACHED.items())


@pytest.mark.long
def test_a_greeting_is_not_answered_with_an_invented_fact(document):
    """Rarely to greetings that training never saw, and never to common ones."""
    num, num_invented = document["greetings"]["num"], document["greetings"]["num_invented"]
    invented = [line for line in _lines if line.startswith("invented: ")]
    assert num > 30 and num_invented == len(invented) <= 0.05 * num, "\n".join(invented)
    usual = ("Hi", "Hello!", "hello", "Hey there", "Good morning", "good evening", "How are you?", "Thanks.")
    assert set(usual) <= set(GREETINGS)
    assert not [line for line in invented if line.startswith(tuple(f"invented: {one!r}:" for one in usual))]


@pytest.mark.long
def test_new_constructions_are_reported_beside_the_others(document):
    ample = document["ample"]
    for name in ("new_constructions", "test_constructions"):
        new = document[name]
        assert new.keys() == ample.keys()
        assert new["num_returns"] == new["num_in_place"] > 4 * NUM_CASES
        assert sum(number for _, number in new["by_kind"].values()) == NUM_CASES


@pytest.mark.long
def test_the_first_conversations_are_printed_as_they_were_served(document):
    heads = [line for line in _lines if line.startswith("**Case ")]
    assert [head[:8] for head in heads] == ["**Case 0", "**Case 1"] * 2
    num_said = sum(line.startswith("> ") and not line.startswith("> **") for line in _lines)
    assert num_said == sum(line.startswith("> **") for line in _lines) >= 4 * 5


@pytest.mark.parametrize(
    ("name", "figure", "value", "says"),
    [
        ("ample", "recall_percent", 74, "with ample tiers"),
        ("small", "recall_percent", 74, "with small tiers"),
        ("alone", "recall_percent", 30, "without the history"),
        ("small", "num_in_place", 2, "fewer --gpu_pages"),
    ],
)
def test_a_missed_target_is_told(name, figure, value, says):
    changed = REACHED | {name: REACHED[name] | {figure: value}}
    missed = check_recall.missed_targets(changed, num_different=0, invented_percent=0)
    assert len(missed) == 1 and says in missed[0]


def test_replies_that_depend_on_the_tiers_and_invented_facts_are_told():
    assert check_recall.missed_targets(REACHED, num_different=0, invented_percent=5) == []
    [different, invented] = check_recall.missed_targets(REACHED, num_different=1, invented_percent=6)
    assert different == "1 conversations differ between ample and small tiers"
    assert invented == "more than 5% of the greetings are answered with an invented fact"


@pytest.mark.parametrize(("gap", "is_tie"), [(1.9e-6, True), (0.5, False), (math.inf, False)])
def test_replies_that_differ_are_judged_by_the_dense_reference(monkeypatch, gap, is_tie):
    """The reference is loaded only for the two that differ, and asked about them."""
    asked = []

    class Reference:
        def __init__(self, model):
            pass

        def gap(self, *histories):
            asked.append(histories)
            return gap

    monkeypatch.setattr(check_recall, "load_model", lambda *_, **__: None)
    monkeypatch.setattr(check_recall, "resolve_model", lambda name: name)
    monkeypatch.setattr(check_recall, "DenseReference", Reference)
    monkeypatch.setattr(check_recall, "FLAGS", types.SimpleNamespace(model="any"))
    ample, small = (ServedCases((), (), histories) for histories in ([[1, 2], [3, 4]], [[1, 2], [3, 5]]))
    assert check_recall.differences(ample, ample) == [] == asked
    [found] = check_recall.differences(ample, small)
    assert found == (1, gap) and found.is_tie == is_tie
    assert asked == [([3, 4], [3, 5])]
