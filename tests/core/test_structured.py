"""The form of a reply: what can be asked for, and what is refused before any library sees it."""

from __future__ import annotations

import dataclasses

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.structured import MAX_GRAMMAR_BYTES, StructuredOutput


def test_forms_are_made_of_values():
    assert StructuredOutput.json_schema({"type": "string"}).text == '{"type":"string"}'
    assert StructuredOutput.json_schema('{"type": "string"}').text == '{"type": "string"}'
    assert StructuredOutput.json_schema(True).text == "true"
    assert StructuredOutput.choice(("a", "é")).choices == ["a", "é"]
    assert StructuredOutput.json_object() == StructuredOutput("json_object")
    assert StructuredOutput.regex("a+").text == StructuredOutput.grammar("a+").text
    assert len({StructuredOutput.regex("a"), StructuredOutput.regex("a"), StructuredOutput.grammar("a")}) == 2


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StructuredOutput("xml", "a"), "structured.kind"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("regex", 5), "structured.text"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("regex", "\ud800"), "structured.text"),
        (lambda: StructuredOutput("regex", ""), "structured.regex"),
        (lambda: StructuredOutput("grammar", ""), "structured.grammar"),
        (lambda: StructuredOutput("json_object", "{}"), "structured.json_object"),
        (lambda: StructuredOutput("json_schema", "{"), "structured.json_schema"),
        (lambda: StructuredOutput("json_schema", "[" * 60_000), "structured.json_schema"),
        (lambda: StructuredOutput.json_schema([1]), "structured.json_schema"),  # type: ignore[arg-type]
        (lambda: StructuredOutput.json_schema({"a": {1, 2}}), "structured.json_schema"),
        (lambda: StructuredOutput.json_schema({"a": float("nan")}), "structured.json_schema"),
        (lambda: StructuredOutput.choice([]), "structured.choice"),
        (lambda: StructuredOutput.choice(["a", ""]), "structured.choice"),
        (lambda: StructuredOutput.choice("ab"), "structured.choice"),
        (lambda: StructuredOutput("regex", "a", after="x" * 65), "structured.after"),
        (lambda: StructuredOutput("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "structured.regex"),
    ],
)
def test_what_no_grammar_can_be_is_refused(make, field):
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.field == field and len(str(caught.value)) < 400


def test_a_form_ends_the_reply_by_itself():
    form = StructuredOutput("regex", "a" * MAX_GRAMMAR_BYTES)
    params = SamplingParams(structured=form)
    assert dataclasses.replace(params, seed=1).structured is form
    with pytest.raises(InvalidRequestError, match="ignore_eos is True, but must be False with structured"):
        SamplingParams(structured=form, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="structured is 'json'"):
        SamplingParams(structured="json")  # type: ignore[arg-type]
