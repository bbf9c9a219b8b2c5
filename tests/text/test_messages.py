"""Messages and tools are checked before anything is rendered, with errors that name the field."""

import json

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text import check_messages, check_tools
from pensieve_jax.text.call_arguments import MAX_DEPTH, CallArguments, canonical_arguments, parse_arguments
from pensieve_jax.text.messages import call_ids, check_results, num_characters
from tests.text.tool_templates import call, result

USER = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("a", "f", '{"x": 1}')]}


def test_messages_with_calls_and_results_are_copied() -> None:
    given = [USER, {"role": "assistant", "tool_calls": CALLS["tool_calls"]}, result("a", "1")]
    checked = check_messages(given)
    assert checked == (USER, CALLS, result("a", "1"))
    given[1]["tool_calls"][0]["id"] = "b"
    assert call_ids(checked) == ["a"]
    given[1]["tool_calls"][0]["id"] = "a"
    check_results(checked)
    assert num_characters(checked) == 2 + len('f({"x": 1})') + 1


def test_values_that_ask_for_nothing_are_left_out() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "tool_call_id": None, "name": None}
    assert check_messages([message]) == ({"role": "assistant", "content": "x"},)
    blank = check_messages([{"role": "assistant", "content": "", "tool_calls": [call("a", "f", " ")]}])
    assert blank[0]["tool_calls"] == [call("a", "f", "{}")]


def test_the_texts_of_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": None}, "content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0]"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": CALLS["tool_calls"]}, "tool_calls"),
        ({"role": "user", "content": "x", "name": 1}, "name"),
        ({"role": "assistant", "content": "x", "reasoning": ["y"]}, "reasoning"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{**call("a", "f", "{}"), "type": "custom"}]},
            "tool_calls[0].type",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call("", "f", "{}")]}, "tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [call("a", "", "{}")]}, "tool_calls[0].function.name"),
        *(
            (
                {"role": "assistant", "tool_calls": [call("a", "f", "{}"), call("b", "f", broken)]},
                "tool_calls[1].function.arguments",
            )
            for broken in ('{"x": ', "[1]", "3", '{"x": NaN}', "[" * 100_000, {"x": 1})
        ),
    ],
)
def test_malformed_messages_are_named(message: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_messages([USER, message])
    assert caught.value.field == f"messages[1].{field}"


@pytest.mark.parametrize(
    ("messages", "known", "wrong"),
    [
        ([result("a", "x")], (), 0),
        ([result("a", "x")], ("b",), 0),
        ([USER, result("a", "x"), CALLS], (), 1),
        ([CALLS, USER, result("a", "x"), result("b", "x")], (), 3),
        ([result("b", "x"), CALLS, result("a", "x")], ("b",), None),
    ],
)
def test_a_result_follows_its_call(messages: list[dict], known: tuple[str, ...], wrong: int | None) -> None:
    if wrong is None:
        check_results(messages, known)
        return
    with pytest.raises(InvalidRequestError, match="tool call") as caught:
        check_results(messages, known, "input")
    assert caught.value.field == f"input[{wrong}].tool_call_id"


def test_spellings_of_the_same_arguments_are_equal() -> None:
    first = canonical_arguments('{"a": 1.0, "b": [1, {"c": "é"}]}')
    assert first == canonical_arguments('{"b":[1,{"c":"\\u00e9"}],\n "a":1}')
    assert first != canonical_arguments('{"a": 1.5, "b": [1, {"c": "é"}]}')
    assert canonical_arguments("") == canonical_arguments("{}") == "{}"
    assert canonical_arguments('{"a":') == '{"a":' != canonical_arguments('{"a": ')


@pytest.mark.parametrize(("start", "end"), [('{"a":', "}"), ("[", "]")])
def test_the_depth_of_arguments_is_limited(start: str, end: str) -> None:
    def nested(depth: int) -> str:
        return '{"a":' + start * (depth - 1) + "1" + end * (depth - 1) + "}"

    assert parse_arguments(nested(MAX_DEPTH))
    assert canonical_arguments(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 1_200, 100_000):
        with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
            parse_arguments(nested(depth))
        assert canonical_arguments(nested(depth)) == nested(depth)


def test_arguments_are_an_object_and_its_text() -> None:
    arguments = CallArguments.canonical('{"b":1,"a":"é"}')
    assert arguments == {"b": 1, "a": "é"} and list(arguments) == ["b", "a"]
    assert str(arguments) == '{"b": 1, "a": "é"}' == json.dumps(arguments, ensure_ascii=False)
    assert "<" + arguments + ">" == f"<{arguments}>"
    assert str(CallArguments.sampled('{"b":1}')) == '{"b":1}'
    broken = CallArguments.sampled('{"b":')
    assert broken == {} and str(broken) == '{"b":'


def test_tools_have_one_form() -> None:
    given = {"function": {"strict": True, "parameters": None, "name": "f", "description": "d"}}
    (tool,) = check_tools([given])
    assert json.dumps(tool) == json.dumps(
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    )


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("f", "tools"),
        (["f"], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "description": 1}}],
            "tools[0].function.description",
        ),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": {1}}}}], "tools[0].function"),
        ([{"function": {"name": "f"}}] * 2, "tools[1].function.name"),
    ],
)
def test_malformed_tools_are_named(tools: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools(tools)
    assert caught.value.field == field


@pytest.mark.parametrize("depth", [100, 1_000, 1_200, 1_480, 2_900, 100_000])
def test_arguments_of_any_depth_have_a_canonical_text(depth):
    for text in ('{"a": ' + "[" * depth + "]" * depth + "}", '{"a": ' * depth + "1" + "}" * depth):
        assert canonical_arguments(text) in (text, text.replace(" ", ""))
