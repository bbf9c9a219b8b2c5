"""Contexts with tool calls: a client that resends its history, as clients write it, finds its state."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.template_input import NO_INPUT, ReplyFormat, TemplateInput
from pensieve_jax.history.opening import open_store
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.store import TurnRecord
from pensieve_jax.server.context import hashes, turn_index
from pensieve_jax.server.context.resolver import ResolvedContext, Resolver
from pensieve_jax.server.context.turn_index import TurnIndex
from pensieve_jax.text import ReplyReader
from tests.server.context.no_turns import NoTurns
from tests.server.context.scenarios import output_of, user
from tests.server.stored_engine import FINGERPRINT, resolving
from tests.text.tool_templates import (
    QWEN3,
    TEMPLATES,
    TOOLS,
    WITH_TOOLS,
    call,
    read_parts,
    result,
    tool_tokenizer,
    written,
)

THOUGHT = "<think>\nlet me see\n</think>\n\n"
ORIGINAL_CHAIN_AFTER = hashes.chain_after


class Client:
    """A client that repeats the whole history in every request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, template: str = QWEN3) -> None:
        monkeypatch.setattr(ReplyReader, "parts", read_parts)
        self.tokenizer = tool_tokenizer(template)
        self.resolver = Resolver(self.tokenizer, "m", TurnIndex(NoTurns()))
        self.messages: list[dict] = []
        self.input = WITH_TOOLS

    def resolve(self, new: list[dict]) -> ResolvedContext:
        self.messages += new
        return self.resolver.resolve("ann", self.messages, epoch=1, durable=False, template_input=self.input)

    def turn(self, new: list[dict], reply: str) -> ResolvedContext:
        """Run a turn, and repeat its reply without reasoning, as clients do."""
        resolved = self.resolve(new)
        ids = [*self.tokenizer.encode(reply, add_bos=False), self.tokenizer.eos_id]
        self.reply = resolved.commit(output_of(ids, reply)).reply
        self.messages.append({key: value for key, value in self.reply.items() if key != "reasoning"})
        self.num_tokens = resolved.num_context_tokens + len(ids)
        return resolved

    def last_result(self, content: str = "found") -> dict:
        return result(self.messages[-1]["tool_calls"][-1]["id"], content)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_loop_of_calls_grows_by_its_new_tokens_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """System messages after results keep their place, and the kept tokens grow."""
    client = Client(monkeypatch, TEMPLATES[name])
    thought = THOUGHT if name == "qwen3" else ""
    client.turn([user("what is a cat?")], thought + "I look.\n" + written("look_up", '{"word": "cat"}'))
    for number in range(4):
        before = client.num_tokens
        new = [client.last_result(), {"role": "system", "content": f"Step {number}."}]
        resolved = client.turn(new, thought + written("look_up", '{"word":"cat"}'))
        assert resolved.parent is not None and resolved.keep == before
        text = client.tokenizer.decode_raw(resolved.prompt_token_ids)
        assert text.index("found") < text.index(f"Step {number}.")
    assert client.reply.get("reasoning") == ("let me see" if thought else None)


def test_clients_write_calls_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ids and spellings of a call are the same call; the context has the model's own."""
    client = Client(monkeypatch)
    client.turn([user("hi")], THOUGHT + written("add", '{"x": 1.0, "y": 2}'))
    model_id = client.messages[-1]["tool_calls"][0]["id"]
    client.messages[-1] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("toolu_1", "add", '{"y":2,"x":1}')],
    }
    before = client.num_tokens
    resolved = client.turn([client.last_result()], "Three.")
    assert resolved.keep == before
    assert resolved.messages == (result(model_id, "found"),)
    assert client.resolve([user("so")]).parent is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.messages[-1]["tool_calls"].append(call("x", "add", "{}")),
        lambda client: client.messages[-1].update(tool_calls=[call("x", "add", '{"x": 2}')]),
        lambda client: client.messages[-1].update(tool_calls=[call("x", "look_up", '{"x": 1}')]),
        lambda client: client.messages[-1].update(content="no"),
        lambda client: setattr(client, "input", TemplateInput(TOOLS[:1])),
        lambda client: setattr(client, "input", NO_INPUT),
        lambda client: setattr(client, "input", TemplateInput(TOOLS, {"enable_thinking": False})),
    ],
)
def test_another_call_or_other_tools_are_another_context(monkeypatch: pytest.MonkeyPatch, change) -> None:
    client = Client(monkeypatch)
    client.turn([user("hi")], THOUGHT + written("add", '{"x": 1}'))
    change(client)
    assert client.resolve([client.last_result()]).parent is None


def with_reasoning(chain: bytes, message: dict) -> bytes:
    content = (message.get("reasoning") or "") + (message["content"] or "")
    return ORIGINAL_CHAIN_AFTER(chain, {**message, "content": content})


def test_the_planted_bug_reasoning_in_chains_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "chain_after", with_reasoning)
    monkeypatch.setattr(turn_index, "chain_after", with_reasoning)
    with pytest.raises(AssertionError):
        test_a_loop_of_calls_grows_by_its_new_tokens_only(monkeypatch, "qwen3")


