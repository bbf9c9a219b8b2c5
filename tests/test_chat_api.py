"""`chat`: prefixes of messages, several conversations at once, and transcripts that are resent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve_jax import LLM, ChatTemplateError, InvalidRequestError, SamplingParams, TokenizerMissingError
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.text import Tokenizer, byte_tokenizer
from tests.fake_llm import TOKENIZER, fake_llm
from tests.text.tokenizer_zoo import byte_level_backend

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
SYSTEM = {"role": "system", "content": "You are a helpful assistant, and you answer in riddles only."}
FOLDED = """\
{{- bos_token }}{% for m in messages if m.role != 'system' %}
{{- '[INST] ' + (messages[0].content if loop.first and messages[0].role == 'system' else '') }}
{{- m.content + ' [/INST]' }}{% endfor %}"""
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def with_template(template: str) -> Tokenizer:
    return Tokenizer(
        byte_tokenizer()._backend,
        bos_token="<bos>",
        eos_token="<eos>",
        wants_bos=True,
        chat_template=template,
    )


def turns_of(llm: LLM, name: str) -> list[Any]:
    """Return those tokens of a conversation's turns that the caller or the template determines."""
    return [(turn.prompt_token_ids, turn.output_token_ids, turn.messages) for turn in llm.history(name).turns]


# A shared system message.


def test_a_chat_after_a_prefix_equals_the_chat_of_all_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Holds for ids, the history, later turns and after a restart; chunks are computed once."""
    llm, harness = fake_llm(monkeypatch, path=tmp_path / "chats.sqlite")
    prefix = llm.share_prefix([SYSTEM])
    assert prefix.messages == (SYSTEM,)
    assert TOKENIZER.decode_raw(prefix.token_ids) == f"<bos><|system|>{SYSTEM['content']}<|end|>"
    whole = llm.chat([SYSTEM, user("hi")], PARAMS, conversation_id="whole")
    first = llm.chat([user("hi")], PARAMS, conversation_id="behind", prefix=prefix)
    with llm.stream_chat([user("ho")], PARAMS, prefix=prefix) as stream:
        list(stream)
    assert first.token_ids == whole.token_ids and turns_of(llm, "behind") == turns_of(llm, "whole")
    num_shared = len(prefix.token_ids) // 16 * 16
    assert stream.output is not None and stream.output.usage.reused_gpu_tokens == num_shared > 0
    for name in ("whole", "behind"):
        llm.chat([user("and?")], PARAMS, conversation_id=name)
    llm.close()
    llm, harness = fake_llm(monkeypatch, path=tmp_path / "chats.sqlite")
    for name in ("whole", "behind"):
        llm.chat([user("at last")], PARAMS, conversation_id=name)
    assert turns_of(llm, "behind") == turns_of(llm, "whole") and len(turns_of(llm, "whole")) == 3
    harness.check_empty()


def test_a_prefix_ends_at_a_token_boundary_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the space after the system message is one token with the "user" that follows."""
    backend = byte_level_backend()
    backend.add_tokens([" user"])
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", chat_template=PLAIN)
    llm, _ = fake_llm(monkeypatch, tokenizer=tokenizer)
    prefix = llm.share_prefix([SYSTEM])
    llm.chat([SYSTEM, user("the cat")], PARAMS, conversation_id="whole")
    llm.chat([user("the cat")], PARAMS, conversation_id="behind", prefix=prefix)
    assert turns_of(llm, "behind") == turns_of(llm, "whole")
    assert tokenizer.decode_raw(prefix.token_ids) == f"system:{SYSTEM['content']}"


@pytest.mark.parametrize("template", [FOLDED, "{{ bos_token }}{{ messages[-1].content }}"])
def test_messages_that_the_template_does_not_separate_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=with_template(template))
    with pytest.raises(ChatTemplateError, match="share the text"):
        llm.share_prefix([SYSTEM])


