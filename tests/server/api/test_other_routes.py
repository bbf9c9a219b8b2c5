"""Completions, models, tokens, and whether a server is well."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

import pensieve_jax
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.turn_node import root_of
from pensieve_jax.history.trees import TreeSummary
from pensieve_jax.server.api.completions import CompletionBody
from pensieve_jax.server.api.routes import ROUTES
from pensieve_jax.server.api.state import ROUTES as STATE_ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.turns.sampling import model_defaults
from pensieve_jax.text import Tokenizer
from tests.server.fakes import MODEL, FakeEngine, Harness, say
from tests.text.tokenizer_zoo import metaspace_backend

HI = [{"role": "user", "content": "Hi"}]


def ask(harness: Harness, method, path, body=None):
    async def answer():
        return await harness.open(method, path, body).whole()

    status, headers, raw = asyncio.run(answer())
    is_json = headers["content-type"] == "application/json"
    return status, json.loads(raw) if is_json else raw.decode()


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


def test_null_is_as_good_as_nothing():
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


def test_a_root_is_named_for_each_prompt_by_its_tokens_once_there_is_a_place():
    asked = []

    def root_for(num_tokens: int) -> str:
        asked.append(num_tokens)
        return f"{len(asked):016x}"

    harness = Harness(ROUTES)
    harness.services.resolver.root_for = root_for
    assert complete(harness, [[1] * 10_000, [2]])[0] == complete(harness, "a", max_tokens=0)[0] == 400
    assert not asked, "they were refused"
    _, body = complete(harness, ["a", [5, 6, 7]], n=2)
    assert asked == [2, 3] and body["id"].startswith(f"cmpl-{1:016x}")
    roots = [root_of(turn.spec.node.turn_id) for turn in harness.engine.turns]
    assert roots == [f"{1:016x}", f"{1:016x}", f"{2:016x}", f"{2:016x}"]


def test_seeds_of_choices_go_round_at_the_largest():
    harness = Harness(ROUTES)
    assert complete(harness, "a", n=3, seed=-2)[0] == 200
    assert [turn.spec.params.seed for turn in harness.engine.turns] == [2**63 - 2, 2**63 - 1, 0]


def test_a_stream_and_the_whole_answer_say_the_same():
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
        ("a", {"echo": True}, "echo"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 2}, "best_of"),
        ("a", {"logprobs": 9}, "logprobs"),
        ("a", {"n": 2, "temperature": "x"}, "temperature"),
    ],
)
def test_what_cannot_be_completed_is_named(prompt, fields, param):
    harness = Harness(ROUTES)
    status, body = complete(harness, prompt, **fields)
    if prompt == "":  # the beginning of a text alone is a prompt, where a model has one
        assert status == 200 and list(harness.engine.turns[0].spec.prompt_token_ids) == [256]
        return
    assert (status, body["error"]["param"]) == (400, param)
    assert harness.services.limits.num_inside == 0


def test_models_in_vllms_shape():
    harness = Harness(ROUTES, settings=ServerSettings(served_model_name="org/mine"))
    _, body = ask(harness, "GET", "/v1/models")
    card = body["data"][0]
    assert card == {
        "id": "org/mine",
        "object": "model",
        "created": 1_000_000,
        "owned_by": "pensieve",
        "root": "org/mine",
        "parent": None,
        "max_model_len": 4096,
    }
    assert ask(harness, "GET", "/v1/models/org/mine") == (200, card)
    status, body = ask(harness, "GET", "/v1/models/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_where_the_tokens_stand_in_the_reply(stream):
    """Of a tokenizer that writes a space in front of a word, but not at the beginning of a reply."""
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


def test_text_to_ids_and_back():
    harness = Harness(ROUTES)
    _, body = ask(harness, "POST", "/tokenize", {"prompt": "é", "return_token_strs": True})
    assert body == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [256, 0xC3, 0xA9],
        "token_strs": ["<bos>", "\ufffd", "\ufffd"],
    }
    _, body = ask(harness, "POST", "/tokenize", {"prompt": "a", "add_special_tokens": False})
    assert body["tokens"] == [97] and body["token_strs"] is None
    messages = [{"role": "user", "content": "Hi"}]
    _, body = ask(harness, "POST", "/tokenize", {"messages": messages})
    _, text = ask(harness, "POST", "/detokenize", {"tokens": body["tokens"]})
    assert text == {"prompt": "<bos><|user|>Hi<|end|><|assistant|>"}
    assert ask(harness, "POST", "/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    for path, bad in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": "a"}),
    ):
        assert ask(harness, "POST", path, bad)[0] == 400


def test_messages_have_the_tokens_that_a_chat_would_have():
    """Those of a developer too, where the template knows none."""
    messages = [{"role": "developer", "content": "Be kind."}, *HI]
    harness = Harness(ROUTES)
    status, body = ask(harness, "POST", "/tokenize", {"messages": messages})
    assert status == 200
    ask(harness, "POST", "/v1/chat/completions", {"messages": messages})
    assert list(harness.engine.turns[0].spec.prompt_token_ids) == body["tokens"]


def test_health_and_readiness():
    engine = FakeEngine()
    harness = Harness(ROUTES, engine)

    def both():
        return ask(harness, "GET", "/health")[0], ask(harness, "GET", "/ready")[0]

    assert both() == (200, 200)
    engine.last_heard_s = 11.0
    assert both() == (503, 503)
    engine.state = "starting"
    assert both() == (200, 503)
    engine.last_heard_s, engine.state = 0.0, "draining"
    assert both() == (200, 503)
    engine.state = "dead"
    assert both() == (503, 503)
    assert ask(harness, "GET", "/version") == (200, {"version": pensieve_jax.__version__})


def test_who_looks_after_a_server_may_call_it_by_its_address():
    """As Kubernetes and HTTP/1.0 do, to a server that was told its names."""
    harness = Harness(ROUTES, settings=ServerSettings(allowed_hosts=("chat.example",)))

    async def statuses(host):
        paths = ("/health", "/ready", "/version")
        return [(await harness.open("GET", path, headers={"host": host}).whole())[0] for path in paths]

    for host in ("10.1.2.3:8000", ""):
        assert asyncio.run(statuses(host)) == [200, 200, 403]


@pytest.mark.parametrize(
    ("path", "body", "expected_s"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 10}, 11),
        ("/v1/completions", {"prompt": [1]}, 17),
        ("/v1/chat/completions", {"messages": HI}, 20),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 10}, 10),
    ],
)
def test_a_full_server_stays_ready_and_says_when_to_come_back(path, body, expected_s):
    """A balancer that took it away would send everybody to servers without their state, soon as full."""

    async def scenario():
        harness = Harness(ROUTES, FakeEngine(lambda turn: None, max_num_running=1))
        limits = harness.services.limits
        harness.clock.advance(10.0)
        (await limits.enter("")).leave(110, [20])  # replies have 20 tokens, and 11 tokens take a second
        clients = [harness.open("POST", path, {"model": MODEL, **body}) for _ in range(11)]
        while limits.num_waiting < 2:
            await asyncio.sleep(0)
        status, headers, _ = await harness.open("POST", path, {"model": MODEL, **body}).whole()
        assert (status, headers["retry-after"]) == (503, str(expected_s))
        assert [(await harness.open("GET", route).whole())[0] for route in ("/ready", "/health")] == [
            200,
            200,
        ]
        for client in clients:
            client.leave()
            await client.task

    asyncio.run(scenario())


def test_what_needs_a_key_and_what_does_not(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice:" + "0" * 64 + "\n")
    open_to_all = {"/", "/page/{name}", "/health", "/ready"}
    for host in ("127.0.0.1", "0.0.0.0"):  # everybody comes from this machine, where nginx stands before it
        harness = Harness(ROUTES, settings=ServerSettings(host=host, api_keys_file=str(path)))
        found = set()
        for route in ROUTES:
            where = route.path.replace("{model:path}", MODEL)
            body = {} if route.method == "POST" else None
            if ask(harness, route.method, where, body)[0] != 401:
                found.add(route.path)
        assert found == open_to_all


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {"temperature": 1.0}),
        ("{}", {"temperature": 1.0}),
        ('{"temperature": 0.6, "top_p": 0.9, "do_sample": true}', {"temperature": 0.6, "top_p": 0.9}),
        ('{"do_sample": false}', {"temperature": 0.0}),
        ('{"temperature": null, "top_k": 50}', {"temperature": 1.0, "top_k": 50}),
    ],
)
def test_sampling_is_as_the_model_has_it(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert model_defaults(str(tmp_path)) == expected


@pytest.mark.parametrize("text", ["[", "[]", "3"])
def test_defaults_that_cannot_be_read_are_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="generation_config"):
        model_defaults(str(tmp_path))


def test_a_turn_of_a_script_can_be_anything():
    harness = Harness(ROUTES, FakeEngine(say("")))
    _, body = complete(harness, "a")
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 1


def test_trees_are_read_beside_the_event_loop():
    """An owner's may be many."""
    threads: list[int] = []

    class History:
        def trees(self, owner: str, limit: int) -> list[Any]:
            threads.append(threading.get_ident())
            return []

        def tree(self, owner: str, root: str, limit: int) -> list[Any]:
            threads.append(threading.get_ident())
            return []

    harness = Harness(STATE_ROUTES, history=History())
    assert ask(harness, "GET", "/v1/pensieve/trees") == (200, {"data": []})
    assert ask(harness, "GET", "/v1/pensieve/trees/x")[0] == 404
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_a_list_of_trees_is_as_long_as_was_asked():
    class History:
        def trees(self, owner: str, limit: int) -> list[TreeSummary]:
            return [TreeSummary("0" * 16, 1, "word", float(limit))]

    harness = Harness(STATE_ROUTES, history=History())
    for query, limit in (("", 100), ("?limit=7", 7), ("?limit=1000", 1000)):
        ((row,),) = ask(harness, "GET", f"/v1/pensieve/trees{query}")[1].values()
        assert (row["last_active"], row["first_text"]) == (limit, "word")
    for wrong in ("0", "1001", "x", ""):
        status, body = ask(harness, "GET", f"/v1/pensieve/trees?limit={wrong}")
        assert (status, body["error"]["param"]) == (400, "limit")
