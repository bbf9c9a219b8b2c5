"""`scripts/dev/check_chat_templates.py` finds contexts that differ, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pensieve_jax.text import ChatFormat, Tokenizer
from tests.launching import load

script = load("scripts.dev.check_chat_templates")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML


def same(tokenizer: Tokenizer) -> Callable[[Sequence[dict[str, str]]], list[int]]:
    return ChatFormat(tokenizer, now=lambda: script.NOW).token_ids


def longer(tokenizer: Tokenizer) -> Callable[[Sequence[dict[str, str]]], list[int]]:
    """Return a reference that writes one more token before a second turn."""
    right = same(tokenizer)
    return lambda messages: [*([0] if len(messages) > 3 else []), *right(messages)]


def nothing(tokenizer: Tokenizer) -> Callable[[Sequence[dict[str, str]]], list[int]]:
    def reference(messages: Sequence[dict[str, str]]) -> list[int]:
        raise ValueError("no")

    return reference


def test_equal_contexts_are_equal_and_all_tokens_stay() -> None:
    found = script.compare(CHATML, same)
    assert set(found) == set(script.cases(CHATML))
    assert {turn.verdict for turns in found.values() for turn in turns} == {"equal"}
    assert found["plain"][1].kept == found["reasoning"][1].kept == found["cut"][1].kept == 1


@pytest.mark.parametrize(
    ("template", "reference", "verdicts"),
    [
        (CHATML, longer, {"equal", "differs"}),
        (CHATML, nothing, {"refused there only"}),
        (NO_SYSTEM, same, {"equal", "refused by both"}),
        (NO_SYSTEM, lambda tokenizer: lambda messages: [1], {"differs", "refused"}),
    ],
)
def test_other_outcomes_are_told_apart(template: str, reference: object, verdicts: set[str]) -> None:
    found = script.compare(template, reference)
    assert set(script.counts_of([found])) == verdicts


def test_a_template_that_does_not_compile_has_no_cases() -> None:
    assert script.compare("{% if %}", same) == {}


@pytest.mark.parametrize(
    ("name", "text", "family"),
    [
        ("models_templates_Qwen-Qwen3-0.6B", "<|im_start|>", "Qwen3"),
        ("unknown", "<|start_header_id|>", "Llama 3"),
        ("unknown", "<|im_start|>", "Hermes, ChatML"),
        ("unknown", "{{ messages }}", "others"),
    ],
)
def test_families_follow_from_the_name_or_else_the_text(name: str, text: str, family: str) -> None:
    assert script.family_of(name, text) == family


def test_the_table_counts_by_family() -> None:
    results = {"qwen3": script.compare(CHATML, same), "x": script.compare(NO_SYSTEM, longer), "y": {}}
    families = {"qwen3": "Qwen3", "x": "others", "y": "others"}
    lines = script.table(results, families).splitlines()
    assert lines[2] == "| Qwen3 | 1 | 18 | 0, 0 | 0 (0) | 100% | 100% |"
    assert lines[3].startswith("| others | 1 |") and "| 0, 0 |" not in lines[3]
    assert lines[4].startswith("| **all** | 2 |") and lines[5] == "1 template(s) did not compile"
