"""Tokens as answers show them one by one.

Owns: the text and the bytes of a token. Does not know: replies.
Called by: handlers that answer with log-probabilities or tokens.
"""

from __future__ import annotations

from pensieve_jax.text import Tokenizer


class TokenTexts:
    """The texts of one vocabulary's tokens, kept once they were asked for."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """None has no texts: a token is then shown as its id."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """As it is written; what is no whole character by itself is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = (
                f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode_raw([token_id])
            )
            self._texts[token_id] = text
        return text

    def raw(self, token_id: int) -> list[int] | None:
        """The bytes of its text; None where it is no text by itself."""
        text = self.text(token_id)
        return None if "\ufffd" in text or self._tokenizer is None else list(text.encode())
