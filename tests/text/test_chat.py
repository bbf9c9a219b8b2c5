"""A turn sends what the template adds to the history, and never renders the history's replies again."""

import functools
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.core.errors import ChatTemplateError, InvalidRequestError, TokenizerMissingError
from pensieve_jax.text import ChatFormat, Tokenizer, byte_tokenizer
from tests.text.tokenizer_zoo import byte_level_backend, metaspace_backend

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' -}}
{% endif %}
"""
LLAMA2 = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}
{%- endfor %}
"""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chatml():
    backend = byte_level_backend(("<s>", "<|im_start|>", "<|im_end|>"))
    return Tokenizer(backend, bos_token="<s>", eos_token="<|im_end|>", wants_bos=True, chat_template=CHATML)


def with_template(template):
    return Tokenizer(
        byte_tokenizer()._backend,
        bos_token="<bos>",
        eos_token="<eos>",
        wants_bos=True,
        chat_template=template,
    )


def user(content):
    return {"role": "user", "content": content}


def reply(tokenizer, text, ending="", finish_reason="stop"):
    """Return (output_text, output_token_ids, finish_reason) as an earlier turn holds them."""
    ids = tokenizer.encode(text, add_bos=False) + tokenizer.encode(ending, add_bos=False)
    return text, ids, finish_reason


def turn_text(tokenizer, earlier, new_messages):
    return tokenizer.decode_raw(ChatFormat(tokenizer).turn_token_ids(earlier, new_messages))


def test_the_first_turn_is_the_whole_rendering_behind_one_bos():
    for tokenizer, expected in (
        (chatml(), "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (byte_tokenizer(), "<bos><|user|>hi<|end|><|assistant|>"),
    ):
        ids = ChatFormat(tokenizer).turn_token_ids([], [user("hi")])
        assert ids == tokenizer.encode(expected, add_bos=False)
        assert ids.count(tokenizer.bos_id) == 1


@pytest.mark.parametrize(
    ("ending", "finish_reason", "expected"),
    [
        ("", "length", "<|im_end|>\n"),
        ("<|im_end|>", "stop", "\n"),
        ("<|im_end|>", "length", "\n"),  # ignore_eos, and the last id happens to be the marker
        ("<|im_end|>\n", "stop", ""),
        ("<s>", "stop", "<|im_end|>\n"),  # another id ended the turn
        ("STOP", "stop", "<|im_end|>\n"),  # a stop string
    ],
)
def test_a_later_turn_closes_the_reply_once(ending, finish_reason, expected):
    tokenizer = chatml()
    earlier = [((user("hi"),), *reply(tokenizer, "the cat", ending, finish_reason))]
    text = turn_text(tokenizer, earlier, [user("and?")])
    assert text == expected + "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_an_empty_reply_is_closed_too():
    text = turn_text(byte_tokenizer(), [((user("a"),), "", (), "truncated")], [user("b")])
    assert text == "<|end|><|user|>b<|end|><|assistant|>"


def test_a_cut_reply_without_text_is_closed_by_its_ids():
    tokenizer = byte_tokenizer()
    end = tokenizer.encode("<|end|>", add_bos=False)
    for ids, expected in ((list(b"yo"), "<|end|>"), ([*b"yo", *end], ""), ([*end, *b"yo"], "<|end|>")):
        text = turn_text(tokenizer, [((user("a"),), None, ids, "truncated")], [user("b")])
        assert text == expected + "<|user|>b<|end|><|assistant|>"


def test_a_marker_within_a_reply_is_not_its_end():
    tokenizer = byte_tokenizer()
    ids = [*b"a", 261, *b"b"]
    earlier = [((user("x"),), "ab", ids, "length")]
    assert turn_text(tokenizer, earlier, [user("y")]).startswith("<|end|><|user|>y")


contents = st.text(st.sampled_from("ab c\n{}%\u4e2d\"'<"), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(st.lists(contents, min_size=1, max_size=2), contents), min_size=1, max_size=4),
    ended=st.booleans(),
)
def test_turns_joined_are_one_rendering(turns, ended):
    # Contents are of any kind, with white space at their ends: the joined ids of all turns and replies equal
    # the template's rendering of the whole conversation.
    tokenizer = byte_tokenizer()
    chat = ChatFormat(tokenizer)
    earlier, ids, messages = [], [], []
    for texts, reply_text in turns:
        new = tuple(user(text) for text in texts)
        ids += chat.turn_token_ids(earlier, new)
        output = [*reply_text.encode(), *([261] if ended else [])]
        ids += output
        earlier.append((new, reply_text, output, "stop" if ended else "length"))
        messages += [*new, {"role": "assistant", "content": reply_text}]
    expected = "<bos>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
    assert tokenizer.decode_raw(ids) + ("" if ended else "<|end|>") == expected


