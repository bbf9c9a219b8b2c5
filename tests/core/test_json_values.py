"""Copies of JSON values, and their limit."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.core import json_values
from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.json_values import MAX_VALUES, json_copy


def test_a_copy_is_equal_and_shares_nothing():
    given = {"a": [1, {"b": "é"}], "c": None}
    copied = json_copy(given, "x")
    assert copied == given and copied["a"] is not given["a"]


@pytest.mark.parametrize("value", [{"a": "b", "c": ""}, {}, {str(at): "x" for at in range(100)}])
def test_a_copy_of_texts_is_what_json_makes_of_them(value):
    copied = json_copy(value, "x")
    assert copied == json.loads(json.dumps(value)) and list(copied) == list(value)
    copied["new"] = "y"
    assert "new" not in value


@pytest.mark.parametrize("value", [{"a": "\ud800"}, {"\ud800": "a"}, {"a": ["\ud800"]}])
def test_half_a_character_is_refused(value):
    with pytest.raises(InvalidRequestError, match="without lone surrogates"):
        json_copy(value, "x")


def test_names_and_texts_of_other_classes_become_plain():
    class Text(str):
        pass

    copied = json_copy({1: Text("a")}, "x")
    assert copied == {"1": "a"} and type(copied["1"]) is str


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1.5] * (MAX_VALUES + 1)},
        {"a": [[1, 2]] * (MAX_VALUES // 2)},
        {"a": [{"b": 1}] * (MAX_VALUES // 2)},
        {str(at): at for at in range(MAX_VALUES)},
    ],
)
def test_too_many_values_are_refused_before_they_are_encoded(monkeypatch, value):
    monkeypatch.setattr(json_values.json, "dumps", lambda *args, **kwargs: pytest.fail("it was encoded"))
    with pytest.raises(InvalidRequestError) as caught:
        json_copy(value, "tools[3]")
    assert str(caught.value) == "tools[3] is 'over 250,000 values', but must be at most 250,000 JSON values."


def test_values_up_to_the_limit_are_copied():
    given = {"a": [1] * (MAX_VALUES - 2)}
    assert json_copy(given, "x") == given
