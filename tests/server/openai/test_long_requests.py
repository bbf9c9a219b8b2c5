"""No request blocks the event loop: long work runs in a thread, and is bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import pytest

from pensieve_jax.core import sampling_params
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.sampling_params import MAX_ALLOWED_TOKEN_IDS
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.server_tables import server_conversations
from pensieve_jax.server import workers
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http import request as http_call
from pensieve_jax.server.http.app import make_app
from pensieve_jax.server.http.bodies import MAX_ITEMS
from pensieve_jax.server.openai.responses import context
from pensieve_jax.server.openai.responses.conversations import Conversations
from pensieve_jax.server.openai.responses.routes import Responses
from pensieve_jax.server.workers import INLINE_CHARACTERS
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.chat import ChatFormat
from pensieve_jax.text.loading import byte_tokenizer
from pensieve_jax.text.replies import ReplyReader
from tests.server.fakes import Harness, Open, say
from tests.server.stored_engine import FINGERPRINT, StoredEngine, resolving

CHAT, RESPONSES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"
EMPTY = {"role": "user", "content": ""}
LONG_TEXT = "a b " * INLINE_CHARACTERS
LONG_MESSAGE = {"role": "user", "content": LONG_TEXT}
MANY = [EMPTY] * 300  # too many to run inline by their number, not by their text
MANY_IDS = [5] * MAX_ALLOWED_TOKEN_IDS


class CountingReader(HistoryReader):
    """A reader that records the thread of each call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: Counter[tuple[str, bool]] = Counter()
        super().__init__(*args, **kwargs)

    def note(self, what: str) -> None:
        self.asked[what, threading.current_thread() is threading.main_thread()] += 1

    def response(self, owner: str, response_id: str) -> Any:
        self.note("response")
        return super().response(owner, response_id)

    def size_of_items(self, owner: str, conversation_id: str) -> Any:
        self.note("size_of_items")
        return super().size_of_items(owner, conversation_id)

    def all_items(self, owner: str, conversation_id: str) -> Any:
        self.note("all_items")
        return super().all_items(owner, conversation_id)

    def turn_path(self, owner: str, turn_id: str) -> Any:
        self.note("turn_path")
        return super().turn_path(owner, turn_id)


class Front:
    """The whole application in the test's thread, which runs the event loop."""

    def __init__(self, path, reply: str = "hello") -> None:
        clock, tokenizer = VirtualClock(1_790_000_000.0), byte_tokenizer()
        self.engine = StoredEngine(path, clock, say(reply))
        self.reader = CountingReader(path, fingerprint=FINGERPRINT)
        resolver = resolving(tokenizer, self.reader)
        parts = {"history": self.reader, "resolver": resolver, "now_s": clock.now, "tokenizer": tokenizer}
        self.services = Harness([], self.engine, **parts).services
        self.responses = Responses(self.services)
        routes = [*ROUTES, *self.responses.routes, *Conversations(self.services, self.responses.locks).routes]
        self.app = make_app(self.services, routes)

    def close(self) -> None:
        self.reader.close()
        self.engine.store.close()

    async def post(self, path: str, body: Any, headers: Any = None) -> tuple[int, dict[str, Any]]:
        status, _, answer = await Open(self.app, "POST", path, body, headers or {}).whole()
        return status, json.loads(answer)

    def ask(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        return asyncio.run(self.post(path, body))


@pytest.fixture
def front(tmp_path):
    front = Front(tmp_path / "history.sqlite")
    yield front
    front.close()


@pytest.fixture
def threads(monkeypatch):
    """Record the threads of each kind of long work; True stands for the event loop's."""
    seen: dict[str, set[bool]] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            in_loop = threading.current_thread() is threading.main_thread()
            seen.setdefault(name, set()).add(in_loop)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(http_call, "decode_body")
    watch(context, "parse_input")
    watch(ChatFormat, "turn_prompt")
    watch(Tokenizer, "encode")
    watch(Tokenizer, "decode_raw")
    watch(Tokenizer, "text_after")
    watch(sampling_params, "_checked_ids")
    return seen


SHORT = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, {"decode_body", "turn_prompt"}),
    (RESPONSES, {"input": "hi"}, {"decode_body", "parse_input", "turn_prompt"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}, {"turn_prompt"}),
    ("/v1/completions", {"prompt": "hi"}, {"decode_body", "encode"}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}, {"decode_body", "encode", "text_after"}),
    ("/detokenize", {"tokens": [97]}, {"decode_body", "decode_raw"}),
]
LONG = [
    (CHAT, {"messages": [{"role": "user", "content": LONG_TEXT}]}, {"decode_body", "turn_prompt"}),
    (RESPONSES, {"input": LONG_TEXT}, {"decode_body", "parse_input", "turn_prompt"}),
    (COUNT, {"input": LONG_TEXT}, {"decode_body", "parse_input", "turn_prompt"}),
    ("/v1/messages", {"messages": [LONG_MESSAGE], "max_tokens": 9}, {"decode_body", "turn_prompt"}),
    ("/v1/messages/count_tokens", {"messages": [LONG_MESSAGE]}, {"decode_body", "turn_prompt"}),
    ("/v1/completions", {"prompt": LONG_TEXT}, {"decode_body", "encode"}),
    (
        "/tokenize",
        {"prompt": "hi", "return_token_strs": True, "unknown": LONG_TEXT},
        {"decode_body", "encode", "text_after"},
    ),
    ("/tokenize", {"messages": MANY}, {"turn_prompt"}),
    ("/detokenize", {"tokens": [97], "unknown": LONG_TEXT}, {"decode_body", "decode_raw"}),
    (CHAT, {"messages": MANY}, {"turn_prompt"}),
    (
        CHAT,
        {"messages": [EMPTY], "allowed_token_ids": MANY_IDS},
        {"decode_body", "_checked_ids"},
    ),
    (
        "/v1/completions",
        {"prompt": "hi", "allowed_token_ids": MANY_IDS},
        {"decode_body", "_checked_ids"},
    ),
    (RESPONSES, {"input": MANY}, {"parse_input", "turn_prompt"}),
    (COUNT, {"input": MANY}, {"parse_input", "turn_prompt"}),
]


