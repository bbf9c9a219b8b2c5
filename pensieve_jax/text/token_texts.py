"""The texts of single tokens, as responses show them.

Owns: the text and the bytes of a token. Does not know: replies.
"""

from __future__ import annotations

from pensieve_jax.text.tokenizer import Tokenizer


class TokenTexts:
    """The texts of one vocabulary's tokens, cached once requested."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Use `tokenizer`; with None, a token is shown as its id."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the token's text after other text; bytes that are not a whole character become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            tokenizer = self._tokenizer
            text = _name(token_id) if tokenizer is None else tokenizer.text_after(token_id)
            self._texts[token_id] = text
        return text

    def opening(self, token_id: int) -> str:
        """Return the token's text at the beginning of a reply, where some tokenizers drop a space."""
        return _name(token_id) if self._tokenizer is None else self._tokenizer.decode_raw([token_id])

    def raw(self, token_id: int) -> list[int] | None:
        """Return the bytes of the token; None if it is neither text by itself nor a single byte."""
        if self._tokenizer is None:
            return None
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            return [byte]
        text = self.text(token_id)
        return None if "\ufffd" in text else list(text.encode())


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