def test_text_at_the_templates_beginning_is_a_prefix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages are sent then, including the shared ones; any other text is refused."""
    llm, _ = fake_llm(monkeypatch, tokenizer=with_template(FOLDED))
    prefix = llm.share_prefix(f"[INST] {SYSTEM['content']}")
    output = llm.chat([SYSTEM, user("hi")], PARAMS, conversation_id="a", prefix=prefix)
    assert turns_of(llm, "a")[0][2] == (SYSTEM, user("hi"))
    assert output.token_ids == llm.chat([SYSTEM, user("hi")], PARAMS).token_ids
    for messages in ([user("hi")], [{**SYSTEM, "content": "else"}, user("hi")]):
        with pytest.raises(InvalidRequestError, match="share the first messages instead"):
            llm.chat(messages, PARAMS, prefix=prefix)
    whole = llm.share_prefix(f"[INST] {SYSTEM['content']}hi [/INST]")
    with pytest.raises(InvalidRequestError, match=r"^prefix is SharedPrefix"):
        llm.chat([SYSTEM, user("hi")], PARAMS, prefix=whole)


def test_a_prefix_that_the_template_now_renders_differently_must_be_shared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _ = fake_llm(monkeypatch)
    yesterday = SharedPrefix(tuple(TOKENIZER.encode("It is Monday.", add_bos=True)), (SYSTEM,))
    with pytest.raises(InvalidRequestError, match="share the messages once more"):
        llm.chat([user("hi")], PARAMS, prefix=yesterday)


def test_invalid_prefixes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    prefix = llm.share_prefix([SYSTEM])
    with pytest.raises(InvalidRequestError, match=r"messages.*the prefix holds the first 1 of these 2"):
        llm.chat([SYSTEM, user("hi")], PARAMS, prefix=prefix)
    llm.chat([user("hi")], PARAMS, conversation_id="a", prefix=prefix)
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidRequestError, match="first turn"):
            call([user("ho")], PARAMS, conversation_id="a", prefix=prefix)
    llm.release_prefix(prefix)
    llm.chat([user("ho")], PARAMS, conversation_id="a")
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidRequestError, match="share it again"):
            call([user("hi")], PARAMS, conversation_id="b", prefix=prefix)
    with pytest.raises(InvalidRequestError, match=r"^prefix\[0\]\.role"):
        llm.share_prefix([{"role": "wizard", "content": "a"}])


def test_without_a_tokenizer_messages_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch, tokenizer=None)
    for call in (
        lambda: llm.share_prefix([SYSTEM]),
        lambda: llm.chat([user("hi")]),
        lambda: llm.generate(["a"]),
    ):
        with pytest.raises(TokenizerMissingError):
            call()
    assert llm.generate([[5, 6]], PARAMS, prefix=llm.share_prefix([1, 2]))[0].token_ids


# Several conversations.


def test_a_list_of_conversations_gives_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, harness = fake_llm(monkeypatch)
    prefix = llm.share_prefix([SYSTEM])
    both = [[user("hi")], [user("one"), user("two")]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 5)]
    outputs = llm.chat(both, params, conversation_ids=["a", "b"], prefix=prefix)
    assert [(one.conversation_id, len(one.token_ids)) for one in outputs] == [("a", 3), ("b", 5)]
    assert len(harness.runner.rows) < 8, "a step serves both"
    assert [turns_of(llm, name)[0][2][1:] for name in "ab"] == [tuple(messages) for messages in both]
    (alone,) = llm.chat([[user("hi")]], PARAMS)
    assert alone.token_ids == llm.chat([user("hi")], PARAMS).token_ids and alone.conversation_id is None


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "^messages is"),
        ([[]], {}, r"^messages\[0\] is"),
        ([[user("a")], []], {}, r"^messages\[1\] is"),
        ([[user("a")], user("b")], {}, r"^messages\[1\] is"),
        ([user("a"), [user("b")]], {}, r"^messages\[0\] is"),
        ([[user("a")], [{"role": "user"}]], {}, r"^messages\[1\]\[0\]\.content"),
        ([[user("a")]], {"conversation_id": "a"}, "^conversation_id is.*use conversation_ids"),
        ([user("a")], {"conversation_ids": ["a"]}, "^conversation_ids is.*use conversation_id"),
        ([[user("a")]], {"conversation_ids": "a"}, "^conversation_ids is"),
        ([[user("a")]], {"sampling_params": [PARAMS, PARAMS]}, "^sampling_params is"),
        ([user("a")], {"sampling_params": [PARAMS]}, "^sampling_params is"),
    ],
)
def test_an_invalid_list_is_named_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, messages: Any, options: dict[str, Any], words: str
) -> None:
    llm, harness = fake_llm(monkeypatch)
    with pytest.raises(InvalidRequestError, match=words):
        llm.chat(messages, **options)
    assert not harness.runner.rows and not llm.unfinished


# Transcripts.


def told(llm: LLM, *contents: str, name: str = "a", **options: Any) -> list[dict[str, str]]:
    """Send each message; return the transcript that a client would have."""
    transcript = []
    for content in contents:
        transcript.append(user(content))
        output = llm.chat([user(content)], PARAMS, conversation_id=name, **options)
        transcript.append(assistant(output.text))
        options = {}
    return transcript


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_resent_transcript_is_refused(monkeypatch: pytest.MonkeyPatch, trimmed: bool) -> None:
    llm, _ = fake_llm(monkeypatch)
    transcript = told(llm, "yes", "yes", "no")
    if trimmed:
        transcript = [one | {"content": one["content"].strip()} for one in transcript]
    for num_sent, rest in ((3, [user("no")]), (6, [user("new")]), (6, [])):
        sent = [*transcript[:num_sent], *rest]
        num_held = num_sent // 2 * 2 if num_sent < 6 else 6
        with pytest.raises(InvalidRequestError, match=f"first {num_held} of these {len(sent)}") as caught:
            llm.chat(sent, PARAMS, conversation_id="a")
        hint = f"from [{num_held}] on" if len(sent) > num_held else "send a new message"
        assert caught.value.field == "messages" and hint in str(caught.value)
    assert len(llm.history("a").turns) == 3
    llm.chat([*transcript, user("new")], PARAMS, conversation_id="b")


def test_a_transcript_without_the_shared_beginning_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = fake_llm(monkeypatch)
    transcript = told(llm, "hi", "ho", prefix=llm.share_prefix([SYSTEM]))
    other = SYSTEM | {"content": "Be brief."}
    for sent, num_held in (
        ([*transcript, user("new")], 4),
        ([SYSTEM, *transcript, user("new")], 5),
        ([other, *transcript, user("new")], 5),
    ):
        with pytest.raises(InvalidRequestError, match=f"holds the first {num_held} of these"):
            llm.stream_chat(sent, PARAMS, conversation_id="a")
        with pytest.raises(InvalidRequestError, match=r"^prompts\[0\]"):
            llm.submit([sent], PARAMS, conversation_ids=["a"])


@pytest.mark.parametrize(
    "new_messages",
    [
        [user("yes")],
        [user("yes"), user("yes")],
        [user("yes"), user("and more")],
        [SYSTEM, user("yes")],
        [user("maybe"), assistant("an example"), user("yes")],
        [assistant("as I said"), user("yes")],
    ],
)
def test_repeated_messages_are_new_ones(
    monkeypatch: pytest.MonkeyPatch, new_messages: list[dict[str, str]]
) -> None:
    llm, _ = fake_llm(monkeypatch)
    told(llm, "yes", "yes")
    llm.chat(new_messages, PARAMS, conversation_id="a")
    assert llm.history("a").turns[2].messages == tuple(new_messages)


def test_examples_in_a_first_turn_are_not_a_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    """They contain replies, but not this conversation's; sent with its reply they are a transcript."""
    llm, _ = fake_llm(monkeypatch)
    first = [SYSTEM, user("2 + 2"), assistant("4"), user("3 + 3")]
    for name in "ab":
        llm.chat(first, PARAMS, conversation_id=name)
    llm.chat(first, PARAMS, conversation_id="a")
    with pytest.raises(InvalidRequestError, match="first 5 of these 6"):
        llm.chat([*first, assistant("6"), user("4 + 4")], PARAMS, conversation_id="b")
    llm.generate(["text"], PARAMS, conversation_ids=["raw"])
    llm.chat([user("text"), assistant("x"), user("y")], PARAMS, conversation_id="raw")