def name_of(value: Any) -> str:
    """Return a name that is the same in every process: sets have no order."""
    return " ".join(sorted(value)) if isinstance(value, set) else str(value)[:40]


@pytest.mark.parametrize(("path", "body", "work"), SHORT, ids=name_of)
def test_short_work_runs_inline(front, threads, path, body, work):
    assert front.ask(path, body)[0] == 200
    assert {name: threads[name] for name in work} == {name: {True} for name in work}


@pytest.mark.parametrize(("path", "body", "work"), LONG, ids=name_of)
def test_long_work_runs_in_a_thread(front, threads, path, body, work):
    front.ask(path, body)
    assert {name: threads[name] for name in work} == {name: {False} for name in work}


def test_bodies_with_unknown_fields_are_parsed_in_a_thread(front, threads):
    body = {"messages": [{"role": "user", "content": "hi"}], **{f"x{i}": 1 for i in range(5000)}}
    assert front.ask(CHAT, body)[0] == 200
    assert threads["decode_body"] == {False}


PART = {"type": "text", "text": ""}
TOO_MANY = [
    (CHAT, lambda n: {"messages": [EMPTY] * n}, "messages"),
    (CHAT, lambda n: {"messages": [EMPTY, {"role": "user", "content": [PART] * n}]}, "messages[1].content"),
    (CHAT, lambda n: {"messages": [[]] * n}, "messages"),
    (RESPONSES, lambda n: {"input": [EMPTY] * n}, "input"),
    (RESPONSES, lambda n: {"input": [{"role": "user", "content": [PART] * n}]}, "input[0].content"),
    (COUNT, lambda n: {"input": [{"type": "item_reference", "id": "msg_x"}] * n}, "input"),
    ("/tokenize", lambda n: {"messages": [EMPTY] * n}, "messages"),
    ("/v1/conversations", lambda n: {"items": [{"role": "user", "content": [PART] * n}]}, "items[0].content"),
]


@pytest.mark.parametrize(("path", "body_of", "param"), TOO_MANY, ids=range(len(TOO_MANY)))
def test_lists_have_a_limit(front, path, body_of, param):
    status, answer = front.ask(path, body_of(MAX_ITEMS + 1))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", param)
    assert f"has {MAX_ITEMS + 1} items, but must have at most {MAX_ITEMS}." in answer["error"]["message"]
    assert not front.reader.asked, "something was looked up before the refusal"
    _, answer = front.ask(path, body_of(MAX_ITEMS))
    assert f"at most {MAX_ITEMS}." not in ((answer.get("error") or {}).get("message") or "")