def test_the_stored_ids_need_not_be_those_of_the_text():
    # "the" is spelled by its letters, which no tokenizer would return for the text: only the text after it
    # counts.
    tokenizer = chatml()
    letters = [tokenizer.encode(letter, add_bos=False)[0] for letter in "the"]
    assert letters != tokenizer.encode("the", add_bos=False)
    earlier = [((user("hi"),), "the", letters, "length")]
    assert turn_text(tokenizer, earlier, [user("x")]).startswith("<|im_end|>\n<|im_start|>user")


def test_a_template_in_the_manner_of_llama_2():
    # The template has spaces around a reply that the model's ids need not have, and its own bos in every
    # turn.
    tokenizer = with_template(LLAMA2)
    for output, finish_reason, expected in (
        ((*b" r", 257), "stop", ""),
        (tuple(b" r"), "length", " <eos>"),
    ):
        earlier = [((user("a"),), " r", output, finish_reason)]
        assert turn_text(tokenizer, earlier, [user("b")]) == expected + "<bos>[INST] b [/INST]"
    with pytest.raises(ChatTemplateError, match="Roles must alternate"):
        ChatFormat(tokenizer).turn_token_ids([], [user("a"), user("b")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }} messages: " + PLAIN,
        PLAIN.replace("in messages", "in messages | reverse"),
        PLAIN.replace("in messages", "in messages[-1:]"),
        PLAIN.replace("\n", "{{ eos_token if loop.last }}\n"),
        PLAIN.replace("\n", "{{ eos_token if loop.last and m.role == 'assistant' }}\n"),
        PLAIN.replace("m.content", "m.content | upper"),
        PLAIN.replace("assistant: ", "assistant (thinking): "),
        PLAIN + "{{ messages[1].content if messages | length > 2 }}",
    ],
)
def test_a_template_without_the_prefix_property_is_refused(template):
    chat = ChatFormat(with_template(template))
    assert chat.turn_token_ids([], [user("a")])
    with pytest.raises(ChatTemplateError, match="cannot continue a conversation"):
        chat.turn_token_ids([((user("a"),), "r", tuple(b"r"), "length")], [user("b")])


@pytest.mark.parametrize(
    ("output", "finish_reason", "is_told"),
    [
        (b"r", "length", True),
        (b"r", "stop", True),
        (b"r\n", "stop", True),
        ((*b"r", 257), "stop", True),
        (b"r\n.", "stop", False),
        (b"r.", "stop", False),
        ((*b"r", 258), "stop", False),
        ((*b"r", 258), "length", True),  # sampled, and not what ended it
        ((258, *b"r", 257), "stop", True),
        ((258, *b"r."), "stop", False),
    ],
)
def test_a_reply_ends_with_its_known_ending_or_the_templates(output, finish_reason, is_told):
    chat = ChatFormat(with_template(PLAIN))
    earlier = [((user("a"),), "r", tuple(output), finish_reason)]
    ids = chat.turn_token_ids(earlier, [user("b")])
    if is_told:
        assert chat.turn_token_ids(earlier, [user("b")], exact_only=True) == ids
    else:
        with pytest.raises(ChatTemplateError, match="more than its text"):
            chat.turn_token_ids(earlier, [user("b")], exact_only=True)
    assert chat.may_follow(earlier[0]) is is_told, "the ids alone show it"


def test_a_template_that_refuses_short_conversations_sets_no_ending():
    strict = "{% if messages|length < 9 %}{{ raise_exception('too few') }}{% endif %}" + PLAIN
    stopped = ((user("a"),), "r", tuple(b"r."), "stop")
    assert ChatFormat(with_template(strict)).may_follow(stopped)
    assert not ChatFormat(with_template(PLAIN)).may_follow(stopped)


def test_a_plain_template_with_a_stop_string_for_marker():
    tokenizer = with_template(PLAIN)
    for output, expected in ((b"r\n", ""), (b"r", "\n"), (b"r\n.", "")):
        text = turn_text(tokenizer, [((user("a"),), "r", tuple(output), "stop")], [user("b")])
        assert text == expected + "user: b\nassistant: "


def test_a_message_may_hold_the_placeholder_word():
    tokenizer = byte_tokenizer()
    earlier = [((user("ReplyStandsHere"),), "ReplyStandsHereX", tuple(b"r"), "length")]
    text = turn_text(tokenizer, earlier, [user("ReplyStandsHereX")])
    assert text == "<|end|><|user|>ReplyStandsHereX<|end|><|assistant|>"


