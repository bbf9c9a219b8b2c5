"""The context of a turn is what the template writes for the whole conversation, in the ids as sampled."""

import functools
import pickle
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.core.errors import ChatTemplateError, InvalidRequestError, TokenizerMissingError
from pensieve_jax.text import ChatFormat, EarlierTurn, Tokenizer, byte_tokenizer
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


class Conversation:
    """A conversation as an engine holds it: turns, and the tokens of the context."""

    def __init__(self, tokenizer, **options):
        self.tokenizer = tokenizer
        self.format = ChatFormat(tokenizer, **options)
        self.turns, self.ids = [], []

    def begin(self, *messages):
        """Begin a turn: return how many tokens of the context stay, and the text of the prompt."""
        keep, prompt = self.format.turn_prompt(self.turns, self.ids, messages)
        assert prompt and 0 <= keep <= len(self.ids)
        self.messages, self.ids = messages, [*self.ids[:keep], *prompt]
        return keep, self.tokenizer.decode_raw(prompt)

    def end(self, ids, text=None):
        """End the turn with the reply's ids, and the text that was shown."""
        self.ids = [*self.ids, *ids]
        self.turns.append(EarlierTurn(self.messages, text, tuple(ids), len(self.ids)))

    def turn(self, message, text, ending=""):
        """Run a turn whose reply ends with ids that are not shown."""
        self.begin(user(message))
        ids = self.tokenizer.encode(text, add_bos=False) + self.tokenizer.encode(ending, add_bos=False)
        self.end(ids, text)

    @property
    def text(self):
        return self.tokenizer.decode_raw(self.ids)


def test_the_first_turn_is_the_whole_rendering():
    """A beginning-of-sequence token is there only if the template writes it."""
    for tokenizer, expected in (
        (chatml(), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (byte_tokenizer(), "<bos><|user|>hi<|end|><|assistant|>"),
    ):
        ids = ChatFormat(tokenizer).token_ids([user("hi")])
        assert ids == tokenizer.encode(expected, add_bos=False)
        assert ids.count(tokenizer.bos_id) == expected.count("<bos>")


@pytest.mark.parametrize(
    ("ending", "num_lost", "prompt"),
    [
        ("", 0, "<|im_end|>\n"),
        ("<|im_end|>", 0, "\n"),
        ("<|im_end|>\n", 0, ""),
        ("<s>", 1, "<|im_end|>\n"),  # another id ended the turn
        ("STOP", 4, "<|im_end|>\n"),  # a stop string
    ],
)
def test_a_later_turn_closes_the_reply_once(ending, num_lost, prompt):
    """Ids stay as far as they spell what the template writes."""
    chat = Conversation(chatml())
    chat.turn("hi", "the cat", ending)
    num_before = len(chat.ids)
    keep, text = chat.begin(user("and?"))
    assert text == prompt + "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert keep == num_before - num_lost


def test_an_empty_reply_is_closed_too():
    chat = Conversation(byte_tokenizer())
    chat.turn("a", "")
    assert chat.begin(user("b")) == (5, "<|end|><|user|>b<|end|><|assistant|>")


def test_a_cut_reply_without_text_is_rendered_from_its_ids():
    tokenizer = byte_tokenizer()
    end = tokenizer.encode("<|end|>", add_bos=False)
    for ids, num_kept, text in (
        (list(b"yo"), 2, "<|end|>"),
        ([*b"yo", *end], 3, ""),
        ([*b"y", *end, *b"o"], 1, "o<|end|>"),  # a marker within a reply is not text
    ):
        chat = Conversation(tokenizer)
        chat.begin(user("a"))
        num_prompt = len(chat.ids)
        chat.end(ids)
        assert chat.begin(user("b")) == (num_prompt + num_kept, text + "<|user|>b<|end|><|assistant|>")


contents = st.text(st.sampled_from("ab c\n{}%\u4e2d\"'<"), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(st.lists(contents, min_size=1, max_size=2), contents), min_size=1, max_size=4),
    ended=st.booleans(),
)
def test_turns_joined_are_one_rendering(turns, ended):
    """Contents are of any kind, with white space at their ends, and all tokens stay."""
    chat = Conversation(byte_tokenizer())
    expected = "<bos>"
    for texts, reply_text in turns:
        num_before = len(chat.ids)
        assert chat.begin(*map(user, texts))[0] == num_before
        expected += "".join(f"<|user|>{text}<|end|>" for text in texts) + "<|assistant|>"
        assert chat.ids == chat.tokenizer.encode(expected, add_bos=False)
        chat.end([*reply_text.encode(), *([261] if ended else [])], reply_text)
        expected += f"{reply_text}<|end|>"