@pytest.mark.parametrize("path", [RESPONSES, COUNT])
def test_invalid_lists_are_counted_before_their_items_are_read(front, monkeypatch, path):
    """On the event loop, a million numbers took half a second."""
    monkeypatch.setattr(context, "is_reference", lambda item: pytest.fail("it is looked at"))
    status, answer = front.ask(path, {"input": [0] * (MAX_ITEMS + 1)})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert f"has {MAX_ITEMS + 1} items, but must have at most {MAX_ITEMS}." in answer["error"]["message"]


def test_lists_of_words_have_a_limit(front):
    include = ["message.output_text.logprobs"] * (MAX_ITEMS + 1)
    status, answer = front.ask(RESPONSES, {"input": "hi", "include": include})
    assert (status, answer["error"]["param"]) == (400, "include")


TOO_LONG = [
    (CHAT, {"messages": [{"role": "user", "content": LONG_TEXT}], "n": 4}, "messages"),
    (RESPONSES, {"input": LONG_TEXT}, "input"),
    (RESPONSES, {"input": LONG_TEXT, "background": True}, "input"),
    ("/v1/completions", {"prompt": LONG_TEXT, "n": 8}, "prompt"),
    ("/v1/completions", {"prompt": [[5], [5] * 5000]}, "prompt[1]"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_too_long_requests_do_not_reach_the_engine(front, path, body, param):
    """The engine would read all of it between two steps, and delay all other turns."""
    status, answer = front.ask(path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == param
    assert not front.engine.turns and not front.engine.changes
    assert front.services.limits.num_in_engine == 0 and not front.responses.locks


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG[:4], ids=range(4))
def test_much_too_long_texts_are_not_tokenized(front, monkeypatch, path, body, param):
    """A text of 10 MiB kept a shared thread busy for half a minute before its refusal."""
    lengths, encode = [], Tokenizer._encode

    def noted(self: Tokenizer, text: str, token_limit: int | None = None) -> list[int]:
        lengths.append(0 if token_limit else len(text))
        return encode(self, text, token_limit)

    monkeypatch.setattr(Tokenizer, "_encode", noted)
    long = json.loads(json.dumps(body).replace(LONG_TEXT, LONG_TEXT * 20))
    status, answer = front.ask(path, long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == param and "far more than 4095 tokens" in answer["error"]["message"]
    assert max(lengths) < 2 * len(LONG_TEXT)
    status, answer = front.ask(COUNT, {"input": LONG_TEXT * 20})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert front.ask(COUNT, {"input": LONG_TEXT[:9000]})[1]["input_tokens"] > 9000, (
        "a little too long is counted"
    )


def test_requests_that_are_too_long_with_their_history_do_not_reach_the_engine(front):
    chat = [{"role": "user", "content": "x" * 3000}]
    front.ask(CHAT, {"messages": chat})
    chat += [{"role": "assistant", "content": "hello"}, chat[0]]
    front.engine.turns.clear()
    assert front.ask(CHAT, {"messages": chat})[1]["error"]["code"] == "context_length_exceeded"
    assert not front.engine.turns


def test_a_response_is_read_once_however_often_it_is_referred_to(front):
    ids = []
    for text in ("one", "two"):
        _, response = front.ask(RESPONSES, {"input": [{"role": "user", "content": text}] * 3})
        turn_id = response["id"].removeprefix("resp_")
        ids += [response["output"][0]["id"], f"msg_{turn_id}_0", f"msg_{turn_id}_2"]
    front.reader.asked.clear()
    references = [{"type": "item_reference", "id": item_id} for item_id in ids]
    status, counted = front.ask(COUNT, {"input": references * 500})
    assert status == 200
    assert front.reader.asked == {("response", False): 2}
    said = [["hello", "one", "one", "hello", "two", "two"][i] for i in range(6)]
    roles = ["assistant", "user", "user"] * 2
    spelled = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)] * 500
    assert counted == front.ask(COUNT, {"input": spelled})[1]


def test_unknown_references_are_looked_up_once(front):
    missing = {"type": "item_reference", "id": "msg_" + "0" * 32}
    status, answer = front.ask(COUNT, {"input": [missing] * 100})
    assert (status, answer["error"]["param"]) == (404, "input[0].id")
    assert front.reader.asked == {("response", False): 1}


def test_the_size_of_referenced_items_is_limited(front, monkeypatch):
    monkeypatch.setattr(context, "MAX_READ_CHARACTERS", 2000)
    _, response = front.ask(RESPONSES, {"input": "x" * 300})
    reference = {"type": "item_reference", "id": f"msg_{response['id'].removeprefix('resp_')}_0"}
    assert front.ask(COUNT, {"input": [reference] * 4})[0] == 200
    status, answer = front.ask(COUNT, {"input": [reference] * 8})
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert answer["error"]["param"].startswith("input[") and "2000" in answer["error"]["message"]


def test_a_conversation_is_read_in_a_thread_up_to_a_limit(front, monkeypatch):
    items = [{"role": "user", "content": "x" * 100}] * 20
    _, conversation = front.ask("/v1/conversations", {"items": items})
    body = {"conversation": conversation["id"], "input": "hi"}
    front.reader.asked.clear()
    assert front.ask(RESPONSES, body)[0] == 200
    assert front.reader.asked == {("size_of_items", False): 1, ("all_items", False): 1}
    monkeypatch.setattr(context, "MAX_READ_CHARACTERS", 2000)
    front.reader.asked.clear()
    status, answer = front.ask(RESPONSES, body)
    assert (status, answer["error"]["param"]) == (400, "conversation")
    assert front.reader.asked == {("size_of_items", False): 1}
    monkeypatch.undo()
    assert front.ask(RESPONSES, body)[0] == 200, "what was refused has unlocked it"


async def ask(front, method, path, body=None):
    status, _, answer = await Open(front.app, method, path, body, {}).whole()
    return status, json.loads(answer)


def test_a_long_conversation_is_deleted_in_batches_and_locked_meanwhile(front, monkeypatch):
    monkeypatch.setattr(server_conversations, "MAX_DELETED_ITEMS", 6)
    items = [{"role": "user", "content": "x"}] * 20
    _, conversation = front.ask("/v1/conversations", {"items": items})
    path, apply, meanwhile = f"/v1/conversations/{conversation['id']}", front.engine.apply, []

    async def noted(change):
        await apply(change)
        for body in ({"items": items}, {"conversation": conversation["id"], "input": "hi"}):
            where = f"{path}/items" if "items" in body else RESPONSES
            meanwhile.append(await front.post(where, body))

    monkeypatch.setattr(front.engine, "apply", noted)
    status, answer = asyncio.run(ask(front, "DELETE", path))
    assert (status, answer["deleted"]) == (200, True)
    assert len(meanwhile) == 2 * 4 and {status for status, _ in meanwhile[:-2]} == {409}
    monkeypatch.undo()
    assert asyncio.run(ask(front, "GET", path))[0] == 404
    assert not front.responses.locks


def test_items_that_no_turn_could_read_are_not_appended(front, monkeypatch):
    item = {"role": "user", "content": "x" * 100}
    _, conversation = front.ask("/v1/conversations", {"items": [item] * 20})
    path = f"/v1/conversations/{conversation['id']}/items"
    num_items, num_characters = front.reader.size_of_items("", conversation["id"])
    monkeypatch.setattr(context, "MAX_ITEMS", num_items + 1)
    assert front.ask(path, {"items": [item] * 2})[0] == 400
    assert front.ask(path, {"items": [item]})[0] == 200
    status, answer = front.ask(path, {"items": [item]})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", "items")
    assert f"a turn reads at most {num_items + 1} of" in answer["error"]["message"]
    monkeypatch.undo()
    _, one = front.reader.size_of_items("", conversation["id"])
    monkeypatch.setattr(context, "MAX_READ_CHARACTERS", 2 * one - num_characters + 9)
    assert front.ask(path, {"items": [item]})[0] == 200, (
        "there is room for one more and a list's own characters"
    )
    assert front.ask(path, {"items": [item]})[0] == 400
    assert front.ask("/v1/conversations", {"items": [{**item, "content": "x" * 2 * one}]})[0] == 400
    assert front.reader.size_of_items("", conversation["id"])[0] == num_items + 2
    turn = {"conversation": conversation["id"], "input": "hi"}
    assert front.ask(RESPONSES, turn)[0] == 400, "there is no room for what it would append"
    monkeypatch.undo()
    assert front.ask(RESPONSES, turn)[0] == 200
    assert {in_loop for what, in_loop in front.reader.asked if what == "size_of_items"} >= {False}


def test_a_turn_does_not_make_a_conversation_too_long_for_the_next_turn(front, monkeypatch):
    item = {"role": "user", "content": "x" * 100}
    _, conversation = front.ask("/v1/conversations", {"items": [item] * 5})

    def turn(num_items: int, path: str = RESPONSES) -> tuple[int, dict[str, Any]]:
        return front.ask(path, {"conversation": conversation["id"], "input": [item] * num_items})

    monkeypatch.setattr(context, "MAX_ITEMS", 10)
    for path in (RESPONSES, COUNT):
        status, answer = turn(5, path)  # with its reply eleven
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", "input")
        assert "has 11 items" in answer["error"]["message"]
    assert front.reader.size_of_items("", conversation["id"])[0] == 5 and not front.engine.turns
    assert turn(2)[0] == 200 and turn(1)[0] == 200
    assert front.reader.size_of_items("", conversation["id"])[0] == 10
    assert turn(1)[0] == 400
    monkeypatch.undo()
    _, num_characters = front.reader.size_of_items("", conversation["id"])
    monkeypatch.setattr(context, "MAX_READ_CHARACTERS", num_characters + 500)
    status, answer = turn(3)
    assert (status, answer["error"]["param"]) == (400, "input")
    assert turn(1)[0] == 200


def test_pages_of_items_are_built_in_a_thread(front, monkeypatch):
    """A page may have a hundred items of megabytes."""
    items = [{"role": "user", "content": f"ö{number}"} for number in range(3)]
    _, conversation = front.ask("/v1/conversations", {"items": items})
    _, response = front.ask(RESPONSES, {"input": items})
    in_loop = []
    for name in ("items", "input_items"):
        read = getattr(front.reader, name)

        def noted(*args, read=read, **kwargs):
            in_loop.append(threading.current_thread() is threading.main_thread())
            return read(*args, **kwargs)

        monkeypatch.setattr(front.reader, name, noted)
    for path in (
        f"/v1/conversations/{conversation['id']}/items",
        f"/v1/responses/{response['id']}/input_items",
    ):
        status, page = asyncio.run(ask(front, "GET", f"{path}?limit=2&order=asc"))
        assert status == 200 and page["has_more"] and page["object"] == "list"
        assert [item["content"][0]["text"] for item in page["data"]] == ["ö0", "ö1"]
        assert [page["first_id"], page["last_id"]] == [item["id"] for item in page["data"]]
        empty = asyncio.run(ask(front, "GET", f"{path}?after={page['last_id']}&order=desc&limit=1"))[1]
        assert len(empty["data"]) == 1
    assert in_loop == [False] * 4


def test_turns_behind_a_long_history_are_planned_in_a_thread(front, threads):
    _, first = front.ask(RESPONSES, {"input": "x" * 2500})
    threads.clear()
    status, _ = front.ask(RESPONSES, {"input": "hi", "previous_response_id": first["id"]})
    assert status == 200 and threads["turn_prompt"] == {False}


def test_a_history_that_must_be_read_is_read_in_a_thread(front, threads):
    _, first = front.ask(RESPONSES, {"input": "hi"})
    body = {"input": "and", "previous_response_id": first["id"]}
    threads.clear()
    assert front.ask(RESPONSES, body)[0] == 200
    assert threads["turn_prompt"] == {True}, "it is remembered, and short"
    threads.clear()
    front.reader.asked.clear()
    front.services.resolver.index.forget("", first["id"].removeprefix("resp_"))
    assert front.ask(RESPONSES, body)[0] == 200
    assert threads["turn_prompt"] == {False}
    assert front.reader.asked["turn_path", False] and not front.reader.asked["turn_path", True]


def test_two_requests_with_a_key_run_once_although_both_are_planned_at_once(front):
    async def both() -> list[tuple[int, dict[str, Any]]]:
        body = {"input": MANY, "max_output_tokens": 5}
        return await asyncio.gather(
            *(front.post(RESPONSES, body, {"idempotency-key": "k"}) for _ in range(2))
        )

    (first, answer), (second, again) = asyncio.run(both())
    assert first == second == 200 and answer["id"] == again["id"]
    assert len(front.engine.turns) == 1


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        (RESPONSES, {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}),
    ],
)
def test_a_long_reply_is_read_in_a_thread(tmp_path, monkeypatch, path, body, store, stream, is_long):
    monkeypatch.setattr(workers, "INLINE_CHARACTERS", 200)  # the fake engine's contexts are short
    front = Front(tmp_path / "history.sqlite", "a b " * 60 if is_long else "hello")
    original, in_loop = ReplyReader.parts, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(ReplyReader, "parts", noted)
    fields = {} if path == "/v1/messages" else {"store": store}

    async def status() -> int:
        return (await Open(front.app, "POST", path, {**body, "stream": stream, **fields}, {}).whole())[0]

    assert asyncio.run(status()) == 200 and in_loop == [not is_long]
    front.close()
