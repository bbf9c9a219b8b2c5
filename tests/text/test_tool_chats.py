"""Conversations with tool calls, results, reasoning and prefills: their contexts, and what stays of them."""

import json
import random

import pytest

from pensieve_jax.core.errors import ChatTemplateError, InvalidRequestError
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.text import ChatFormat, EarlierTurn, ReplyReader
from tests.seeds import new_seed
from tests.text.tool_templates import (
    DEEPSEEK,
    HERMES,
    QWEN3,
    TEMPLATES,
    TOOLS,
    WITH_TOOLS,
    call,
    rendered,
    result,
    tool_tokenizer,
    written,
)

WORDS = ("the", " cat", " sat", "\n", "on", " <", "é", " {", "}", " not", "\n\n", " 42")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


class ToolChat:
    """A conversation with tools, as an engine holds it."""

    def __init__(self, template: str, tools: TemplateInput = WITH_TOOLS):
        self.template = template
        self.tokenizer = tool_tokenizer(template)
        self.format = ChatFormat(self.tokenizer)
        self.reader = ReplyReader(self.tokenizer)
        self.input = tools
        self.turns: list[EarlierTurn] = []
        self.ids: list[int] = []
        self.messages: list[dict] = []

    def turn(self, new: list[dict], reply: str, ids: list[int] | None = None) -> int:
        """Run a turn whose reply is sampled as these ids; return how many earlier tokens it replaced."""
        num_before = len(self.ids)
        keep, prompt = self.format.turn_prompt(self.turns, self.ids, new, template_input=self.input)
        self.ids = [*self.ids[:keep], *prompt]
        self.messages += new
        ids = ids or self.tokenizer.encode(reply, add_bos=False)
        ids = [*ids, self.tokenizer.eos_id]
        template_input = self.format.with_reasoning(self.format.with_calls(self.input), prompt)
        message = self.reader.message(reply, ids, template_input, turn=str(len(self.turns)))
        self.ids += ids
        self.turns.append(EarlierTurn(new, reply, tuple(ids), len(self.ids), message))
        self.context = self.tokenizer.decode_raw(self.ids[: -len(ids)])
        self.context_messages = list(self.messages)
        self.messages.append(dict(message))
        return num_before - keep

    def check(self) -> None:
        """Check that the ids of the last context spell the rendering of the whole."""
        expected = rendered(self.template, self.context_messages, self.input.tools, **self.input.arguments)
        assert self.context == expected

    def last_call(self) -> str:
        return self.messages[-1]["tool_calls"][-1]["id"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_loop_of_calls_keeps_the_whole_path(name: str) -> None:
    chat = ToolChat(TEMPLATES[name])
    thought = "<think>\nlet me see\n</think>\n\n" if name == "qwen3" else ""
    chat.turn([user("what is a cat?")], f"{thought}I look.\n" + written("look_up", '{"word": "cat"}'))
    chat.check()
    for reply in (
        thought + written("add", "{}") + "\n" + written("look_up", '{"word": "é"}'),
        thought + "A pet.",
    ):
        calls = chat.messages[-1]["tool_calls"]
        assert chat.turn([result(one["id"], "found") for one in calls], reply) == 0
        chat.check()
    num_replaced = chat.turn([user("thanks")], "fine")
    chat.check()
    assert (num_replaced == 0) == (name == "hermes")


@pytest.mark.parametrize("arguments", ['{"word":"cat"}', '{ "word": 1.0 }', '{"word": nothing}', "{}"])
def test_arguments_stay_as_the_model_spelled_them(arguments: str) -> None:
    chat = ToolChat(HERMES)
    chat.turn([user("what is a cat?")], written("look_up", arguments))
    assert chat.turn([result(chat.last_call(), "a pet")], "A pet.") == 0
    assert chat.turn([user("thanks")], "fine") == 0
    assert f'"arguments": {arguments}}}\n</tool_call>' in chat.context


def test_arguments_of_clients_are_written_as_transformers_writes_them() -> None:
    messages = [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call("a", "add", '{"x":1,"é":[]}')]},
        result("a", "3"),
    ]
    tokenizer = tool_tokenizer()
    ids = ChatFormat(tokenizer).token_ids(messages, template_input=WITH_TOOLS)
    assert tokenizer.decode_raw(ids) == rendered(HERMES, messages, TOOLS)
    assert '{"x": 1, "é": []}' in tokenizer.decode_raw(ids)


def test_templates_that_ask_for_none_or_concatenate_arguments() -> None:
    messages = [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call("a", "add", '{"x":1}')]},
        {"role": "assistant", "content": "one"},
    ]
    tokenizer = tool_tokenizer(DEEPSEEK)
    text = tokenizer.decode_raw(ChatFormat(tokenizer).token_ids(messages, template_input=WITH_TOOLS))
    assert '<|im_start|>add\n{"x": 1}<|im_end|><|im_start|>assistantone<|im_end|>2' in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_contexts_spell_the_rendering_in_random_conversations(name: str) -> None:
    """Sampled ids divide the text in any way. Hermes keeps every path; Qwen3 those of its tool loops."""
    rng = random.Random(new_seed())
    tokenizer = tool_tokenizer(TEMPLATES[name])

    def words(most: int) -> str:
        return "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most))).strip() or "x"

    def scattered(text: str) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            end = start + rng.randint(1, 9)
            ids += tokenizer.encode(text[start:end], add_bos=False)
            start = end
        return ids

    num_replaced = 0
    for _ in range(40):
        chat = ToolChat(TEMPLATES[name], WITH_TOOLS)
        chat.turn([{"role": "system", "content": words(4)}, user(words(9))], "fine")
        has_calls = False
        for _ in range(rng.randrange(2, 6)):
            if has_calls:
                new = [result(one["id"], words(5)) for one in chat.messages[-1]["tool_calls"]]
                if rng.random() < 0.2:
                    new.append({"role": "system", "content": words(3)})
            else:
                new = [user(words(9))]
            reply = f"<think>\n{words(9)}\n</think>\n\n" if name == "qwen3" and rng.random() < 0.8 else ""
            has_content = rng.random() < 0.6
            reply += words(9) if has_content else ""
            in_loop, has_calls = has_calls, rng.random() < 0.6 or not has_content
            if has_calls:
                calls = [
                    written("look_up", json.dumps({"word": words(4), "n": rng.random()}, ensure_ascii=False))
                    for _ in range(rng.randrange(1, 3))
                ]
                reply += ("\n" if has_content else "") + "\n".join(calls)
            replaced = chat.turn(new, reply, scattered(reply))
            chat.check()
            # Hermes's template and tool loops append; half a character of a cut id may be written anew.
            if name == "hermes" or in_loop:
                assert replaced == 0, (new, reply)
            num_replaced += replaced
    assert (num_replaced == 0) == (name == "hermes")