def test_sampled_ids_stay_however_the_text_is_divided():
    """ "the" is spelled by its letters, which no tokenizer would return for the text."""
    tokenizer = chatml()
    letters = [tokenizer.encode(letter, add_bos=False)[0] for letter in "the"]
    assert letters != tokenizer.encode("the", add_bos=False)
    chat = Conversation(tokenizer)
    chat.begin(user("hi"))
    chat.end(letters, "the")
    before = list(chat.ids)
    assert chat.begin(user("x"))[1].startswith("<|im_end|>\n<|im_start|>user")
    assert chat.ids[: len(before)] == before


def test_a_template_in_the_manner_of_llama_2():
    """It writes spaces around a reply, and its own bos in every turn."""
    tokenizer = with_template(LLAMA2)
    for ids, num_kept, text in (
        ([*b" r", 257], 2, " <eos>"),  # sampled without the space before the end
        ([*b" r ", 257], 4, ""),
        (list(b" r"), 2, " <eos>"),
        (list(b"r"), 0, " r <eos>"),
    ):
        chat = Conversation(tokenizer)
        chat.begin(user("a"))
        num_prompt = len(chat.ids)
        chat.end(ids, "r")
        assert chat.begin(user("b")) == (num_prompt + num_kept, text + "<bos>[INST] b [/INST]")
    with pytest.raises(ChatTemplateError, match="Roles must alternate"):
        ChatFormat(tokenizer).token_ids([user("a"), user("b")])


REWRITING = [
    "{{ messages | length }} messages: " + PLAIN,
    PLAIN.replace("in messages", "in messages | reverse"),
    PLAIN.replace("in messages", "in messages[-1:]"),
    PLAIN.replace("\n", "{{ eos_token if loop.last }}\n"),
    PLAIN.replace("\n", "{{ eos_token if loop.last and m.role == 'assistant' }}\n"),
    PLAIN.replace("m.content", "m.content | upper"),
    PLAIN.replace("m.content", "m.content | trim"),
    PLAIN.replace("m.content", "m.content.split('e')[-1]"),
    PLAIN.replace("assistant: ", "assistant (thinking): "),
    PLAIN + "{{ messages[1].content if messages | length > 2 }}",
]


@pytest.mark.parametrize("template", [PLAIN, *REWRITING])
@pytest.mark.parametrize("ending", ["", "<eos>", "STOP"])
def test_the_context_is_the_rendering_of_the_whole(template, ending):
    """It holds for any template, and it takes as many tokens of the context as have that text."""
    tokenizer = with_template(template)
    chat = Conversation(tokenizer)
    messages = []
    for number, reply_text in enumerate((" one reply", "two\n", "", "three")):
        before = list(chat.ids)
        messages.append(user(f"question {number}"))
        keep, _ = chat.begin(messages[-1])
        expected = chat.format.token_ids(messages)
        assert chat.ids == expected
        assert keep == len(before) or before[keep] != expected[keep] or keep == len(expected) - 1
        chat.end(tokenizer.encode(f"{reply_text}{ending}", add_bos=False), reply_text)
        messages.append({"role": "assistant", "content": reply_text})


def test_the_day_is_that_of_the_turn():
    """A template that writes the date begins anew on the next day."""
    days = iter((datetime(2031, 1, 2), datetime(2031, 1, 2), datetime(2031, 1, 3)))
    template = "{{ strftime_now('%d') }} " + PLAIN
    chat = Conversation(with_template(template), now=lambda: next(days))
    chat.turn("a", "b")
    keep = chat.begin(user("c"))[0]
    assert keep == len(chat.text) - len("\nuser: c\nassistant: ")
    chat.end(b"d", "d")
    assert chat.begin(user("e"))[0] == 1 and chat.text.startswith("03 user: a\n")


def test_at_least_one_token_is_new():
    """Nothing may be left to write, but a step needs a token to sample the next one."""
    chat = Conversation(with_template("<{{ messages[0].content }}>"))
    chat.turn("a", "b")
    assert chat.begin(user("c")) == (2, ">")
    assert chat.text == "<a>"


