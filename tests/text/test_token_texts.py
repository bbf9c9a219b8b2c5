"""Texts of single tokens: joined they are the text, and a byte is its byte."""

from __future__ import annotations

import random

import pytest

from pensieve_jax.text import Tokenizer
from pensieve_jax.text.token_texts import TokenOffsets, TokenTexts
from tests.seeds import new_seed
from tests.text.tokenizer_zoo import NAMES, ZOO, byte_level_backend

TEXT = "the cat sat on the bed, a hat is not."


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_tokens_joined_are_the_text(name):
    tokenizer = ZOO[name]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_bos=False)
    assert "".join(map(texts.text, ids)).removeprefix(" ") == TEXT
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(bytes(texts.raw(token_id)) for token_id in ids).decode().removeprefix(" ") == TEXT


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_a_word_keeps_the_space_in_front_of_it(name):
    tokenizer = ZOO[name]
    texts = TokenTexts(tokenizer)
    the, space = (tokenizer._backend.token_to_id(token) for token in ("\u2581the", "\u2581"))
    assert (texts.text(the), texts.raw(the)) == (" the", list(b" the"))
    assert (texts.text(space), texts.raw(space)) == (" ", [0x20])
    assert texts.text(tokenizer.bos_id) == "<s>"


def test_a_byte_that_is_no_character_has_its_byte():
    tokenizer = ZOO["byte_fallback"]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("\u00e9\n", add_bos=False)[1:]
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<0xC3>", "<0xA9>", "\n"]
    assert [texts.raw(token_id) for token_id in ids] == [[0xC3], [0xA9], [0x0A]]
    assert [texts.text(token_id) for token_id in ids] == ["\ufffd", "\ufffd", "\n"]
    newline = tokenizer._backend.token_to_id("<0x0A>")
    assert (texts.text(newline), texts.raw(newline)) == ("\n", [0x0A])


def test_tokens_without_a_text_of_their_own():
    texts = TokenTexts(ZOO["bytes"])
    assert (texts.text(0xC3), texts.raw(0xC3), texts.name(0xC3)) == ("\ufffd", [0xC3], r"bytes:\xc3")
    nothing = TokenTexts(None)
    assert (nothing.text(7), nothing.name(7), nothing.raw(7)) == ("token_id:7", "token_id:7", None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["h\u00e9llo w\u00f6rld", "\u4e2d\u6587 \U0001f642 the", "a\u00a0b\r\n"])
def test_the_bytes_of_tokens_joined_are_those_of_the_text(name, text):
    tokenizer = ZOO[name]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_bos=False)
    if "<unk>" in map(tokenizer.token_text, ids):
        pytest.skip("the vocabulary does not have the text")
    assert b"".join(bytes(texts.raw(token_id)) for token_id in ids).decode().removeprefix(" ") == text


def test_a_spelling_with_characters_that_stand_for_no_byte_is_itself():
    backend = byte_level_backend()
    backend.add_tokens(["\ufffd \u00e9"])  # a text with U+FFFD that is written as it is
    texts = TokenTexts(Tokenizer(backend, bos_token="<s>", eos_token="</s>"))
    assert texts.raw(backend.token_to_id("\ufffd \u00e9")) == list("\ufffd \u00e9".encode())


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_reply_with_control_tokens_are_those_of_its_text(name):
    tokenizer = ZOO[name]
    texts = TokenTexts(tokenizer)
    ids = [*tokenizer.encode("the cat", add_bos=False), tokenizer.bos_id, *tokenizer.encode_after(None, "a")]
    ids += [tokenizer.vocab_size + 1, tokenizer.eos_id]
    joined = b"".join(bytes(texts.raw(token_id)) for token_id in ids)
    assert joined.decode().removeprefix(" ") == tokenizer.decode(ids)


def test_keys_of_one_position_differ_and_the_chosen_token_has_its_name():
    texts = TokenTexts(ZOO["bytes"])
    parts, beyond = [0xE4, 0xB8, 0xAD], [300, 301]
    keys = texts.keys(301, [ord("a"), *parts, *beyond])
    assert keys == {
        301: "",
        ord("a"): "a",
        0xE4: r"bytes:\xe4",
        0xB8: r"bytes:\xb8",
        0xAD: r"bytes:\xad",
        300: "token_id:300",
    }
    tokenizer = ZOO["byte_fallback"]
    plain, byte = (tokenizer._backend.token_to_id(token) for token in ("a", "<0x61>"))
    texts = TokenTexts(tokenizer)
    assert texts.keys(plain, [byte, plain]) == {plain: "a", byte: f"token_id:{byte}"}
    assert texts.keys(byte, [plain, byte]) == {plain: f"token_id:{plain}", byte: "a"}
    assert texts.keys(7777, [byte, plain]) == {7777: "", byte: "a", plain: f"token_id:{plain}"}


@pytest.mark.parametrize("name", NAMES)
def test_offsets_find_every_token_with_a_text_of_its_own_in_any_reply(name):
    """Replies of random ids: broken characters, control tokens and ids beyond the vocabulary included."""
    seed = new_seed()
    rng = random.Random(seed)
    tokenizer = ZOO[name]
    texts = TokenTexts(tokenizer)
    words = tokenizer.encode(TEXT, add_bos=False)
    num_found = 0
    for _ in range(200):
        ids = [
            rng.choice((rng.choice(words), rng.randrange(tokenizer.vocab_size + 3)))
            for _ in range(rng.randrange(1, 12))
        ]
        text, offsets = tokenizer.decode(ids), TokenOffsets(tokenizer)
        visible = [one for one in ids if one not in tokenizer.special_ids and tokenizer.token_text(one)]
        for token_id in ids:
            own = texts.text(token_id)
            offset = offsets.next(token_id, own)
            assert 0 <= offset <= len(text)
            is_byte = tokenizer.byte_of(token_id) is not None  # an invalid run of bytes is all U+FFFD
            if token_id in visible and own and "\ufffd" not in own and not is_byte:
                begins = token_id == visible[0] and offset == 0
                shown = own.removeprefix(" ") if begins and not text.startswith(own) else own
                assert text[offset : offset + len(shown)] == shown, (ids, token_id)
                num_found += 1
    assert num_found > 100


@pytest.mark.parametrize("name", NAMES)
def test_offsets_of_characters_of_several_tokens_and_of_control_tokens(name):
    tokenizer = ZOO[name]
    letters = [token_id for text in "th" for token_id in tokenizer.encode_after(None, text)][:1]
    control = [tokenizer.eos_id]
    partial = {
        "bytes": list("\u4e2d".encode()),
        "byte_level": [tokenizer._backend.token_to_id(one) for one in "\u00e4\u00b8\u0143"],
        "byte_fallback": [tokenizer._backend.token_to_id(f"<0x{one:02X}>") for one in "\u4e2d".encode()],
        "metaspace": [],
    }[name]
    ids = [*letters, *partial, *control, *letters]
    text, offsets = tokenizer.decode(ids), TokenOffsets(tokenizer)
    found = [offsets.next(token_id, tokenizer.text_after(token_id)) for token_id in ids]
    size = 1 if partial else 0
    assert found == [0, *[1] * len(partial), 1 + size, 1 + size], text


def test_offsets_in_a_run_of_bytes_count_its_characters():
    tokenizer = ZOO["byte_fallback"]
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "\n\u00e9\n".encode()]
    offsets = TokenOffsets(tokenizer)
    assert [offsets.next(token_id, tokenizer.text_after(token_id)) for token_id in ids] == [0, 1, 1, 2]
    assert TokenOffsets(None).next(7, "token_id:7") == 0
