"""A scripted model: its rules, its choice of tokens, and an engine that replies by a script."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    StructuredOutput,
)
from pensieve_jax.assembly import assemble
from pensieve_jax.text import ChatFormat, load_tokenizer
from pensieve_lab.scripted.model import make_model
from pensieve_lab.scripted.runner import ScriptedRunner, Sizes, check_without_host_tier
from pensieve_lab.scripted.script import DEFAULT_SCRIPT, Context, Rule, Script, divide, load_script
from pensieve_lab.scripted.writer import Writer, remaining

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPT = Script(
    (
        Rule("It is sunny.", role="tool"),
        Rule(CALL, last="weather", tool="get_weather"),
        Rule('{"name": "Paris", "population": 2100000}', last="as JSON"),
        Rule("Your name is Ada.", last="my name", context="I am Ada"),
        Rule("Hello! How can I help you?"),
    )
)


CITY = StructuredOutput.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
        "required": ["name", "population"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    make_model(directory, DEFAULT_SCRIPT)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


def test_a_rendering_is_divided_into_what_is_asked_and_the_reply(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The weather?"}]
    rendered = tokenizer.decode_raw(ChatFormat(tokenizer).token_ids(messages))
    context, reply = divide(rendered + "It is")
    assert (context.role, context.last, context.tools, reply) == ("user", "The weather?", (), "It is")


def test_a_tools_result_and_the_tools_are_seen():
    text = (
        '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "get_weather"}}\n</tools>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    context, reply = divide(text)
    assert (context.role, context.tools, reply) == ("tool", ("get_weather",), "") and "sunny" in context.last


def test_a_text_without_messages_has_no_role():
    assert divide("once upon a time")[0].role == ""


def test_the_first_rule_that_applies_replies():
    asked = functools.partial(Context, role="user", tools=("get_weather",))
    assert SCRIPT.replies(asked(text="", last="the weather")) == [CALL]
    assert SCRIPT.replies(Context("", "user", "the weather", ())) == ["Hello! How can I help you?"]
    assert SCRIPT.replies(Context("I am Ada", "user", "my name?", ())) == ["Your name is Ada."]
    assert SCRIPT.replies(Context("", "user", "my name?", ())) == ["Hello! How can I help you?"]


THINKING = Script((Rule("<think>\nTwo and two.\n</think>\n\nFour."),))


def test_a_reply_without_reasoning_follows_where_reasoning_may_not(tokenizer):
    asked = Context("", "user", "2 + 2?", ())
    assert THINKING.replies(asked)[1:] == ["Four."]
    assert THINKING.replies(dataclasses.replace(asked, thinks=False)) == ["Four."]
    thinks = tokenizer.encode("<think>", add_bos=False)[0]
    writer = Writer(THINKING, tokenizer)
    assert reply(writer, tokenizer, "2 + 2?", lambda _, token_id: token_id != thinks) == "Four."
    assert reply(writer, tokenizer, "2 + 2?").startswith("<think>\nTwo and two.")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("reply = 3", "tables"),
        ("[[reply]]\nlast = 'x'", "`text`"),
        ("[[reply]]\ntext = 'x'\nwho = 'y'", "`text`"),
        ("[[reply]]\ntext = 3", "text"),
        ("[[reply]]\ntext = 'x'\nlast = '('", "regular expression"),
        ("[[reply]]\ntext = 'x'\nlast = 'y'", "`text` only"),
        ("[[", "TOML"),
    ],
)
def test_a_wrong_script_is_refused(tmp_path, text, problem):
    path = tmp_path / "script.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_script(path)


def test_white_space_may_differ_from_the_script():
    text = '{"name": "Paris"}'
    assert remaining(text, '{"name"') == ': "Paris"}'
    assert remaining(text, '{\n "name":"P') == 'aris"}'
    assert remaining(text, '{ "name": ') == '"Paris"}'
    assert remaining(text, '["') is None


def reply(writer, tokenizer, question, allows=lambda context, token_id: True, limit=80):
    """Return the reply to a question, token by token."""
    ids = ChatFormat(tokenizer).token_ids([{"role": "user", "content": question}])
    start = len(ids)
    while len(ids) < start + limit:
        token_id = writer.next_id(ids, lambda one: allows(tokenizer.decode_raw(ids[start:]), one))
        if token_id == tokenizer.eos_id:
            return tokenizer.decode_raw(ids[start:])
        ids.append(token_id)
    raise AssertionError("no end")


def test_a_reply_spells_the_script(tokenizer):
    assert reply(Writer(SCRIPT, tokenizer), tokenizer, "Hi") == "Hello! How can I help you?"


def test_a_reply_keeps_to_a_mask_that_forbids_the_tokens_of_the_script(tokenizer):
    """The mask allows single characters only, and demands a line break in front."""

    def allows(before: str, token_id: int) -> bool:
        if token_id == tokenizer.eos_id:
            return before.endswith("}")
        spelled = tokenizer.bytes_of(token_id) or b""
        return spelled == b"\n" if not before else len(spelled) == 1

    found = reply(Writer(SCRIPT, tokenizer), tokenizer, "Paris as JSON", allows)
    assert found == '\n{"name": "Paris", "population": 2100000}'


def test_a_reply_that_the_mask_ends_is_cut(tokenizer, caplog):
    found = reply(
        Writer(SCRIPT, tokenizer), tokenizer, "Hi", lambda _, token_id: token_id == tokenizer.eos_id
    )
    assert found == "" and "not allowed" in caplog.text


def test_a_host_tier_is_refused():
    with pytest.raises(ConfigError, match="cpu_pages"):
        check_without_host_tier(4)


def test_an_engine_replies_by_the_script_when_state_was_evicted(model, tokenizer, monkeypatch):
    """Three conversations share a pool that holds two of them."""
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=4, cpu_pages=0, chunk_tokens=16),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=32, token_buckets=(32,)),
        runner=RunnerConfig(max_position_embeddings=64),
    )

    def wrap(runner):
        sizes = Sizes(page_size=16, num_pages=runner.storage.num_pages, vocab_size=tokenizer.vocab_size)
        return ScriptedRunner(runner, Writer(SCRIPT, tokenizer), sizes)

    monkeypatch.setattr("pensieve_jax.llm.assemble", functools.partial(assemble, wrap=wrap))
    with LLM(str(model), dtype="float32", config=config, progress=False) as llm:
        for name in ("one", "two", "three"):
            said = llm.chat([{"role": "user", "content": "I am Ada"}], conversation_id=name)
            assert said.text == "Hello! How can I help you?"
        again = llm.chat(
            [{"role": "user", "content": "What is my name?"}],
            SamplingParams(max_tokens=20, logprobs=1),
            conversation_id="one",
        )
        city = llm.chat(
            [{"role": "user", "content": "Paris as JSON"}], SamplingParams(max_tokens=40, structured=CITY)
        )
    assert city.text == '{"name": "Paris", "population": 2100000}' and city.finish_reason == "stop"
    assert again.text == "Your name is Ada." and again.usage.recomputed_tokens > 0
    assert again.finish_reason == "stop" and np.isfinite([one.logprob for one in again.logprobs]).all()
