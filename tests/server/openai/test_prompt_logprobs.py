"""Log-probabilities of prompts over HTTP: echoed columns, vLLM's form, turns without a reply, refusals."""

from __future__ import annotations

import json
import threading

import pytest

from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.openai import completion_stream
from pensieve_jax.text import Tokenizer
from tests.server.fakes import MODEL, FakeEngine, Harness, ask, say
from tests.text.tokenizer_zoo import metaspace_backend

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def complete(harness: Harness, prompt, **fields):
    return ask(harness, "POST", "/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


def chat(harness: Harness, messages, **fields):
    return ask(harness, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def test_an_echo_without_logprobs_is_the_prompt_before_the_reply():
    harness = Harness(ROUTES)
    _, body = complete(harness, ["Hi", [65, 256, 66]], echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["Hihello there", "ABhello there"]
    assert all(turn.spec.params.prompt_logprobs is None for turn in harness.engine.turns)
    _, body = complete(harness, "Hi", echo=True, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hi", "length", None)
    assert body["usage"]["completion_tokens"] == 0


def test_a_streamed_echo_is_the_first_chunk():
    _, raw = complete(Harness(ROUTES), ["a", "b"], echo=True, stream=True)
    chunks = [json.loads(part[6:]) for part in raw.split("\n\n")[:-2]]
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ahello there", "bhello there"]


def test_lm_evaluation_harness_gets_its_columns():
    """It sends lists of ids, several at a time, and asks for one token of a reply."""
    harness = Harness(ROUTES)
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    _, body = complete(harness, [[65, 66, 67], [68, 69]], **fields)
    assert [turn.spec.params.prompt_logprobs for turn in harness.engine.turns] == [1, 1]
    first, second = (choice["logprobs"] for choice in body["choices"])
    assert first["tokens"] == ["A", "B", "C", "h"]
    assert first["token_logprobs"] == [None, -66 / 4, -67 / 4, -0.5]
    assert first["top_logprobs"] == [
        None,
        {"A": -0.125, "B": -16.5},
        {"B": -0.125, "C": -16.75},
        {"h": -0.5},
    ]
    assert first["text_offset"] == [0, 1, 2, 3]
    assert second["tokens"] == ["D", "E", "h"]
    assert [choice["text"] for choice in body["choices"]] == ["ABCh", "DEh"]


@pytest.mark.parametrize("number", [0, 2])
def test_a_prompt_alone_is_scored(number):
    harness = Harness(ROUTES)
    _, body = complete(harness, "Hé", echo=True, logprobs=number, max_tokens=0)
    (choice,) = body["choices"]
    columns = choice["logprobs"]
    assert choice["text"] == "Hé" and {len(columns[name]) for name in COLUMNS} == {4}
    assert columns["tokens"] == ["<bos>", "H", r"bytes:\xc3", r"bytes:\xa9"]
    assert columns["text_offset"] == [0, 0, 1, 1]
    assert [top and len(top) for top in columns["top_logprobs"]] == [None, *[number + 1] * 3]
    assert harness.engine.turns[0].spec.params.max_tokens == 0


def test_offsets_of_an_echo_are_the_positions_of_its_tokens():
    """The tokenizer writes a space before a word; the text is the one that was sent."""
    tokenizer = Tokenizer(
        metaspace_backend(byte_fallback=False),
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ messages }}",
    )
    harness = Harness(ROUTES, FakeEngine(say("the")), tokenizer=tokenizer)
    for prompt in ("the cat</s>the", tokenizer.encode("the cat</s>the", add_bos=True)):
        _, body = complete(harness, prompt, echo=True, logprobs=0, max_tokens=0)
        (choice,) = body["choices"]
        columns = choice["logprobs"]
        for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
            if token not in ("<s>", "</s>"):
                # The first word has no space before it.
                assert choice["text"][offset:].startswith(token if offset else token.lstrip()), token


def test_the_form_of_vllm():
    harness = Harness(ROUTES)
    _, body = complete(harness, [65, 66, 67], prompt_logprobs=2, max_tokens=1)
    (choice,) = body["choices"]
    assert choice["text"] == "h" and choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -16.5, "rank": 3, "decoded_token": "B"},
            "65": {"logprob": -0.125, "rank": 1, "decoded_token": "A"},
            "64": {"logprob": -0.25, "rank": 2, "decoded_token": "@"},
        },
        {
            "67": {"logprob": -16.75, "rank": 3, "decoded_token": "C"},
            "66": {"logprob": -0.125, "rank": 1, "decoded_token": "B"},
            "65": {"logprob": -0.25, "rank": 2, "decoded_token": "A"},
        },
    ]