def test_the_last_part_of_a_transcript_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that truncate begin with a later turn; its reply identifies it."""
    llm, _ = fake_llm(monkeypatch)
    transcript = told(llm, "one", "two", "three")
    with pytest.raises(InvalidRequestError, match="holds the first 4 of these 5"):
        llm.chat([*transcript[2:], user("four")], PARAMS, conversation_id="a")
    with pytest.raises(InvalidRequestError, match="holds the first 2 of these 3"):
        llm.chat([*transcript[4:], user("four")], PARAMS, conversation_id="a")
    example = [user("two"), assistant("another reply"), user("four")]
    assert llm.chat(example, PARAMS, conversation_id="a").finish_reason == "length"


def test_a_value_that_json_cannot_hold_is_an_error_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    llm, _ = fake_llm(monkeypatch)
    values: list[Any] = [deep, 10**5000, b"x", float("nan")]
    for value in values:
        with pytest.raises(InvalidRequestError, match=r"messages\[1\] is .* made of JSON values"):
            llm.chat([user("hi"), {**user("you"), "also": value}], PARAMS, conversation_id="a")
    assert llm.conversations() == []


@pytest.mark.parametrize("beside", [{"name": "\ud800"}, {"\ud800": "x"}, {"also": ["x", {"y": "\udfff"}]}])
def test_no_part_of_a_message_may_hold_a_lone_surrogate(
    monkeypatch: pytest.MonkeyPatch, beside: dict[str, Any]
) -> None:
    """A template may render any part, and neither a tokenizer nor the wire format accepts it."""
    llm, _ = fake_llm(monkeypatch)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] is .* UTF-8 can hold"):
        llm.chat([{**user("hi"), **beside}], PARAMS, conversation_id="a")
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content is .* UTF-8 can hold"):
        llm.chat([{**user("\ud800"), **beside}], PARAMS, conversation_id="a")