def test_a_result_must_answer_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch)
    client.turn([user("hi")], written("add", "{}"))
    with pytest.raises(InvalidRequestError) as caught:
        client.resolve([result("other", "x")])
    assert caught.value.field == "messages[2].tool_call_id"


def test_a_named_turn_is_continued_with_results(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch)
    first = client.turn([user("hi")], written("add", "{}"))
    answer = client.last_result()

    def after(messages: list[dict], given: TemplateInput) -> ResolvedContext:
        return client.resolver.resolve_after(
            "ann", first.node.turn_id, messages, epoch=1, durable=False, template_input=given
        )

    for wrong in (result("other", "x"), {"role": "tool", "content": "x"}):
        with pytest.raises(InvalidRequestError) as caught:
            after([wrong], WITH_TOOLS)
        assert caught.value.field == "messages[0].tool_call_id"
    assert after([answer], WITH_TOOLS).node.chain == client.resolve([answer]).node.chain
    # With other tools, the same turn has another chain: that of the whole context with these tools.
    client.input = TemplateInput(TOOLS[:1])
    other = after([answer], client.input)
    assert other.parent is not None and other.keep < client.num_tokens
    assert other.node.chain == client.resolve([]).node.chain


def test_a_prefill_and_its_text_are_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch)
    client.input = TemplateInput(prefill="Sure, ")
    resolved = client.turn([user("hi")], "here.")
    assert client.tokenizer.decode_raw(resolved.prompt_token_ids).endswith("Sure, ")
    assert client.messages[-1]["content"] == "Sure, here."
    client.input = NO_INPUT
    resolved = client.resolve([user("so")])
    assert resolved.parent is not None


def test_turns_with_tools_are_found_in_the_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A front end that has forgotten the turns finds them by messages, among other replies."""
    monkeypatch.setattr(ReplyReader, "parts", read_parts)
    path, tokenizer = tmp_path / "history.sqlite", tool_tokenizer(QWEN3)
    replies = ("no call", THOUGHT + written("add", '{"x": 1}'), "no call either")

    def resolve(messages: list[dict]) -> ResolvedContext:
        return resolving(tokenizer, reader).resolve(
            "ann", messages, epoch=1, durable=True, template_input=WITH_TOOLS
        )

    with (
        open_store(path, fingerprint=FINGERPRINT) as store,
        closing(HistoryReader(path, fingerprint=FINGERPRINT)) as reader,
    ):
        turn_ids = []
        for text in replies:
            resolved = resolve([user("hi")])
            store.commit([record_of(resolved, [*tokenizer.encode(text, add_bos=False), 2], text)])
            turn_ids.append(resolved.node.turn_id)
        repeated = {"role": "assistant", "content": None, "tool_calls": [call("t", "add", '{"x":1}')]}
        found = resolve([user("hi"), repeated, result("t", "2")])
    assert found.parent is not None and found.parent.turn_id == turn_ids[1]
    assert found.parent.template_input.tools == WITH_TOOLS.tools
    assert found.parent.reply["reasoning"] == "let me see"
    assert found.keep == found.parent.num_tokens


def test_a_reply_with_text_on_both_sides_of_a_call_is_found_in_the_history(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "history.sqlite", tool_tokenizer(QWEN3)
    read_so = replace(WITH_TOOLS, reply=ReplyFormat(calls="hermes"))
    text = "I look.\n" + written("add", '{"x": 1}') + "\nThat is it."
    with (
        open_store(path, fingerprint=FINGERPRINT) as store,
        closing(HistoryReader(path, fingerprint=FINGERPRINT)) as reader,
    ):
        resolver = resolving(tokenizer, reader)
        resolved = resolver.resolve("ann", [user("hi")], epoch=1, durable=True, template_input=read_so)
        ids = [*tokenizer.encode(text, add_bos=False), 2]
        store.commit([record_of(resolved, ids, text)])
        reply = ReplyReader(tokenizer).message(text, ids, read_so, turn=resolved.node.turn_id)
        messages = [user("hi"), reply, result(reply["tool_calls"][0]["id"], "2")]
        found = resolving(tokenizer, reader).resolve(
            "ann", messages, epoch=1, durable=True, template_input=read_so
        )
    assert reply["content"] == "I look.\nThat is it."
    assert found.parent is not None and found.parent.turn_id == resolved.node.turn_id


def record_of(resolved: ResolvedContext, token_ids: list[int], text: str) -> TurnRecord:
    return TurnRecord(
        conversation_id="",
        turn_index=0,
        prompt_token_ids=tuple(resolved.prompt_token_ids),
        output_token_ids=tuple(token_ids),
        seed=1,
        finish_reason="stop",
        created_at_s=1.0,
        messages=resolved.messages,
        output_text=text,
        turn_id=resolved.node.turn_id,
        owner="ann",
        chain=resolved.node.chain,
        template_input=resolved.template_input,
    )