def test_an_echo_and_the_form_of_vllm_may_have_different_numbers():
    harness = Harness(ROUTES)
    _, body = complete(harness, [65, 66], echo=True, logprobs=0, prompt_logprobs=2, max_tokens=0)
    (choice,) = body["choices"]
    assert harness.engine.turns[0].spec.params.prompt_logprobs == 2
    assert choice["logprobs"]["top_logprobs"] == [None, {"B": -16.5}]
    assert len(choice["prompt_logprobs"][1]) == 3


def test_the_first_of_several_choices_scores_the_prompt_for_all():
    harness = Harness(ROUTES)
    _, body = complete(harness, [[65, 66], [67]], n=2, echo=True, logprobs=0, prompt_logprobs=0, seed=3)
    assert [turn.spec.params.prompt_logprobs for turn in harness.engine.turns] == [0, None, 0, None]
    one, two, three, four = body["choices"]
    assert one["logprobs"] == two["logprobs"] and three["logprobs"] == four["logprobs"]
    assert one["prompt_logprobs"] == two["prompt_logprobs"] != three["prompt_logprobs"] == [None]


def test_a_prompt_behind_another_turn_is_scored_from_its_first_token():
    harness = Harness(ROUTES)
    _, first = complete(harness, "Hi")
    _, body = complete(harness, [65, 66], previous_response_id=first["id"], prompt_logprobs=0)
    assert [None in body["choices"][0]["prompt_logprobs"], len(body["choices"][0]["prompt_logprobs"])] == [
        False,
        2,
    ]


def test_a_chat_scores_its_whole_context_whatever_it_continues():
    harness = Harness(ROUTES)
    messages = [{"role": "user", "content": "Hi"}]
    _, first = chat(harness, messages)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on"}]
    chat(harness, messages)
    _, body = chat(harness, messages, prompt_logprobs=1, n=2)
    before, scored, other = (turn.spec for turn in harness.engine.turns[1:])
    assert before.node.parent_id is not None and scored.node.parent_id is other.node.parent_id is None
    assert (scored.params.prompt_logprobs, other.params.prompt_logprobs) == (1, None)
    entries = body["prompt_logprobs"]
    assert len(entries) == len(scored.prompt_token_ids) == before.keep + len(before.prompt_token_ids)
    assert entries[0] is None and all(len(entry) == 2 for entry in entries[1:])
    assert "prompt_logprobs" not in first


@pytest.mark.parametrize("fields", [{}, {"store": True}])
def test_a_later_chat_continues_a_scored_turn_only_if_it_is_stored(fields):
    harness = Harness(ROUTES)
    messages = [{"role": "user", "content": "Hi"}]
    _, first = chat(harness, messages, prompt_logprobs=0, **fields)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on"}]
    chat(harness, messages)
    turn = harness.engine.turns[1].spec.node
    assert (turn.parent_id is not None) == bool(fields)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("completions", {"echo": True, "logprobs": 0, "stream": True}, "echo"),
        ("completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 9}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_its_field(route, fields, param):
    harness = Harness(ROUTES)
    content = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }[route]
    status, body = ask(harness, "POST", f"/v1/{route}", {"model": MODEL, **content, **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert harness.services.limits.num_in_engine == 0


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": [65] * 9, "echo": True, "logprobs": 2, "max_tokens": 0}),
        ("completions", {"prompt": [65] * 9, "prompt_logprobs": 2, "max_tokens": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "A"}], "prompt_logprobs": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": "A"}], "max_tokens": 900, "n": 3}),
        ("completions", {"prompt": "A", "max_tokens": 900, "n": 3, "logprobs": 8}),
    ],
)
def test_a_response_of_many_numbers_is_made_in_a_thread_and_sent_in_pieces(route, fields, monkeypatch):
    if "chat" in route and "n" in fields:
        fields = {**fields, "logprobs": True, "top_logprobs": 8}
    threads = []
    make = completion_stream.long_json_reply

    def noting(value):
        threads.append(threading.current_thread())
        return make(value)

    monkeypatch.setattr(completion_stream, "long_json_reply", noting)
    harness = Harness(ROUTES, FakeEngine(say("word " * 160)))
    status, _ = ask(harness, "POST", f"/v1/{route}", {"model": MODEL, **fields})
    assert status == 200
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