# --- turns without messages


def test_chat_behind_raw_turns_starts_the_template_without_a_bos():
    tokenizer = byte_tokenizer()
    raw = (None, "once", tuple(b"once"), "length")
    assert turn_text(tokenizer, [raw], [user("a")]) == "<|user|>a<|end|><|assistant|>"
    chat = ((user("a"),), "b", (*b"b", 261), "stop")
    assert turn_text(tokenizer, [raw, chat], [user("c")]) == "<|user|>c<|end|><|assistant|>"
    # A raw turn between chat turns: the template starts over after it.
    assert turn_text(tokenizer, [chat, raw], [user("c")]) == "<|user|>c<|end|><|assistant|>"


@pytest.mark.parametrize("earlier", [[], [(None, "once", tuple(b"once"), "length")]])
def test_a_tokenizer_without_special_tokens_renders_none_of_them(earlier):
    template = "{{ bos_token }}" + PLAIN + "{{ eos_token }}"
    tokenizer = Tokenizer(byte_tokenizer()._backend, chat_template=template)
    assert turn_text(tokenizer, earlier, [user("a")]) == "user: a\nassistant: "
    assert tokenizer.decode_raw(ChatFormat(tokenizer).prefix_token_ids([user("a")])).startswith("user: a")


# --- tokenization at the seam


def test_no_space_is_added_before_the_text_after_a_reply():
    backend = metaspace_backend(byte_fallback=False)
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", chat_template=PLAIN)
    earlier = [((user("a"),), "the", tuple(tokenizer.encode("the", add_bos=False)), "length")]
    ids = ChatFormat(tokenizer).turn_token_ids(earlier, [user("a")])
    assert tokenizer.token_text(ids[0]) == "\n"


# --- what templates may use


def test_templates_run_as_written_for_transformers():
    template = (
        "{% for m in messages %}{% if loop.index0 > 5 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ eos_token }}"
        "\n  {% if true %}\n  indented\n  {% endif %}\n"
    )
    chat = ChatFormat(with_template(template), now=lambda: datetime(2031, 1, 2))
    ids = chat.turn_token_ids([], [{**user("<\u00e9>"), "name": "x"}])
    assert with_template("").decode_raw(ids) == (
        '<bos>{"role": "user", "content": "<\u00e9>", "name": "x"}2031<eos>\n  indented\n'
    )


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ none + 'a' }}"],
)
def test_templates_that_fail_or_reach_out_are_errors(template):
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        ChatFormat(with_template(template)).turn_token_ids([], [user("a")])


def test_missing_parts_are_named():
    with pytest.raises(TokenizerMissingError):
        ChatFormat(None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatFormat(with_template(None))
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        ChatFormat(with_template("{% if %}"))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages is"),
        ("hi", "messages is"),
        (user("hi"), "messages is"),
        (None, "messages is"),
        ([user("a"), "hi"], r"messages\[1\] is"),
        ([{"content": "a"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([user("a"), {"role": 3, "content": "a"}], r"messages\[1\]\.role"),
        ([{"role": "wizard", "content": "a"}], r"messages\[0\]\.role is 'wizard'"),
        ([user(None)], r"messages\[0\]\.content"),
        ([user(["a"])], r"messages\[0\]\.content"),
        ([user("\ud800")], r"messages\[0\]\.content"),
        ([{**user("a"), "extra": object()}], r"messages\[0\] is"),
        ([{**user("a"), "extra": functools.reduce(lambda inner, _: [inner], range(10**5), 0)}], r"\[0\] is"),
    ],
)
def test_malformed_messages_are_named(messages, field):
    with pytest.raises(InvalidRequestError, match=field):
        ChatFormat(byte_tokenizer()).turn_token_ids([], messages)


@pytest.mark.parametrize(
    ("template", "last_id", "is_told"),
    [(None, 261, True), (None, 257, True), (None, 258, False), (PLAIN, 261, False), (PLAIN, 257, True)],
)
def test_a_reply_may_end_with_the_marker_of_the_template_or_the_end_of_sequence(template, last_id, is_told):
    """Id 261 is `<|end|>`, which only the first template writes; 257 is the end of sequence."""
    chat = ChatFormat(byte_tokenizer() if template is None else with_template(template))
    earlier = ((user("a"),), "r", (*b"r", last_id), "stop")
    assert chat.may_follow(earlier) is is_told
    if is_told:
        assert chat.turn_token_ids([earlier], [user("b")], exact_only=True)
    else:
        with pytest.raises(ChatTemplateError, match="more than its text"):
            chat.turn_token_ids([earlier], [user("b")], exact_only=True)
