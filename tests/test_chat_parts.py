"""`LLM.chat` divides replies into reasoning, content and calls; the model's tokens are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax import LLM, SamplingParams
from pensieve_jax.core.outputs import ToolCall
from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.text.reply_tokens import ReplyTokens
from tests.fake_llm import fake_llm
from tests.server.scripted import marked_tokenizer
from tests.text.tool_templates import QWEN3, TOOLS

TOKENIZER = marked_tokenizer(QWEN3)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call>'
REPLY = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
USER = [{"role": "user", "content": "what?"}]

_ACCEPT = ReplyTokens.accept

type Scripted = Callable[..., tuple[LLM, SamplingParams]]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Return a function that makes an LLM whose turns, one at a time, say the given replies."""

    def make(*replies: str, path: Path | None = None) -> tuple[LLM, SamplingParams]:
        ids = deque(one for reply in replies for one in TOKENIZER.encode(reply, add_bos=False))
        own_accept = _ACCEPT

        def scripted_accept(self: ReplyTokens, token_id: int, *rest: Any) -> Any:
            return own_accept(self, ids.popleft(), *rest)

        monkeypatch.setattr(ReplyTokens, "accept", scripted_accept)
        llm, _ = fake_llm(monkeypatch, tokenizer=TOKENIZER, path=path)
        num_tokens = [len(TOKENIZER.encode(reply, add_bos=False)) for reply in replies]
        return llm, SamplingParams(max_tokens=num_tokens[0], ignore_eos=True)

    return make


def test_a_chat_has_reasoning_content_and_calls(scripted: Scripted) -> None:
    llm, params = scripted(REPLY)
    output = llm.chat(USER, params, tools=TOOLS)
    assert (output.reasoning, output.text) == ("Hm.", "I look.")
    (call,) = output.tool_calls
    assert call == ToolCall(call.call_id, "look_up", '{"word": "cat"}')
    assert output.usage.reasoning_tokens == len("<think>\nHm.\n") + 1


def test_a_stream_has_reasoning_and_content(scripted: Scripted) -> None:
    llm, params = scripted(REPLY)
    with llm.stream_chat(USER, params, tools=TOOLS) as stream:
        deltas = list(stream)
        assert "".join(delta.reasoning for delta in deltas) == "Hm."
        assert "".join(delta.text for delta in deltas) == "I look."
        assert stream.output is not None
        assert [call.name for call in stream.output.tool_calls] == ["look_up"]


def test_a_result_names_the_call_of_the_output_also_after_a_restart(
    scripted: Scripted, tmp_path: Path
) -> None:
    path = tmp_path / "history.sqlite"
    llm, params = scripted(REPLY, path=path)
    output = llm.chat(USER, params, tools=TOOLS, conversation_id="a")
    llm.close()
    llm, params = scripted(REPLY, path=path)
    answer = {"role": "tool", "tool_call_id": output.tool_calls[0].call_id, "content": "a pet"}
    assert llm.chat([answer], params, conversation_id="a").tool_calls[0].call_id != answer["tool_call_id"]
    llm.close()


def test_marks_that_the_detokenizer_loses_are_noticed(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: without shown marks, the test of calls would fail."""
    monkeypatch.setattr("pensieve_jax.text.reply_tokens.shown_marks", lambda template: ())
    llm, params = scripted(REPLY)
    assert llm.chat(USER, params, tools=TOOLS).tool_calls == ()


def test_a_turn_of_one_call_ends_with_it_and_its_tokens_are_kept(scripted: Scripted) -> None:
    """In the engine itself; the turn's last token is the call's last bracket."""
    llm, _ = scripted(REPLY + CALL)
    template = TemplateInput(tuple(TOOLS), reply=ReplyFormat("hermes", "think", max_calls=1))
    spec = TurnSpec([1, 2, 3], SamplingParams(max_tokens=500), "a", template_input=template)
    (turn,) = llm.engine.submit([spec])
    while llm.engine.has_unfinished:
        llm.engine.step()
    output = turn.result()
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", ord("}"))
    assert output.text == REPLY.removesuffix("\n</tool_call>")
    llm.close()


@pytest.mark.parametrize("name", ["hermes", "mistral", "pythonic"])
def test_a_reply_without_calls_does_not_have_the_mark_before_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """If that is one token, as in the first of these formats; no step waits for the mask."""
    mark_id = TOKENIZER.mark_id("<tool_call>")
    assert mark_id is not None
    llm, harness = fake_llm(monkeypatch, tokenizer=TOKENIZER)
    params = SamplingParams(max_tokens=40, ignore_eos=True, allowed_token_ids=[mark_id, 97])
    specs = [
        TurnSpec(
            [1, 2, 3],
            params,
            template_input=TemplateInput(tuple(TOOLS), reply=ReplyFormat(name, max_calls=limit)),
        )
        for limit in (None, 0)
    ]
    free, without = harness.engine.submit(specs)
    while harness.engine.has_unfinished:
        harness.engine.step()
    assert set(free.result().token_ids) == {mark_id, 97}
    assert set(without.result().token_ids) == ({97} if name == "hermes" else {mark_id, 97})
    llm.close()


def test_what_may_be_called_is_stored_with_a_turn() -> None:
    for limit in (None, 0, 1):
        given = TemplateInput(reply=ReplyFormat("hermes", max_calls=limit))
        assert TemplateInput.unpacked(given.packed()) == given
    assert TemplateInput(reply=ReplyFormat("hermes")).packed() == {"reply": {"calls": "hermes"}}
