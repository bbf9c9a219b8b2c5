"""Tokens as answers show them one by one.

Owns: the text and the bytes of a token. Does not know: replies.
"""

from __future__ import annotations

from pensieve_jax.text.tokenizer import Tokenizer


class TokenTexts:
    """The texts of one vocabulary's tokens, kept once they were asked for."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """None has no texts: a token is then shown as its id."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """As it is written behind other text; what is no whole character by itself is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            tokenizer = self._tokenizer
            text = _name(token_id) if tokenizer is None else tokenizer.text_behind(token_id)
            self._texts[token_id] = text
        return text

    def opening(self, token_id: int) -> str:
        """As it is written where a reply begins: some tokenizers drop a space there."""
        return _name(token_id) if self._tokenizer is None else self._tokenizer.decode_raw([token_id])

    def raw(self, token_id: int) -> list[int] | None:
        """The bytes of its text; None where it is no text by itself and no single byte."""
        if self._tokenizer is None:
            return None
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            return [byte]
        text = self.text(token_id)
        return None if "\ufffd" in text else list(text.encode())


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
