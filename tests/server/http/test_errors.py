"""Errors name fields as the client does."""

from __future__ import annotations

import gc
import weakref

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.server.http.errors import ApiError, as_api_error, renamed_fields
from pensieve_jax.server.turns.structured import AskedForm
from pensieve_jax.server.turns.tool_choice import ToolChoice, form_fields


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("structured.grammar", "tools"),
        ("structured.grammar[0]", "tools[0]"),
        ("structured.kind", "text.format.kind"),
        ("other", "other"),
    ],
)
def test_the_most_exact_name_of_a_field_decides(field: str, expected: str) -> None:
    """Names may begin with others: the form of a reply, and one kind of it."""
    names = {"structured": "text.format", "structured.grammar": "tools", "structured.gram": "x"}
    error = as_api_error(InvalidRequestError(field, "x", "simpler"), names)
    assert error.param == expected and error.message.startswith(f"{expected} is 'x'")


@pytest.mark.parametrize("choice", [ToolChoice(), ToolChoice("required")])
def test_an_error_of_the_grammar_of_calls_names_the_tools(choice: ToolChoice) -> None:
    names = form_fields(choice, AskedForm())
    error = as_api_error(InvalidRequestError("structured.grammar", "x", "simpler"), names)
    assert error.param == "tools"


class Text:
    """A long text, which a test can see go."""


def test_a_renamed_error_keeps_no_text_alive():
    def check() -> None:
        text = Text()
        left.append(weakref.ref(text))
        raise InvalidRequestError("prompt", "long", "short")

    left: list[weakref.ref[Text]] = []
    gc.disable()
    try:
        with pytest.raises(ApiError, match="input is 'long'"), renamed_fields({"prompt": "input"}):
            check()
        assert left[0]() is None
    finally:
        gc.enable()
