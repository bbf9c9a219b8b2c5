"""Texts of single tokens: joined they are the text, and a byte is its byte."""

from __future__ import annotations

import pytest

from pensieve_jax.text.token_texts import TokenTexts
from tests.text.tokenizer_zoo import NAMES, ZOO

TEXT = "the cat sat on the bed, a hat is not."


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_tokens_joined_are_the_text(name):
    tokenizer = ZOO[name]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_bos=False)
    assert "".join(map(texts.text, ids)).removeprefix(" ") == TEXT
    # Some tokenizers drop a space where a reply begins.
    assert texts.opening(ids[0]) + "".join(map(texts.text, ids[1:])) == tokenizer.decode(ids) == TEXT
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
    assert (texts.text(0xC3), texts.raw(0xC3)) == ("\ufffd", None)
    nothing = TokenTexts(None)
    assert (nothing.text(7), nothing.opening(7), nothing.raw(7)) == ("token_id:7", "token_id:7", None)
