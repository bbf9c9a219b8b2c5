"""`chat` with tools, results, template arguments and prefills: what is rendered, stored and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax import LLM, SamplingParams, StructuredOutput
from pensieve_jax.core.errors import InvalidRequestError, UnsupportedGrammarError
from pensieve_jax.core.outputs import ToolCall
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.prompts import ChatOptions
from pensieve_jax.text import ChatFormat, ReplyReader, Tokenizer, byte_tokenizer
from pensieve_jax.text.replies import ReplyParts
from tests.fake_llm import fake_llm
from tests.text.test_reply_forms import takes
from tests.text.tool_templates import HERMES, TOOLS, call, result, written

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
# A call is written as the text of its only argument.
TEMPLATE = (
    "{{ tools | length if tools else 0 }}{{ mood }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.text }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=TEMPLATE)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def second_half_is_a_call(
    self: ReplyReader, text: str, template: TemplateInput, *, turn: str = ""
) -> ReplyParts:
    """Read the second half of a reply as a call, if there are tools."""
    if not template.tools:
        return ReplyParts(text)
    half = len(text) // 2
    return ReplyParts(
        text[:half], "", [ToolCall(f"call_{turn}", "look_up", json.dumps({"text": text[half:]}))]
    )


def context_of(llm: LLM, name: str) -> str:
    """Return the context of a conversation's last turn."""
    record = llm.history(name)
    num_reply = len(record.turns[-1].output_token_ids)
    return TOKENIZER.decode_raw(record.token_ids.tolist()[:-num_reply])


def reply_of(llm: LLM, name: str) -> dict[str, Any]:
    """Return the last reply of a conversation as a message."""
    record = llm.history(name)
    turn = record.turns[-1]
    num_before = len(record.token_ids) - len(turn.output_token_ids)
    message = ReplyReader(TOKENIZER).message(
        turn.output_text, turn.output_token_ids, turn.template_input, turn=str(num_before)
    )
    return dict(message)