# --- turns without messages


def test_chat_behind_raw_turns_starts_the_template_without_a_bos():
    tokenizer = byte_tokenizer()
    raw = EarlierTurn(None, "once", tuple(b"once"), 6)
    raw_ids = list(b"??once")
    chat = Conversation(tokenizer)
    chat.turns, chat.ids = [raw], raw_ids
    assert chat.begin(user("a")) == (6, "<|user|>a<|end|><|assistant|>")
    chat.end([*b"b", 261], "b")
    assert chat.begin(user("c")) == (12, "<|user|>c<|end|><|assistant|>")
    # A raw turn between chat turns: the template starts over after it.
    chat.end([*b"d", 261], "d")
    chat.ids += b"more"
    chat.turns.append(EarlierTurn(None, "more", tuple(b"re"), len(chat.ids)))
    num_before = len(chat.ids)
    assert chat.begin(user("e")) == (num_before, "<|user|>e<|end|><|assistant|>")


def test_raw_turns_stay_under_a_template_that_rewrites():
    chat = Conversation(with_template(REWRITING[0]))
    chat.turns, chat.ids = [EarlierTurn(None, "ce", tuple(b"ce"), 4)], list(b"once")
    assert chat.begin(user("a")) == (4, "1 messages: user: a\nassistant: ")
    chat.end(b"b", "b")
    assert chat.begin(user("c"))[0] == 4 and chat.text.startswith("once3 messages: user: a\n")


def test_a_tokenizer_without_special_tokens_renders_none_of_them():
    template = "{{ bos_token }}" + PLAIN + "{{ eos_token }}"
    tokenizer = Tokenizer(byte_tokenizer()._backend, chat_template=template)
    chat = ChatFormat(tokenizer)
    assert tokenizer.decode_raw(chat.token_ids([user("a")])) == "user: a\nassistant: "
    raw = EarlierTurn(None, "once", tuple(b"once"), 4)
    keep, ids = chat.turn_prompt([raw], list(b"once"), [user("a")])
    assert (keep, tokenizer.decode_raw(ids)) == (4, "user: a\nassistant: ")
    assert tokenizer.decode_raw(chat.prefix_token_ids([user("a")])).startswith("user: a")


# --- tokenization at the seam


def test_no_space_is_added_before_the_text_after_a_reply():
    backend = metaspace_backend(byte_fallback=False)
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", chat_template=PLAIN)
    chat = Conversation(tokenizer)
    chat.begin(user("a"))
    ids = [tokenizer._backend.token_to_id(piece) for piece in ("th", "e")]
    chat.end(ids, "the")
    before = list(chat.ids)
    keep, _ = chat.begin(user("a"))
    assert keep == len(before), "the tokenizer has one token for the space before the reply and the reply"
    assert tokenizer.token_text(chat.ids[keep]) == "\n"


# --- what templates may use


def test_templates_run_as_written_for_transformers():
    template = (
        "{% for m in messages %}{% if loop.index0 > 5 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ eos_token }}"
        "\n  {% if true %}\n  indented\n  {% endif %}\n"
    )
    chat = ChatFormat(with_template(template), now=lambda: datetime(2031, 1, 2))
    ids = chat.token_ids([{**user("<\u00e9>"), "name": "x"}])
    assert with_template("").decode_raw(ids) == (
        '{"role": "user", "content": "<\u00e9>", "name": "x"}2031<eos>\n  indented\n'
    )


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ none + 'a' }}"],
)
def test_templates_that_fail_or_reach_out_are_errors(template):
    with pytest.raises(ChatTemplateError, match="cannot render these messages") as caught:
        ChatFormat(with_template(template)).token_ids([user("a")])
    assert not caught.value.refuses_all


def test_missing_parts_are_named():
    with pytest.raises(TokenizerMissingError):
        ChatFormat(None)
    for template, words in ((None, "no chat template"), ("{% if %}", "not valid Jinja")):
        with pytest.raises(ChatTemplateError, match=words) as caught:
            ChatFormat(with_template(template))
        assert caught.value.refuses_all and pickle.loads(pickle.dumps(caught.value)).refuses_all


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
        ChatFormat(byte_tokenizer()).token_ids(messages)
