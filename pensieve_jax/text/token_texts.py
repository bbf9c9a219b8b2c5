"""The texts of single tokens, as responses show them, and where they stand in a reply.

Owns: the text, the bytes and the names of a token, and the offsets of a reply's tokens in its text. Does not
know: sampling, or the fields of responses.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pensieve_jax.text.detokenizer import IncrementalDetokenizer
from pensieve_jax.text.tokenizer import Tokenizer


class TokenTexts:
    """The texts of one vocabulary's tokens, cached once requested.

    Attributes:
      tokenizer: the vocabulary's tokenizer, or None.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Use `tokenizer`; with None, a token is shown as its id."""
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the token's text after other text; bytes that are not a whole character become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            tokenizer = self.tokenizer
            text = _numbered(token_id) if tokenizer is None else tokenizer.text_after(token_id)
            self._texts[token_id] = text
        return text

    def raw(self, token_id: int) -> list[int] | None:
        """Return the bytes of the token; None without a tokenizer, or if they are unknown."""
        found = None if self.tokenizer is None else self.tokenizer.bytes_of(token_id)
        return None if found is None else list(found)

    def name(self, token_id: int) -> str:
        r"""Return the token's text, or `bytes:\xe4\xb8` for bytes that are not a whole character."""
        text = self.text(token_id)
        if "\ufffd" not in text:
            return text
        raw = self.raw(token_id)
        return _numbered(token_id) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def keys(self, chosen_id: int, likely_ids: Iterable[int]) -> dict[int, str]:
        """Return a different key for each of these tokens, by id.

        The chosen token has its name, whether or not it is among the likely ones. Another token has its name
        too, or `token_id:<id>` if the name is empty or is the key of a token before it.
        """
        keys = {chosen_id: self.name(chosen_id)}
        taken = set(keys.values())
        for token_id in likely_ids:
            if token_id not in keys:
                name = self.name(token_id)
                keys[token_id] = name if name and name not in taken else _numbered(token_id)
                taken.add(keys[token_id])
        return keys


class TokenOffsets:
    """Where the tokens of one reply begin in its text, in characters.

    A token that is a part of a character has the offset of that character. A token without text, such as a
    control token, has the offset of the text after it.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Start at the beginning of a reply; without a tokenizer it has no text."""
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._num_final = 0  # characters of the text that later tokens cannot change
        # A run of `<0x..>` tokens becomes text only at its end, so its characters are counted here.
        self._run = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_in_run = 0

    def next(self, token_id: int, text: str) -> int:
        """Return the offset of the next token, whose text by itself is `text`."""
        if self._tokenizer is None or self._detokenizer is None:
            return 0
        offset = self._num_final + self._num_in_run
        final = self._detokenizer.push(token_id)
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            self._num_in_run += len(self._run.decode(bytes([byte])))
        if final:
            self._num_final += len(final)
            self._run.reset()
            self._num_in_run = 0
            if text and final.endswith(text):  # bytes before it turned out not to be a character
                offset = self._num_final - len(text)
        return offset


class Echo(NamedTuple):
    """A prompt as a response repeats it.

    Attributes:
      text: the prompt's text.
      offsets: where its tokens begin in the text, in characters; empty if they are not needed.
    """

    text: str
    offsets: list[int]


def echo_of(
    tokenizer: Tokenizer | None, prompt: str | Sequence[int], token_ids: Sequence[int], *, has_offsets: bool
) -> Echo:
    """Return a prompt's text and the offsets of its tokens.

    A text is repeated as it was sent. Ids become the text that they would have in a reply.

    Args:
      tokenizer: None if the model has none; ids then have no text.
      prompt: text or ids, as it was sent.
      token_ids: its ids, with those that precede every text.
      has_offsets: whether to find the offsets.
    """
    if tokenizer is None:
        return Echo("", [0] * len(token_ids) if has_offsets else [])
    if isinstance(prompt, str):
        offsets = tokenizer.offsets(prompt) if has_offsets else []
        return Echo(prompt, [0] * (len(token_ids) - len(offsets)) + offsets if has_offsets else [])
    text = tokenizer.decode(token_ids)
    if not has_offsets:
        return Echo(text, [])
    found = TokenOffsets(tokenizer)
    return Echo(text, [found.next(one, tokenizer.text_after(one)) for one in token_ids])


def _numbered(token_id: int) -> str:
    return f"token_id:{token_id}"