def test_a_loop_of_calls_in_a_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its context is the rendering of all messages, with the same tools, also after a restart."""
    monkeypatch.setattr(ReplyReader, "parts", second_half_is_a_call)
    path = tmp_path / "chats.sqlite"
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER, path=path)
    messages: list[dict[str, Any]] = [user("what is a cat?")]
    llm.chat(list(messages), PARAMS, conversation_id="a", tools=TOOLS, chat_template_kwargs={"mood": "!"})
    expected = TemplateInput(TOOLS, {"mood": "!"})
    for number in range(3):
        reply = reply_of(llm, "a")
        new = [
            result(reply["tool_calls"][0]["id"], f"found {number}"),
            {"role": "system", "content": "Go on."},
        ]
        llm.chat(new, PARAMS, conversation_id="a")
        messages += [reply, *new]
        whole = ChatFormat(TOKENIZER).token_ids(messages, template_input=expected)
        assert context_of(llm, "a") == TOKENIZER.decode_raw(whole)
        assert llm.history("a").turns[-1].template_input == expected
        assert llm.history("a").turns[-1].messages == tuple(new)
        if number == 1:
            llm.close()
            llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER, path=path)
    llm.chat([user("thanks")], PARAMS, conversation_id="a", tools=[], chat_template_kwargs={})
    assert context_of(llm, "a").startswith("0<|user|>")
    assert llm.history("a").turns[-1].template_input == NO_INPUT
    llm.close()


def test_a_result_must_answer_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplyReader, "parts", second_half_is_a_call)
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    llm.chat([user("hi")], PARAMS, conversation_id="a", tools=TOOLS)
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([result("call_other", "x")], PARAMS, conversation_id="a")
    assert caught.value.field == "messages[0].tool_call_id"
    first = reply_of(llm, "a")["tool_calls"][0]["id"]
    llm.chat([user("so?")], PARAMS, conversation_id="a")
    llm.chat([result(first, "late")], PARAMS, conversation_id="a")
    assert len(llm.history("a").turns) == 3


def test_a_resent_loop_of_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplyReader, "parts", second_half_is_a_call)
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    llm.chat([user("one")], PARAMS, conversation_id="a", tools=TOOLS)
    reply = reply_of(llm, "a")
    answer = result(reply["tool_calls"][0]["id"], "x")
    for resent, num_held in (([user("one"), reply, answer], 2), ([reply, answer], 0)):
        if num_held:
            with pytest.raises(InvalidRequestError, match=f"holds the first {num_held} of these"):
                llm.chat(resent, PARAMS, conversation_id="a")
    llm.chat([answer], PARAMS, conversation_id="a")
    assert len(llm.history("a").turns) == 2


def test_a_prefill_begins_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    messages = [user("hi"), {"role": "assistant", "content": "Sure, "}]
    output = llm.chat(messages, PARAMS, conversation_id="a", continue_final_message=True)
    assert context_of(llm, "a") == "0<|user|>hi<|end|><|assistant|>Sure, "
    turn = llm.history("a").turns[0]
    assert turn.messages == (user("hi"),) and turn.template_input == TemplateInput(prefill="Sure, ")
    llm.chat([user("so")], PARAMS, conversation_id="a")
    assert context_of(llm, "a").startswith(f"0<|user|>hi<|end|><|assistant|>Sure, {output.text}")
    with llm.stream_chat(messages, PARAMS, continue_final_message=True) as stream:
        list(stream)


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_reply_with_tools_and_a_form_is_calls_or_has_the_form(
    monkeypatch: pytest.MonkeyPatch, has_prefix: bool, is_strict: bool
) -> None:
    tokenizer = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=HERMES)
    llm, _ = fake_llm(monkeypatch, tokenizer=tokenizer)
    answer = StructuredOutput.choice(["yes", "no"])
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "strict": is_strict,
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            },
        }
    ]
    params = SamplingParams(structured=answer)
    system = {"role": "system", "content": "Be brief."}
    prefix = llm.share_prefix([system], tools=tools) if has_prefix else None
    spec = llm._prompts.chat_turn([user("hi")], params, prefix=prefix, options=ChatOptions(tools))
    form = spec.params.structured
    assert form is not None
    for text in ("yes", "no", written("add", '{"a": 1}')):
        assert takes(tokenizer, form, text)
    assert spec.template_input.reply.has_form
    assert takes(tokenizer, form, written("add", '{"b": 1}')) is not is_strict
    for text in ("perhaps", "", "yes" + written("add", '{"a": 1}'), written("now", "{}")):
        assert not takes(tokenizer, form, text)
    plain = llm._prompts.chat_turn([user("hi")], params)
    assert plain.params.structured == answer
    form = llm._prompts.chat_turn([user("hi")], prefix=prefix, options=ChatOptions(tools)).params.structured
    assert (form is not None) is is_strict
    if form is not None:
        for text in ("perhaps", written("add", '{"a": 1}')):
            assert takes(tokenizer, form, text)
        assert not takes(tokenizer, form, written("add", '{"b": 1}'))


@pytest.mark.parametrize(
    "messages",
    [
        [user("hi")],
        [{"role": "assistant", "content": "Sure"}],
        [user("hi"), {"role": "assistant", "content": "x", "tool_calls": [call("a", "f", "{}")]}],
    ],
)
def test_what_cannot_be_continued(monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]]) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        llm.chat(messages, PARAMS, continue_final_message=True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"chat_template_kwargs": {"moood": 1}}, "chat_template_kwargs.moood"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"mood": {1}}}, "chat_template_kwargs"),
    ],
)
def test_options_that_cannot_be_rendered(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], field: str
) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([user("hi")], PARAMS, **options)
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError) as caught:
        llm.share_prefix([user("hi")], **options)
    assert caught.value.field == field


def test_several_conversations_have_the_same_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    llm.chat([[user("a")], [user("b")]], PARAMS, conversation_ids=["a", "b"], tools=TOOLS)
    assert [context_of(llm, name)[0] for name in ("a", "b")] == ["2", "2"]


def test_a_shared_prefix_brings_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    system = {"role": "system", "content": "Be kind. " * 10}
    prefix = llm.share_prefix([system], tools=TOOLS, chat_template_kwargs={"mood": "?"})
    llm.chat([user("a")], PARAMS, conversation_id="a", prefix=prefix)
    llm.chat([user("b")], PARAMS, conversation_id="a")
    assert context_of(llm, "a").startswith("2?<|system|>Be kind.")
    with pytest.raises(InvalidRequestError, match="prefix"):
        llm.chat([user("a")], PARAMS, conversation_id="b", prefix=prefix, tools=[])
    with pytest.raises(InvalidRequestError) as caught:
        llm.share_prefix("text", tools=TOOLS)
    assert caught.value.field == "tools"


def test_an_error_of_a_strict_tools_schema_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=HERMES)
    llm, _ = fake_llm(monkeypatch, tokenizer=tokenizer)
    error = UnsupportedGrammarError("structured.frame", "start: call", "within (not at 2(11))")

    def submit(specs: object) -> None:
        raise error

    monkeypatch.setattr(llm.engine, "submit", submit)
    schemas = ({"type": "object"}, {"type": "object", "properties": {"a": {"not": {}}}})
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
        for name, schema in zip(("add", "now"), schemas, strict=True)
    ]
    params = SamplingParams(structured=StructuredOutput.choice(["yes"]))
    with pytest.raises(UnsupportedGrammarError, match="not") as caught:
        llm.chat([user("hi")], params, tools=tools)
    assert caught.value.field == "tools[1].function.parameters"
    with pytest.raises(UnsupportedGrammarError, match="not") as caught:
        llm.stream_chat([user("hi")], params, tools=tools)
    assert caught.value.field == "tools[1].function.parameters"
