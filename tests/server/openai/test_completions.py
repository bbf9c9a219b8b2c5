"""Completions: prompts as text or ids, several choices, offsets, and refusals."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.core.turn_node import root_of
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.openai import completions
from pensieve_jax.server.openai.completions import CompletionBody
from pensieve_jax.text import Tokenizer
from tests.server.fakes import MODEL, FakeEngine, Harness, ask, say
from tests.text.tokenizer_zoo import metaspace_backend


def complete(harness: Harness, prompt, **fields):
    return ask(harness, "POST", "/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


def events(raw: str):
    return [json.loads(part[6:]) for part in raw.split("\n\n")[:-2]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [[256, 72, 105]]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [5]], [[256, 97], [5]]),
    ],
)
def test_prompts_are_text_ids_or_lists_of_either(prompt, expected):
    harness = Harness(ROUTES)
    status, body = complete(harness, prompt)
    assert status == 200
    assert [list(turn.spec.prompt_token_ids) for turn in harness.engine.turns] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert harness.engine.turns[0].spec.params.max_tokens == 16
    assert not harness.engine.turns[0].spec.node.durable
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_null_means_the_default():
    harness = Harness(ROUTES)
    names = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    status, body = complete(harness, "Hi", **dict.fromkeys(names))
    assert status == 200 and "token_ids" not in body["choices"][0]
    assert not harness.engine.turns[0].spec.node.durable


def test_several_choices_of_several_prompts():
    harness = Harness(ROUTES)
    _, body = complete(harness, ["a", "bc"], n=2, seed=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [turn.spec.params.seed for turn in harness.engine.turns] == [3, 4, 3, 4]
    assert body["usage"]["prompt_tokens"] == 2 + 3 and body["usage"]["completion_tokens"] == 4 * 12


def test_roots_are_named_per_prompt_with_their_token_counts_after_admission():
    asked = []

    def root_for(num_tokens: int) -> str:
        asked.append(num_tokens)
        return f"{len(asked):016x}"

    harness = Harness(ROUTES)
    harness.services.resolver.root_for = root_for
    assert complete(harness, [[1] * 10_000, [2]])[0] == complete(harness, "a", max_tokens=-1)[0] == 400
    assert not asked, "they were refused"
    _, body = complete(harness, ["a", [5, 6, 7]], n=2)
    assert asked == [2, 3] and body["id"].startswith(f"cmpl-{1:016x}")
    roots = [root_of(turn.spec.node.turn_id) for turn in harness.engine.turns]
    assert roots == [f"{1:016x}", f"{1:016x}", f"{2:016x}", f"{2:016x}"]


def test_seeds_of_choices_wrap_around_at_the_maximum():
    harness = Harness(ROUTES)
    assert complete(harness, "a", n=3, seed=-2)[0] == 200
    assert [turn.spec.params.seed for turn in harness.engine.turns] == [2**63 - 2, 2**63 - 1, 0]


def test_a_stream_equals_the_whole_answer():
    fields = {"logprobs": 2, "n": 2}
    _, whole = complete(Harness(ROUTES), "Hi", **fields)
    _, raw = complete(Harness(ROUTES), "Hi", stream=True, stream_options={"include_usage": True}, **fields)
    chunks = events(raw)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    for index in range(2):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
        assert mine[-1]["finish_reason"] == "stop"
        columns = whole["choices"][index]["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for choice in mine if choice["logprobs"] for x in choice["logprobs"][name]] == columns[
                name
            ]
    assert columns["tokens"][:3] == ["h", "e", "l"] and columns["text_offset"][:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ("", {}, None),
        ([[]], {}, "prompt"),
        (["a", []], {}, "prompt[1]"),
        ([1, "a"], {}, "prompt"),
        ([300], {}, "prompt[0]"),
        ([-1], {}, "prompt[0]"),
        ([True], {}, "prompt[0]"),
        ([1, 2**64], {}, "prompt[1]"),
        ([[1], [-(2**63) - 1]], {}, "prompt[1][0]"),
        (None, {}, "prompt"),
        (["a"] * 65, {}, "prompt"),
        (["a"] * 33, {"n": 2}, "n"),
        ("a", {"echo": True, "logprobs": 0, "stream": True}, "echo"),
        ("a", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("a", {"prompt_logprobs": 9}, "prompt_logprobs"),
        ("a", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 2}, "best_of"),
        ("a", {"logprobs": 9}, "logprobs"),
        ("a", {"n": 2, "temperature": "x"}, "temperature"),
    ],
)
def test_an_invalid_request_is_refused_with_its_field(prompt, fields, param):
    harness = Harness(ROUTES)
    status, body = complete(harness, prompt, **fields)
    if prompt == "":  # a beginning-of-text token alone is a prompt, if the model has one
        assert status == 200 and list(harness.engine.turns[0].spec.prompt_token_ids) == [256]
        return
    assert (status, body["error"]["param"]) == (400, param)
    assert harness.services.limits.num_in_engine == 0


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_the_positions_of_tokens_in_the_reply(stream):
    """The tokenizer writes a space before a word, except at the beginning of a reply."""
    tokenizer = Tokenizer(
        metaspace_backend(), bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
    )
    ids = [tokenizer._backend.token_to_id(token) for token in ("\u2581the", "\u2581", "c", "a", "t")]

    def script(turn):
        turn.feed("the", ids[:1])
        turn.feed(" cat", ids[1:])
        turn.finish("stop")

    harness = Harness(ROUTES, FakeEngine(script), tokenizer=tokenizer)
    _, told = complete(harness, [1], logprobs=0, stream=stream)
    choices = [choice for chunk in (events(told) if stream else [told]) for choice in chunk["choices"]]
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for one in columns for token in one["tokens"]]
    offsets = [offset for one in columns for offset in one["text_offset"]]
    assert tokens == [" the", " ", "c", "a", "t"] and offsets == [0, 3, 4, 5, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_every_alternative_has_a_value_of_its_own(stream):
    """Parts of characters and ids beyond the vocabulary have no text that could tell them apart."""
    ids = [*"\u4e2d".encode(), 258, ord("a"), 261]
    likely = [0xE4, 0xB8, 0xAD, 300, 301, ord("a"), 258, 261]

    def script(turn):
        for token_id, text in zip(ids, ("", "", "\u4e2d", "", "a", ""), strict=True):
            turn.feed(text, [token_id])
        turn.finish("length")

    def feed(turn):
        script(turn)
        top = {token_id: -float(rank) for rank, token_id in enumerate(likely, 1)}
        for delta in turn._deltas:
            delta.logprobs[0].top.clear()
            delta.logprobs[0].top.update(top)

    harness = Harness(ROUTES, FakeEngine(feed))
    _, told = complete(harness, "x", logprobs=8, stream=stream)
    choices = [choice for chunk in (events(told) if stream else [told]) for choice in chunk["choices"]]
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    names, offsets, tops = (
        [one for column in columns for one in column[name]]
        for name in ("tokens", "text_offset", "top_logprobs")
    )
    assert names == [r"bytes:\xe4", r"bytes:\xb8", r"bytes:\xad", "<|user|>", "a", "<|end|>"]
    assert offsets == [0, 0, 0, 1, 1, 2]
    values = [-float(rank) for rank in range(1, 9)]
    assert [list(top.values()) for top in tops] == [values] * 6
    assert list(tops[0]) == [*names[:3], "token_id:300", "token_id:301", "a", "<|user|>", "<|end|>"]


def test_a_scripted_turn_may_return_any_result():
    harness = Harness(ROUTES, FakeEngine(say("")))
    _, body = complete(harness, "a")
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 1


def test_several_prompts_have_a_limit_of_tokens_together(monkeypatch):
    """The engine queues all prompts of a request at once."""
    monkeypatch.setattr(completions, "MAX_PROMPTS_TOKENS", 9)
    harness = Harness(ROUTES)
    assert complete(harness, [[65] * 4, [65] * 5])[0] == 200 and complete(harness, [65] * 20)[0] == 200
    num_turns = len(harness.engine.turns)
    status, body = complete(harness, [[65] * 5, [65] * 5])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_value", "prompt")
    assert "10 tokens in all, but must have at most 9 tokens together" in body["error"]["message"]
    assert len(harness.engine.turns) == num_turns
