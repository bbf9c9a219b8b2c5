"""`chat` with templates that write earlier messages differently: a context is the rendering of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve_jax import LLM, SamplingParams
from pensieve_jax.text import ChatFormat, Tokenizer, byte_tokenizer
from tests.engine.harness import Harness
from tests.engine.oracles import TurnFacts
from tests.fake_llm import fake_llm

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
SYSTEM = {"role": "system", "content": "Be kind."}
TEMPLATES = {
    "replies lose their first half": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{{ m.content[m.content | length // 2:] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "only the last reply is whole": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.revindex < 3 else m.content[:3] }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "the system message moves": (
        "{% for m in messages if m.role != 'system' %}{% if loop.last %}{{ messages[0].content }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    ),
    "an opening is prompted": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>Well, {% endif %}"
    ),
}


def with_template(template: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=template)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


class Chat:
    """A conversation, and the messages that it must hold."""

    def __init__(self, llm: LLM, harness: Harness, tokenizer: Tokenizer, name: str = "a") -> None:
        self.llm, self.harness, self.tokenizer, self.name = llm, harness, tokenizer, name
        self.messages: list[dict[str, Any]] = []

    def turn(self, *messages: dict[str, Any]) -> None:
        """Run a turn; its context must be the whole rendering, and its tokens those of the reference."""
        output = self.llm.chat(list(messages), PARAMS, conversation_id=self.name)
        self.messages += messages
        record = self.llm.history(self.name)
        context = tuple(record.token_ids.tolist())[: -len(output.token_ids)]
        whole = ChatFormat(self.tokenizer).token_ids(self.messages)
        assert self.tokenizer.decode_raw(context) == self.tokenizer.decode_raw(whole)
        facts = TurnFacts((), context, PARAMS, 0, self.harness.max_context_tokens)
        assert output.token_ids == self.harness.expected(facts)
        self.harness.engine.check_integrity()
        self.messages.append({"role": "assistant", "content": output.text})


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_context_is_the_rendering_of_the_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Holds for later turns, for forks, and after a truncation."""
    tokenizer = with_template(TEMPLATES[name])
    llm, harness = fake_llm(monkeypatch, tokenizer=tokenizer)
    chat = Chat(llm, harness, tokenizer)
    chat.turn(SYSTEM, user("first"))
    for number in range(3):
        chat.turn(user(f"question {number}"))
    assert llm.stats()["num_turns_rewritten"] == 3
    assert [turn.messages for turn in llm.history("a").turns[:2]] == [
        (SYSTEM, user("first")),
        (user("question 0"),),
    ]
    llm.fork("a", "b")
    fork = Chat(llm, harness, tokenizer, "b")
    fork.messages = list(chat.messages)
    fork.turn(user("elsewhere"))
    llm.truncate("a", num_turns=2)
    del chat.messages[5:]
    chat.turn(user("again"))
    harness.check_empty()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_goes_on_after_a_restart_and_a_cancelled_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    tokenizer = with_template(TEMPLATES[name])
    llm, harness = fake_llm(monkeypatch, tokenizer=tokenizer, path=tmp_path / "chats.sqlite")
    chat = Chat(llm, harness, tokenizer)
    chat.turn(SYSTEM, user("first"))
    chat.turn(user("second"))
    before = llm.history("a").token_ids.tolist()
    with llm.stream_chat([user("given up")], PARAMS, conversation_id="a") as stream:
        next(iter(stream))
    assert llm.history("a").token_ids.tolist() == before
    chat.turn(user("third"))
    llm.close()
    chat.llm, chat.harness = fake_llm(monkeypatch, tokenizer=tokenizer, path=tmp_path / "chats.sqlite")
    chat.turn(user("fourth"))
    chat.llm.close()


def test_a_template_that_appends_replaces_only_what_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of one token: a letter stays, and half a character or a control token is replaced."""
    tokenizer = byte_tokenizer()
    llm, _ = fake_llm(monkeypatch, tokenizer=tokenizer)
    params, num_letters = SamplingParams(max_tokens=1, ignore_eos=True, seed=0), 0
    for number in range(20):
        reply = llm.chat([user(f"question {number}")], params, conversation_id=f"c{number}")
        llm.chat([user("and?")], params, conversation_id=f"c{number}")
        first, second = llm.history(f"c{number}").turns
        is_letter = reply.token_ids[0] < 128 or reply.token_ids[0] >= tokenizer.vocab_size
        num_letters += is_letter
        num_before = len(first.prompt_token_ids)
        assert second.keep == (None if is_letter else num_before)
    assert 0 < num_letters < 20
    assert llm.stats()["num_turns_rewritten"] == 0, "the last token had no KV cache"
