"""Joined deltas are the decoded text, cut at the stop string, and never contain half a character."""

import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text import IncrementalDetokenizer
from tests.text.tokenizer_zoo import NAMES, ZOO

names = st.sampled_from(NAMES)
texts = st.text(st.sampled_from("the cat \u4e2d\u00e9\u2581\U0001f642\n.<s>ab\ufffd"), max_size=30) | st.text(
    max_size=20
)


@st.composite
def replies(draw):
    """Draw a tokenizer and ids: of a text, at random, or mixed; some ids are outside the vocabulary."""
    tokenizer = ZOO[draw(names)]
    parts = draw(
        st.lists(
            texts.map(lambda text: tokenizer.encode(text, add_bos=False))
            | st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12),
            max_size=3,
        )
    )
    return tokenizer, [token_id for part in parts for token_id in part]


def stream(tokenizer, token_ids, stop=()):
    """Return the deltas, the number of ids used, and the stop string."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    deltas = []
    num_pushed = 0
    for token_id in token_ids:
        num_pushed += 1
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            break
    deltas.append(detokenizer.flush())
    return deltas, num_pushed, detokenizer.stop_string


@settings(max_examples=600, deadline=None)
@given(replies())
@example((ZOO["byte_fallback"], [1, 259, 259, 3 + 0xE4, 3 + 0xB8, 3 + 0xAD, 3 + 0xFF, 275, 2]))
@example((ZOO["byte_fallback"], [10_000, 282, 282]))
@example((ZOO["bytes"], [0xE4, 0xB8, 0x41, 0xFF, 0xF0, 0x9F]))
def test_deltas_join_to_the_decoded_text(reply):
    tokenizer, token_ids = reply
    deltas, _, _ = stream(tokenizer, token_ids)
    expected = tokenizer.decode(token_ids)
    assert "".join(deltas) == expected
    # The library's own decoding of the same ids.
    assert expected == tokenizer._backend.decode(token_ids, skip_special_tokens=True)


def expected_stop(tokenizer, token_ids, stop):
    """Return (text, ids used, stop string) by decoding every prefix again."""
    for num_pushed in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:num_pushed])
        if num_pushed < len(token_ids):
            text = text.rstrip("\ufffd")
        # A stop string completes with the shortest prefix of the text that contains one.
        for end in range(len(text) + 1):
            ended = [string for string in stop if text[:end].endswith(string)]
            if ended:
                string = max(ended, key=len)
                return text[: end - len(string)], num_pushed, string
    return tokenizer.decode(token_ids), len(token_ids), None


@settings(max_examples=600, deadline=None)
@given(replies(), st.data())
def test_text_ends_just_before_the_stop_string(reply, data):
    tokenizer, token_ids = reply
    text = tokenizer.decode(token_ids)
    spans = st.integers(0, max(len(text) - 1, 0)).flatmap(
        lambda at: st.integers(1, 6).map(lambda size: text[at : at + size] or "x")
    )
    stop = data.draw(st.lists(spans | st.text("the cab", min_size=1, max_size=4), min_size=1, max_size=3))
    # U+FFFD is the temporary decoding of a broken character, so it cannot be searched for while it may heal.
    stop = [string for string in stop if "\ufffd" not in string]
    deltas, num_pushed, stop_string = stream(tokenizer, token_ids, stop)
    assert ("".join(deltas), num_pushed, stop_string) == expected_stop(tokenizer, token_ids, stop)


@settings(max_examples=200, deadline=None)
@given(names, texts.filter(lambda text: "\ufffd" not in text))
def test_valid_text_streams_without_a_broken_character(name, text):
    tokenizer = ZOO[name]
    token_ids = tokenizer.encode(text, add_bos=False)
    deltas, _, _ = stream(tokenizer, token_ids)
    assert "\ufffd" not in "".join(deltas)


def test_text_is_returned_as_early_as_possible():
    tokenizer = ZOO["bytes"]
    deltas, _, _ = stream(tokenizer, list("a\u4e2db".encode()))
    assert deltas == ["a", "", "", "\u4e2d", "b", ""]
    deltas, _, _ = stream(tokenizer, list(b"xENyEN"), ["END"])
    assert deltas == ["x", "", "", "ENy", "", "", "EN"]
    deltas, _, stop_string = stream(tokenizer, list(b"xENDy"), ["END"])
    assert (deltas, stop_string) == (["x", "", "", "", ""], "END")


def test_a_stop_string_in_bytes_completes_with_its_last_byte():
    tokenizer = ZOO["byte_fallback"]
    token_ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "a\u00e9b".encode()]
    deltas, num_pushed, stop_string = stream(tokenizer, token_ids, ["\u00e9"])
    assert ("".join(deltas), num_pushed, stop_string) == ("a", 3, "\u00e9")


@pytest.mark.parametrize("stop", [[], ["\n\n", "\u00e9", "stop"]])
def test_a_run_of_bytes_is_decoded_when_it_ends(monkeypatch, stop):
    """It is not decoded again per token: text in a script that a vocabulary lacks is a single run."""
    tokenizer = ZOO["byte_fallback"]
    token_ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "\U0001f642".encode() * 500]
    sizes, decode = [], tokenizer.decode_window
    monkeypatch.setattr(tokenizer, "decode_window", lambda ids: (sizes.append(len(ids)), decode(ids))[1])
    deltas, _, _ = stream(tokenizer, token_ids, stop)
    assert "".join(deltas) == "\U0001f642" * 500
    assert sizes == [2000]


def test_an_incomplete_character_is_not_the_replacement_character():
    tokenizer = ZOO["bytes"]
    deltas, _, stop_string = stream(tokenizer, list("\u4e2d\ufffdb".encode()), ["\ufffd"])
    assert ("".join(deltas), stop_string) == ("\u4e2d", "\ufffd")
    deltas, _, stop_string = stream(tokenizer, [0x61, 0xFF, 0x62], ["\ufffd"])
    assert ("".join(deltas), stop_string) == ("a", "\ufffd")


def test_the_stop_string_that_completes_first_wins_and_of_those_the_longest():
    tokenizer = ZOO["bytes"]
    for stop, expected in (
        (["abc", "b"], ("xa", "b")),
        (["bc", "abc"], ("x", "abc")),
        (["c", "abcd"], ("xab", "c")),
    ):
        deltas, _, stop_string = stream(tokenizer, list(b"xabcd"), stop)
        assert ("".join(deltas), stop_string) == expected


def test_below_min_tokens_a_stop_string_is_text():
    detokenizer = IncrementalDetokenizer(ZOO["bytes"], ["aa"])
    deltas = [detokenizer.push(byte, may_stop=at >= 3) for at, byte in enumerate(b"xaaaab")]
    # The third "a" is the first that may complete it, with the second before it.
    assert ("".join(deltas), detokenizer.stop_string) == ("xa", "aa")


def test_below_min_tokens_a_stop_string_in_revocable_text_is_text():
    """A run of byte tokens is final only after its end, where the reply may already stop."""
    tokenizer = ZOO["byte_fallback"]
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "\u00e9a\u00e9b".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, ["\u00e9"])
    deltas = [detokenizer.push(token_id, may_stop=at >= 3) for at, token_id in enumerate(ids)]
    assert ("".join(deltas), detokenizer.stop_string) == ("\u00e9a", "\u00e9")
    detokenizer = IncrementalDetokenizer(tokenizer, ["\u00e9"])
    deltas = [detokenizer.push(token_id, may_stop=False) for token_id in ids[:2]]
    assert ("".join(deltas), detokenizer.flush(may_stop=False)) == ("", "\u00e9")
    assert detokenizer.stop_string is None
    # "!" with the first byte of a character, which heals.
    detokenizer = IncrementalDetokenizer(tokenizer, ["!"])
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "!\u00e9".encode()]
    deltas = [detokenizer.push(token_id, may_stop=at >= 2) for at, token_id in enumerate(ids)]
    assert ("".join(deltas) + detokenizer.flush(), detokenizer.stop_string) == ("!\u00e9", None)


@pytest.mark.parametrize("string", ["ab" * 500, "a" * 999 + "b", "a" * 500 + "b" + "a" * 499])
def test_a_long_stop_string_takes_little_memory(string):
    """It once stored every prefix of it: half a megabyte here, and all memory for one of 10 MiB."""
    tracemalloc.start()
    try:
        detokenizer = IncrementalDetokenizer(ZOO["bytes"], [string])
        text = "".join(map(detokenizer.push, f"x{string}".encode()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (text, detokenizer.stop_string) == ("x", string)
    assert peak < 200_000


repetitive = st.text("ab", min_size=1, max_size=12)


@settings(max_examples=600, deadline=None)
@given(st.text("abc", max_size=40), st.lists(repetitive, min_size=1, max_size=4), st.integers(0, 40))
@example("aabaaabaab", ["aabaab"], 0)
@example("aaaab", ["aab", "aaab"], 4)
def test_self_repeating_stop_strings(text, stop, num_least):
    detokenizer = IncrementalDetokenizer(ZOO["bytes"], stop)
    out = ""
    for at, byte in enumerate(text.encode()):
        out += detokenizer.push(byte, may_stop=at >= num_least)
        said = text[: at + 1]
        ended = [string for string in stop if said.endswith(string)] if at >= num_least else []
        if ended:
            longest = max(ended, key=len)
            assert (out, detokenizer.stop_string) == (said.removesuffix(longest), longest)
            return
        held = max(n for string in stop for n in range(len(string)) if n == 0 or said.endswith(string[:n]))
        assert (out, detokenizer.stop_string) == (said[: len(said) - held], None)
    assert out + detokenizer.flush() == text


def test_nothing_comes_after_a_stop_string():
    detokenizer = IncrementalDetokenizer(ZOO["bytes"], ["b"])
    assert [detokenizer.push(byte) for byte in b"abc"] == ["a", "", ""]
    assert detokenizer.flush() == ""


def test_special_tokens_are_not_text_and_keep_the_space_behind_them():
    tokenizer = ZOO["byte_fallback"]
    the = tokenizer._backend.token_to_id("\u2581the")
    deltas, _, _ = stream(tokenizer, [tokenizer.bos_id, the, tokenizer.eos_id, the])
    assert "".join(deltas) == "the the"


@pytest.mark.parametrize("stop", ["abc", [""], ["a", ""], [None], [b"a"]])
def test_invalid_stop_strings_are_refused(stop):
    with pytest.raises(InvalidRequestError, match=r"^stop"):
        IncrementalDetokenizer(ZOO["bytes"], stop)


USER, END = 258, 261  # <|user|> and <|end|> of the byte tokenizer


@pytest.mark.parametrize(
    ("stop", "ids", "expected"),
    [
        (["<|user|>"], [*b"hi", USER, *b"x"], ("hi", 3, "<|user|>")),
        (["<|user|>"], [*b"hi", END, USER], ("hi", 4, "<|user|>")),
        (["<|user|>"], [USER], ("", 1, "<|user|>")),
        (["<|user|>"], [*b"a<|user|>"], ("a", 9, "<|user|>")),  # written with other tokens
        (["i<|user|>"], [*b"hi", USER], ("h", 3, "i<|user|>")),
        (["i<|user|>"], [*b"ho", USER, *b"i", END, USER], ("hoi", 6, None)),
        (["<|user|>ab"], [*b"h", USER, *b"aab", USER, *b"abc"], ("haab", 8, "<|user|>ab")),
        (["x<|user|>y"], [*b"xx", USER, *b"yz"], ("x", 4, "x<|user|>y")),
        (["<|end|><|user|>"], [*b"a", END, END, USER], ("a", 4, "<|end|><|user|>")),
        (["<|user|>", "i<|user|>"], [*b"hi", USER], ("h", 3, "i<|user|>")),
        (["ab", "<|user|>"], [*b"a", END, *b"bc"], ("", 3, "ab")),  # other strings are of the text alone
        (["a<|user|>", "<|user|>b"], [*b"a", END, USER, *b"b"], ("a", 4, "<|user|>b")),
        (["<|user|>"], [*b"a", 0xE4, 0xB8, USER, 0xAD], ("a\ufffd", 4, "<|user|>")),
        (["\u4e2d<|user|>"], [*"a\u4e2d".encode(), USER], ("a", 5, "\u4e2d<|user|>")),
        (["|>"], [*b"a", USER, *b"b"], ("ab", 3, None)),  # no whole control token
    ],
)
def test_a_stop_string_may_have_the_spelling_of_a_control_token(stop, ids, expected):
    deltas, num_pushed, stop_string = stream(ZOO["bytes"], ids, stop)
    assert ("".join(deltas), num_pushed, stop_string) == expected


@pytest.mark.parametrize(
    ("stop", "text", "ids_after", "expected"),
    [
        ("\n</s>", "a\n", ["</s>"], "a"),  # "\n" is a byte token, which is text only after a run
        ("</s>a", "c\n", ["</s>", "a"], "c\n"),
        ("</s>\n", "c", ["</s>", "<0x0A>"], "c"),
        ("\u00e9</s>", "a\u00e9", ["</s>"], "a"),
    ],
)
def test_a_control_token_after_byte_tokens_completes_a_stop_string(stop, text, ids_after, expected):
    tokenizer = ZOO["byte_fallback"]
    find = tokenizer._backend.token_to_id
    pieces = [find(one) if find(one) is not None else None for one in text]
    ids = [
        token_id
        for piece, character in zip(pieces, text, strict=True)
        for token_id in (
            [find(f"<0x{byte:02X}>") for byte in character.encode()] if character in "\n\u00e9" else [piece]
        )
    ]
    ids += [find(one) for one in ids_after]
    deltas, num_pushed, stop_string = stream(tokenizer, ids, [stop])
    assert ("".join(deltas), num_pushed, stop_string) == (expected, len(ids), stop)


def test_below_min_tokens_a_control_token_ends_nothing():
    detokenizer = IncrementalDetokenizer(ZOO["bytes"], ["<|user|>"])
    deltas = [detokenizer.push(one, may_stop=at >= 2) for at, one in enumerate([*b"a", USER, *b"b", USER])]
    assert ("".join(deltas), detokenizer.stop_string) == ("ab", "<|user|>")


SPELLED = {USER: "<|user|>", END: "<|end|>", ord("a"): "a", ord("b"): "b", ord("<"): "<"}
written = st.lists(st.sampled_from(list(SPELLED)), max_size=14)
some_stop = st.lists(st.sampled_from(list(SPELLED)), min_size=1, max_size=4).map(
    lambda ids: "".join(map(SPELLED.__getitem__, ids))
)


@settings(max_examples=600, deadline=None)
@given(written, st.lists(some_stop, min_size=1, max_size=3), st.integers(0, 8))
def test_stop_strings_with_control_tokens_equal_a_search_in_the_written_text(ids, stop, num_least):
    """The reference searches the text, and for strings with a control token what is written as well."""
    detokenizer = IncrementalDetokenizer(ZOO["bytes"], stop)
    out, text, spelled, shown = "", "", "", []
    for at, token_id in enumerate(ids):
        out += detokenizer.push(token_id, may_stop=at >= num_least)
        is_text = token_id not in (USER, END)
        text += SPELLED[token_id] * is_text
        spelled += SPELLED[token_id]
        shown += [is_text] * len(SPELLED[token_id])
        ended = []
        for string in stop if at >= num_least else ():
            if is_text and text.endswith(string):
                ended.append((len(string), string, len(string)))
            names_one = "<|user|>" in string or "<|end|>" in string
            num_new = len(SPELLED[token_id])
            ends = range(len(spelled) - num_new + 1, len(spelled) + 1)
            for end in ends if names_one else ():
                if spelled[:end].endswith(string):
                    ended.append((len(string), string, sum(shown[end - len(string) : end])))
                    break
        if ended:
            _, longest, size = max(ended)
            assert (out, detokenizer.stop_string) == (text[: len(text) - size], longest)
            return
        assert detokenizer.stop_string is None and text.startswith(out)
    assert out + detokenizer.flush() == text


@settings(max_examples=400, deadline=None)
@given(replies(), st.sets(st.integers(0, 9)))
def test_shown_control_tokens_are_text_and_others_are_not(reply, chosen):
    tokenizer, token_ids = reply
    control_ids = sorted(tokenizer.special_ids)
    shown = [tokenizer.token_text(control_ids[one]) for one in chosen if one < len(control_ids)]
    detokenizer = IncrementalDetokenizer(tokenizer, (), shown)
    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
    known = [one for one in token_ids if tokenizer.token_text(one) is not None]
    visible = [one for one in known if one not in control_ids or tokenizer.token_text(one) in shown]
    assert text == tokenizer.decode_raw(visible)


def test_a_stop_string_may_have_a_shown_control_token():
    ids = [*b"a", USER, *b"b", END, *b"c"]
    detokenizer = IncrementalDetokenizer(ZOO["bytes"], ["b<|end|>"], ["<|user|>", "<|end|>"])
    assert "".join(map(detokenizer.push, ids)) == "a<|user|>"
    assert detokenizer.stop_string == "b<|end|>"