@pytest.mark.parametrize("prefill", ["Sure,", "", "a b \n", "<tool_call>"])
def test_a_prefill_is_rendered_open_and_begins_the_reply(prefill: str) -> None:
    tokenizer = tool_tokenizer()
    chat = ChatFormat(tokenizer)
    opened = TemplateInput(prefill=prefill)
    keep, prompt = chat.turn_prompt([], [], [user("hi")], template_input=opened)
    assert keep == 0
    assert tokenizer.decode_raw(prompt) == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{prefill}"
    ids = [*tokenizer.encode(" yes", add_bos=False), tokenizer.eos_id]
    message = ReplyReader(tokenizer).message(" yes", ids, opened)
    assert message == {"role": "assistant", "content": prefill + " yes"}
    turn = EarlierTurn([user("hi")], " yes", ids, len(prompt) + len(ids), message)
    keep, rest = chat.turn_prompt([turn], [*prompt, *ids], [user("so")])
    assert keep == len(prompt) + len(ids)
    assert tokenizer.decode_raw(rest) == "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_does_not_end_with_the_content_continues_no_message() -> None:
    chat = ChatFormat(tool_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}"))
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        chat.token_ids([user("hi")], template_input=TemplateInput(prefill="Sure"))


def test_a_reply_without_opening() -> None:
    tokenizer = tool_tokenizer()
    ids = ChatFormat(tokenizer).token_ids([user("hi")], template_input=TemplateInput(generation_prompt=False))
    assert tokenizer.decode_raw(ids) == "<|im_start|>user\nhi<|im_end|>\n"


def test_arguments_go_to_templates_that_read_them() -> None:
    tokenizer = tool_tokenizer(QWEN3)
    chat = ChatFormat(tokenizer)
    quiet = TemplateInput(arguments={"enable_thinking": False})
    chat.check_input(quiet, arguments_field="chat_template_kwargs")
    text = tokenizer.decode_raw(chat.token_ids([user("hi")], template_input=quiet))
    assert text.endswith("<think>\n\n</think>\n\n")
    assert chat.reads("enable_thinking") and not chat.reads("thinking")


@pytest.mark.parametrize(
    ("template", "given", "field"),
    [
        (QWEN3, TemplateInput(arguments={"thinking": True}), "kwargs.thinking"),
        (QWEN3, TemplateInput(arguments={"tools": []}), "kwargs.tools"),
        (QWEN3, TemplateInput(arguments={"eos_token": "x"}), "kwargs.eos_token"),
        (QWEN3, TemplateInput(arguments={"strftime_now": 1}), "kwargs.strftime_now"),
        ("{{ messages[0].content }}", WITH_TOOLS, "tools"),
        ("{{ messages[0].content }}", NO_INPUT, None),
    ],
)
def test_input_that_the_template_does_not_read_is_named(
    template: str, given: TemplateInput, field: str | None
) -> None:
    chat = ChatFormat(tool_tokenizer(template))
    if field is None:
        chat.check_input(given, arguments_field="kwargs")
        return
    with pytest.raises(InvalidRequestError) as caught:
        chat.check_input(given, arguments_field="kwargs")
    assert caught.value.field == field


def test_a_shared_prefix_has_the_tools() -> None:
    tokenizer = tool_tokenizer()
    chat = ChatFormat(tokenizer)
    system = {"role": "system", "content": "Be kind."}
    prefix = chat.prefix_token_ids([system], template_input=WITH_TOOLS)
    whole = chat.token_ids([system, user("hi")], template_input=WITH_TOOLS)
    assert whole[: len(prefix)] == prefix and "look_up" in tokenizer.decode_raw(prefix)


def test_input_is_packed_as_json() -> None:
    for given in (
        NO_INPUT,
        WITH_TOOLS,
        TemplateInput(TOOLS, {"enable_thinking": False}, "", generation_prompt=False),
    ):
        packed = json.loads(json.dumps(given.packed()))
        assert TemplateInput.unpacked(packed) == given
    assert NO_INPUT.packed() == {}


def test_an_argument_may_have_the_name_of_anything() -> None:
    names = ("text", "items", "canonical", "_text")
    tokenizer = tool_tokenizer(
        "{% set arguments = messages[1].tool_calls[0].function.arguments %}"
        + "".join(f"{{{{ arguments['{name}'] }}}}" for name in names)
        + "{{ arguments.text }}{{ arguments | tojson }}"
    )
    arguments = json.dumps(dict(zip(names, "abcd", strict=True)))
    messages = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [call("a", "f", arguments)]}]
    assert tokenizer.decode_raw(ChatFormat(tokenizer).token_ids(messages)) == f"abcda{arguments}"
